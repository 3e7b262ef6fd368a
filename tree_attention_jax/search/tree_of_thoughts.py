"""Tree of thoughts, breadth first: propose, evaluate, keep the best.

Yao et al., "Tree of Thoughts: Deliberate Problem Solving with Large Language Models", 2023, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tree_attention_jax.search.controller import Decision


class TreeOfThoughts:
    """Each round, the `keep` best thoughts fork into `branch` proposals each.

    The tokens of a thought are the caller's business: between two decisions every leaf generates one (of its own
    length). The first decision, on the prompt alone, forks it.
    """

    def __init__(
        self,
        keep: int,
        branch: int,
        depth: int,
        evaluate: Callable[[Sequence[Any]], Sequence[float]] | None = None,
        good_enough: float = np.inf,
    ):
        """
        Args:
            keep: thoughts that survive a round (b in the paper).
            branch: proposals of each of them (k).
            depth: rounds of proposals (T).
            evaluate: value of each of a list of thoughts, higher is better. None: `decide` gets values.
            good_enough: a thought of at least this value ends the search.
        """
        if min(keep, branch, depth) < 1:
            raise ValueError(f"keep, branch and depth must be at least 1, got {keep}, {branch} and {depth}")
        self.keep, self.branch, self.depth = keep, branch, depth
        self.evaluate, self.good_enough = evaluate, good_enough
        self.values = np.zeros(1)  # of the leaves that survived the last round, best first
        self._round = 0

    def decide(self, scores: Any) -> Decision:
        """scores: the values of the current leaves, [L]; or, with `evaluate`, the L thoughts to be evaluated.

        Where several values are equal, the earlier leaf wins. When `done`, `parents` are the survivors, best first.
        """
        values = np.asarray(scores if self.evaluate is None else self.evaluate(scores), np.float64)
        if values.ndim != 1 or not values.size:
            raise ValueError(f"scores has shape {values.shape}; one value for each leaf expected")
        if np.isnan(values).any():
            raise ValueError(f"scores[{int(np.argmax(np.isnan(values)))}] is NaN")
        best = np.argsort(-values, kind="stable")[: self.keep]
        self.values = values[best]
        done = self._round == self.depth or self.values[0] >= self.good_enough
        if not done:
            self._round += 1
            best = np.repeat(best, self.branch)
        return Decision(best, None, bool(done))


def breadth_first(
    controller: TreeOfThoughts, root: Any, propose: Callable[[Any, int], Sequence[Any]]
) -> list[tuple[Any, float]]:
    """Runs a `TreeOfThoughts` on plain states, without a model: (state, value) of the survivors, best first.

    propose(state, k): k states that follow it; fewer where there are no more. Needs a controller with `evaluate`.
    """
    if controller.evaluate is None:
        raise ValueError("controller needs evaluate= to value plain states")
    states = [root]
    while True:
        decision = controller.decide(states)
        if decision.done:
            return [(states[i], float(value)) for i, value in zip(decision.parents, controller.values)]
        kept = decision.parents[:: controller.branch]
        proposals = [state for i in kept for state in propose(states[i], controller.branch)]
        if not proposals:
            return [(states[i], float(value)) for i, value in zip(kept, controller.values)]
        states = proposals
