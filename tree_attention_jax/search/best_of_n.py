"""Best-of-n: sample n sequences independently, keep the best one by likelihood, by a reward, or by a vote.

Stiennon et al., "Learning to summarize from human feedback", 2020 (the best of n samples by a reward model). Wang et
al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022 (the vote).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from tree_attention_jax.search.controller import Decision, Hypothesis, as_columns, as_scores, as_token_set


class BestOfN:
    """Samples `n` sequences. Their prompt is shared; they part at the first token."""

    def __init__(
        self,
        n: int,
        max_length: int,
        eos: Any = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        reward: Callable[[np.ndarray], float] | None = None,
        seed: int = 0,
    ):
        """
        Args:
            n: sequences.
            max_length: tokens to generate at most, the end-of-sequence token included.
            eos: token id or ids that end a sequence.
            temperature: of the sampling; 0 is greedy.
            top_p: sample among the likeliest tokens that together have at least this probability (Holtzman et al.,
                "The Curious Case of Neural Text Degeneration", 2019).
            reward: score of a finished sequence, from its generated tokens, int32 [length]. None: its mean
                log-probability a token, at temperature 1.
            seed: of NumPy's generator.
        """
        if n < 1 or max_length < 1:
            raise ValueError(f"n and max_length must be at least 1, got {n} and {max_length}")
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature must be at least 0 and top_p in (0, 1], got {temperature} and {top_p}")
        self.n, self.max_length, self.eos = n, max_length, as_token_set(eos)
        self.temperature, self.top_p, self.reward = temperature, top_p, reward
        self._rng = np.random.default_rng(seed)
        self._tokens = np.zeros((n, max_length), np.int32)
        self._scores = np.zeros(n)
        self._running = np.arange(n)
        self._lengths = np.zeros(n, np.int64)
        self._generated = 0

    def decide(self, scores: Any, tokens: Any = None) -> Decision:
        """
        Args:
            scores: logits [L, vocabulary] of the L leaves still running (1 at first).
            tokens: int [L, k], to sample from k tokens of each leaf only (top-k sampling): which ones. Then `scores`
                are their log-probabilities [L, k].
        """
        first = self._generated == 0
        scores = as_scores("scores", scores, 1 if first else self._running.size)
        columns = as_columns(tokens, scores)
        if first:
            scores, columns = np.repeat(scores, self.n, axis=0), np.repeat(columns, self.n, axis=0)
        at = np.arange(scores.shape[0]), sample(scores, self.temperature, self.top_p, self._rng)
        chosen = columns[at].astype(np.int32)
        self._tokens[self._running, self._generated] = chosen
        self._scores[self._running] += (_log_softmax(scores) if tokens is None else scores)[at]
        self._generated += 1
        self._lengths[self._running] = self._generated
        goes_on = ~np.isin(chosen, self.eos) if self._generated < self.max_length else np.zeros(chosen.size, bool)
        self._running = self._running[goes_on]
        rows = np.flatnonzero(goes_on)
        return Decision(np.zeros_like(rows) if first else rows, chosen[goes_on], not goes_on.any())

    def results(self) -> list[Hypothesis]:
        """The sequences that have ended so far, best first."""
        running = set(self._running.tolist())
        ended = (self._hypothesis(i) for i in range(self.n) if i not in running)
        return sorted(ended, key=lambda h: -h.score)

    def vote(self, answer: Callable[[np.ndarray], Hashable]) -> Hashable:
        """The answer that most sequences give; of equally frequent ones, the one with the best sequence."""
        votes: dict[Hashable, int] = {}
        for hypothesis in self.results():
            key = answer(hypothesis.tokens)
            votes[key] = votes.get(key, 0) + 1
        if not votes:
            raise ValueError("no sequence has ended yet")
        return max(votes, key=lambda key: votes[key])

    def _hypothesis(self, i):
        tokens = self._tokens[i, : self._lengths[i]].copy()
        score = self._scores[i] / tokens.size if self.reward is None else self.reward(tokens)
        return Hypothesis(tokens, float(score), float(self._scores[i]))


def sample(logits: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> np.ndarray:
    """One column of each row of `logits` [n, vocabulary]: int64 [n]."""
    if temperature == 0:
        return np.argmax(logits, axis=1)
    logits = _log_softmax(logits / temperature)
    if top_p < 1:
        order = np.argsort(-logits, axis=1, kind="stable")
        sorted_p = np.exp(np.take_along_axis(logits, order, axis=1))
        drop = np.cumsum(sorted_p, axis=1) - sorted_p >= top_p  # the likelier ones already have enough
        logits = logits.copy()
        np.put_along_axis(logits, order, np.where(drop, -np.inf, np.take_along_axis(logits, order, axis=1)), axis=1)
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)


def _log_softmax(x):
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
