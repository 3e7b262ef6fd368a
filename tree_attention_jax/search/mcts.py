"""Monte Carlo tree search with PUCT selection.

Rosin, "Multi-armed bandits with episode context", 2011 (PUCT); Silver et al., "Mastering the game of Go without human
knowledge", 2017 (the search, its root noise and virtual loss); Schrittwieser et al., "Mastering Atari, Go, chess and
shogi by planning with a learned model", 2020 (values of any range, scaled to [0, 1] within the tree).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tree_attention_jax.search.controller import Decision, as_scores

_ROOT = 0
_COLUMNS = {
    "parent": np.int64,
    "action": np.int64,
    "prior": np.float64,
    "visits": np.int64,
    "value_sum": np.float64,
    "first_child": np.int64,
    "num_children": np.int64,
    "terminal": bool,
    "number": np.int64,  # in the order of evaluation; meaningless for a node that was not handed out
}


class MonteCarloTreeSearch:
    """Grows a tree by simulations: select a leaf by PUCT, evaluate it, back its value up to the root.

    An edge is chosen by the highest q + c_puct * prior * sqrt(visits of the parent) / (1 + visits of the child), where
    q is the child's mean value, or its parent's as long as it has none, scaled to the values seen in the tree.

    Evaluated nodes are numbered in the order in which `decide` handed them out; the root is 0. In its decisions,
    `parents` are such numbers: the tree grows at inner nodes too, so no node dies while the search goes on.
    """

    parent: np.ndarray
    action: np.ndarray
    prior: np.ndarray
    visits: np.ndarray
    value_sum: np.ndarray
    first_child: np.ndarray
    num_children: np.ndarray
    terminal: np.ndarray
    number: np.ndarray

    def __init__(
        self,
        num_simulations: int,
        c_puct: float = 1.25,
        discount: float = 1.0,
        batch: int = 1,
        noise: tuple[float, float] | None = None,
        seed: int = 0,
    ):
        """
        Args:
            num_simulations: leaves to evaluate (the root not counted; a terminal one again each time it is chosen).
            c_puct: weight of prior and visits against the value.
            discount: of the value, per step up the tree.
            batch: leaves to evaluate at a time. While they wait, each counts as a visit of the lowest value in the
                tree (virtual loss), so that they differ.
            noise: (alpha, fraction) of Dirichlet noise mixed into the root's priors.
            seed: of NumPy's generator.
        """
        if num_simulations < 1 or batch < 1:
            raise ValueError(f"num_simulations and batch must be at least 1, got {num_simulations} and {batch}")
        self.num_simulations, self.batch, self.noise = num_simulations, batch, noise
        self.c_puct, self.discount = c_puct, discount
        self._rng = np.random.default_rng(seed)
        self.num_nodes = 0
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(16, dtype))
        self._add(parent=np.array([-1]))
        # Handed out and not evaluated yet: (node, the virtual loss on its path).
        self._waiting: list[tuple[int, float]] = []
        self._hand_out(_ROOT, 0.0)
        self._handed_out, self._simulations = 1, 0
        self._low, self._high = np.inf, -np.inf

    def decide(self, scores: Any, values: Any, terminal: Any = None, actions: Any = None) -> Decision:
        """Takes the evaluation of the leaves that were handed out (at first, of the root) and hands out the next.

        Args:
            scores: [L, A], prior probabilities of each leaf's actions; 0 for one that isn't possible.
            values: [L], the leaf's value, higher is better.
            terminal: bool [L], nothing follows this leaf.
            actions: int [L, A], the tokens that the columns stand for (default: their index).

        Returns:
            The next leaves: child `tokens[i]` of evaluated node number `parents[i]`.
        """
        scores = as_scores("scores", scores, len(self._waiting))
        values = as_scores("values", values, len(self._waiting), ndim=1)
        ends = ~(scores > 0).any(axis=1)
        if terminal is not None:
            ends |= as_scores("terminal", terminal, len(self._waiting), ndim=1) != 0
        actions = np.broadcast_to(np.arange(scores.shape[1]) if actions is None else actions, scores.shape)
        for i, (node, loss) in enumerate(self._waiting):
            self._lose(node, loss, visits=-1)
            self.terminal[node] = ends[i]
            if not ends[i]:
                self._expand(node, scores[i], actions[i])
            self._back_up(node, values[i])
        self._waiting = []
        self._select_batch()
        nodes = np.array([node for node, _ in self._waiting], np.int64)
        self.number[nodes] = self._handed_out + np.arange(nodes.size)
        self._handed_out += nodes.size
        return Decision(self.number[self.parent[nodes]], self.action[nodes].astype(np.int32), not nodes.size)

    def root_visits(self) -> dict[int, int]:
        """Visits of each action at the root: the search's policy, up to normalisation."""
        children = self._children(_ROOT)
        return dict(zip(self.action[children].tolist(), self.visits[children].tolist()))

    def best_action(self) -> int:
        """The root's most visited action; of equally visited ones, the one of higher value."""
        if not self.num_children[_ROOT]:
            raise ValueError("the root has not been expanded")
        return int(self.action[self._best_child(_ROOT)])

    def best_path(self) -> np.ndarray:
        """int32 [n]: actions from the root along the most visited children."""
        actions, node = [], _ROOT
        while self.num_children[node] and self.visits[self._children(node)].any():
            node = self._best_child(node)
            actions.append(self.action[node])
        return np.array(actions, np.int32)

    def mean_value(self, node: int = _ROOT) -> float:
        """Mean of the values backed up to a node."""
        return float(self.value_sum[node] / max(self.visits[node], 1))

    def _children(self, node):
        return slice(self.first_child[node], self.first_child[node] + self.num_children[node])

    def _best_child(self, node):
        children = self._children(node)
        means = self.value_sum[children] / np.maximum(self.visits[children], 1)
        return int(children.start + np.lexsort((means, self.visits[children]))[-1])

    def _select_batch(self):
        while len(self._waiting) < self.batch and self._simulations < self.num_simulations:
            node = self._select()
            if node == _ROOT or any(node == other for other, _ in self._waiting):
                return  # the tree has no more leaves to offer before these are evaluated
            self._simulations += 1
            if self.terminal[node]:
                self._back_up(node, self.mean_value(node))
            else:
                self._hand_out(node, self._low)

    def _hand_out(self, node, loss):
        self._lose(node, loss)
        self._waiting.append((node, loss))

    def _select(self):
        node = _ROOT
        while self.num_children[node]:
            children = self._children(node)
            visits = self.visits[children]
            q = np.where(visits > 0, self.value_sum[children] / np.maximum(visits, 1), self.mean_value(node))
            bonus = self.c_puct * self.prior[children] * np.sqrt(self.visits[node]) / (1 + visits)
            node = int(children.start + np.argmax(self._scaled(q) + bonus))
        return node

    def _scaled(self, q):
        span = self._high - self._low
        return (q - self._low) / span if span > 0 else np.full_like(q, 0.5)

    def _expand(self, node, priors, actions):
        possible = priors > 0
        priors, actions = priors[possible], actions[possible]
        if node == _ROOT and self.noise is not None:
            alpha, fraction = self.noise
            priors = (1 - fraction) * priors + fraction * self._rng.dirichlet(np.full(priors.size, alpha))
        self.first_child[node], self.num_children[node] = self.num_nodes, priors.size
        self._add(parent=np.full(priors.size, node), action=actions, prior=priors)

    def _add(self, parent, **columns):
        begin, end = self.num_nodes, self.num_nodes + parent.size
        room = self.parent.size
        for name, dtype in _COLUMNS.items():
            if end > room:
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(2 * end - room, dtype)]))
            getattr(self, name)[begin:end] = parent if name == "parent" else columns.get(name, 0)
        self.num_nodes = end

    def _back_up(self, node, value):
        for above in self._path(node):
            self.visits[above] += 1
            self.value_sum[above] += value
            mean = self.mean_value(above)
            self._low, self._high = min(self._low, mean), max(self._high, mean)
            value *= self.discount

    def _lose(self, node, value, visits=1):
        path = self._path(node)
        self.visits[path] += visits
        self.value_sum[path] += visits * value

    def _path(self, node):
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parent[node])
        return path
