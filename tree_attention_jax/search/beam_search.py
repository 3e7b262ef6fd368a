"""Beam search with length penalty, early stopping and diverse groups.

Wu et al., "Google's Neural Machine Translation System", 2016: the length penalty ((5 + n) / 6) ** alpha. Vijayakumar
et al., "Diverse Beam Search", 2018: groups, each penalised for the tokens that earlier groups chose in this step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tree_attention_jax.search.controller import Decision, Hypothesis, as_columns, as_scores, as_token_set


class BeamSearch:
    """Keeps the `width` likeliest continuations.

    A hypothesis ends with an end-of-sequence token that ranks among its group's best `width / groups` candidates. It
    is scored by log-probability / ((5 + n) / 6) ** length_penalty, with n its tokens, the last one included.
    """

    def __init__(
        self,
        width: int,
        max_length: int,
        eos: Any = None,
        length_penalty: float = 0.0,
        early_stop: bool = False,
        groups: int = 1,
        diversity: float = 0.0,
    ):
        """
        Args:
            width: beams, over all groups.
            max_length: tokens to generate at most; what still runs then ends there.
            eos: token id or ids that end a sequence.
            length_penalty: alpha; above 0 favours long sequences.
            early_stop: a group stops as soon as its share of `width` hypotheses have ended. Otherwise, when none of
                its beams can beat the worst of them any more: that gives what running to `max_length` would give.
            groups: how many groups to split the beams into; divides `width`.
            diversity: subtracted from a token's score for each time an earlier group chose it in this step.
        """
        if width < 1 or groups < 1 or width % groups:
            raise ValueError(f"width must be a positive multiple of groups, got {width} and {groups}")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.width, self.groups, self.max_length = width, groups, max_length
        self.eos = as_token_set(eos)
        self.length_penalty, self.early_stop, self.diversity = length_penalty, early_stop, diversity
        self._group_width = width // groups
        self._beams = np.zeros((1, 0), np.int32)  # tokens of the running beams, [L, generated]
        self._scores = np.zeros(1)  # their log-probabilities
        self._members = [np.zeros(1, np.int64)] * groups  # rows of each group
        self._ended: list[list[Hypothesis]] = [[] for _ in range(groups)]

    def decide(self, scores: Any, tokens: Any = None) -> Decision:
        """
        Args:
            scores: log-probabilities [L, vocabulary] of the L current leaves (1 at first), none above 0.
            tokens: int [L, k], where `scores` are [L, k] only: which tokens they are of. With `diversity` 0, the
                best `width / groups * (1 + number of eos tokens)` of each leaf give the same result as all.
        """
        scores = as_scores("scores", scores, self._scores.size)
        columns = as_columns(tokens, scores)
        total = self._scores[:, None] + scores
        grown: list[tuple[np.ndarray, np.ndarray]] = []  # rows and columns of `total` that each group goes on with
        for group in range(self.groups):
            chosen_before = np.concatenate([columns[at] for at in grown] or [columns[:0, 0]])
            at = self._grow(group, total, columns, chosen_before)
            over = self._is_over(group, total[at])
            grown.append((at[0][:0], at[1][:0]) if over else at)
        rows, cols = (np.concatenate(x) for x in zip(*grown))
        chosen = columns[rows, cols].astype(np.int32)
        self._beams = np.concatenate([self._beams[rows], chosen[:, None]], axis=1)
        self._scores = total[rows, cols]
        self._members = np.split(np.arange(rows.size), np.cumsum([at[0].size for at in grown])[:-1])
        done = not rows.size or self._beams.shape[1] == self.max_length
        if done:
            for group, members in enumerate(self._members):
                for row in members:
                    self._end(group, self._beams[row], self._scores[row])
        return Decision(rows, chosen, done)

    def results(self) -> list[Hypothesis]:
        """Hypotheses that have ended so far, best first: at most `width`, of each group its own best."""
        return sorted((h for ended in self._ended for h in ended), key=lambda h: -h.score)

    def score(self, log_probability: float, length: int) -> float:
        """What a sequence of `length` tokens is ranked by."""
        return float(log_probability / ((5 + length) / 6) ** self.length_penalty)

    def _grow(self, group, total, columns, chosen_before):
        # The group's next beams as (rows, columns) of `total`; hypotheses that end on the way are put aside.
        members, width = self._members[group], self._group_width
        ranked = total[members]
        if self.diversity and chosen_before.size:
            ranked = ranked - self.diversity * _times(chosen_before, columns[members])
        ranked = ranked.reshape(-1)
        count = min(width * (1 + self.eos.size), ranked.size)  # enough for `width` that don't end
        best = np.argpartition(-ranked, count - 1)[:count] if count else np.zeros(0, np.int64)
        best = best[np.argsort(-ranked[best], kind="stable")]
        best = best[ranked[best] > -np.inf]
        rows, cols = members[best // total.shape[1]], best % total.shape[1]
        ends = np.isin(columns[rows, cols], self.eos)
        for row, col in zip(rows[:width][ends[:width]], cols[:width][ends[:width]]):
            self._end(group, np.append(self._beams[row], columns[row, col]), total[row, col])
        return rows[~ends][:width], cols[~ends][:width]

    def _end(self, group, tokens, log_probability):
        score = self.score(log_probability, tokens.size)
        hypothesis = Hypothesis(tokens.astype(np.int32), score, float(log_probability))
        self._ended[group] = sorted([*self._ended[group], hypothesis], key=lambda h: -h.score)[: self._group_width]

    def _is_over(self, group, running):
        # Whether a group that would go on with beams of these log-probabilities need not.
        ended = self._ended[group]
        if not running.size or len(ended) < self._group_width:
            return not running.size
        if self.early_stop:
            return True
        # The penalty is monotonous in the length, so a beam's best is at one end of the lengths to come.
        lengths = self._beams.shape[1] + 1, self.max_length
        return max(self.score(running.max(), n) for n in lengths) <= ended[-1].score


def _times(values, columns):
    """How often each entry of `columns` occurs in `values`."""
    unique, counts = np.unique(values, return_counts=True)
    at = np.minimum(np.searchsorted(unique, columns), unique.size - 1)
    return np.where(unique[at] == columns, counts[at], 0)
