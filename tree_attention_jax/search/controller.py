"""The protocol between a decoding loop and what decides how its tree grows.

A controller sees numbers only, one row of scores a leaf, and answers which leaf each next leaf continues. A leaf that
several continue forks, one that none continues dies or, where the controller kept its result, stops. So a controller
works the same on a model's logits, on a table in a test, or on the values a reward model gives:

    leaves = [tree.add_request(prompt)]
    while not decision.done:
        decision = controller.decide(scores_of(leaves))
        leaves = tree.branch(leaves, decision.parents)
        tree.append(leaves, decision.tokens)
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


class Decision(NamedTuple):
    """What becomes of the leaves that were scored.

    parents: int64 [M], which row of the scores each next leaf continues.
    tokens: int32 [M], the token that each next leaf appends, or None where the caller generates it.
    done: the search is over; there are results, and no next leaf has to be scored.
    """

    parents: np.ndarray
    tokens: np.ndarray | None
    done: bool


class Hypothesis(NamedTuple):
    """A finished sequence: its generated tokens, int32 [n], the score it is ranked by, and its log-probability."""

    tokens: np.ndarray
    score: float
    log_probability: float


@runtime_checkable
class BranchController(Protocol):
    """Decides from scores which leaves fork, die or stop. One controller serves one request."""

    def decide(self, scores: Any) -> Decision:
        """scores: one row a current leaf, in the order of the last decision's `parents`; one row at first."""
        ...


def as_scores(name: str, scores: Any, rows: int, ndim: int = 2) -> np.ndarray:
    """`scores` as float64 with `rows` rows; ValueError on another shape or on NaN."""
    array = np.asarray(scores, np.float64)
    if array.ndim != ndim or array.shape[0] != rows:
        shape = ", ".join([str(rows), "vocabulary"][:ndim])
        raise ValueError(f"{name} has shape {array.shape}; ({shape}) expected, a row for each leaf")
    if np.isnan(array).any():
        raise ValueError(f"{name} has NaN in row {int(np.argwhere(np.isnan(array))[0][0])}")
    return array


def as_columns(tokens: Any, scores: np.ndarray) -> np.ndarray:
    """Token ids of the columns of `scores`, int64 of its shape; `tokens` None: the vocabulary in order."""
    if tokens is None:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    tokens = np.asarray(tokens)
    if tokens.shape != scores.shape:
        raise ValueError(f"tokens has shape {tokens.shape}, scores {scores.shape}; a token for each score expected")
    return tokens.astype(np.int64)


def as_token_set(tokens: Any) -> np.ndarray:
    """None, a token or several of them as a sorted int64 array."""
    return np.unique(np.asarray([] if tokens is None else tokens, np.int64).reshape(-1))
