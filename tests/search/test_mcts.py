import math

import numpy as np
import pytest

from tree_attention_jax.cache import PagePool, SequenceTree
from tree_attention_jax.search import MonteCarloTreeSearch

BRANCHING, DEPTH = 3, 4


def known_tree(seed):
    """Values of all leaves of a full tree, [3, 3, 3, 3]: one is best by far, and nothing above it tells."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, 0.5, (BRANCHING,) * DEPTH)
    values[tuple(rng.integers(0, BRANCHING, DEPTH))] = 1.0
    return values


class Environment:
    """Evaluates paths: a leaf exactly, an inner node by the mean of the leaves below it, with noise."""

    def __init__(self, leaf_values, seed=0):
        self.leaf_values, self.rng = leaf_values, np.random.default_rng(seed)
        self.noise = {}

    def value(self, path):
        if path not in self.noise:
            self.noise[path] = 0.3 * self.rng.normal() if len(path) < DEPTH else 0.0
        return float(np.mean(self.leaf_values[path])) + self.noise[path]

    def evaluate(self, paths):
        priors = np.full((len(paths), BRANCHING), 1 / BRANCHING)
        return priors, [self.value(p) for p in paths], [len(p) == DEPTH for p in paths]


def search(mcts, environment):
    """Drives a search; returns the paths of all evaluated nodes, by number."""
    paths, waiting = [()], [()]
    while True:
        decision = mcts.decide(*environment.evaluate(waiting))
        if decision.done:
            return paths
        waiting = [(*paths[p], int(t)) for p, t in zip(decision.parents, decision.tokens)]
        paths += waiting


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 8])
def test_finds_the_best_leaf_of_a_known_tree(seed, batch):
    values = known_tree(seed)
    mcts = MonteCarloTreeSearch(1000, c_puct=3, batch=batch)
    paths = search(mcts, Environment(values))
    best = np.unravel_index(np.argmax(values), values.shape)
    assert mcts.best_path().tolist() == list(best)
    assert mcts.best_action() == best[0]
    assert len(set(paths)) == len(paths), "a node was evaluated twice"
    assert sum(mcts.root_visits().values()) == 1000


class NaiveNode:
    def __init__(self, prior):
        self.prior, self.visits, self.total, self.children, self.terminal = prior, 0, 0.0, {}, False

    def mean(self):
        return self.total / max(self.visits, 1)


def naive_mcts(environment, simulations, c_puct, discount):
    """PUCT as in the papers, one node object at a time."""
    root, seen = NaiveNode(1.0), []

    def backup(path, value):
        for node in reversed(path):
            node.visits += 1
            node.total += value
            seen.append(node.mean())
            value *= discount

    def expand(node, actions):
        (priors,), (value,), (terminal,) = environment.evaluate([actions])
        node.terminal = terminal
        if not terminal:
            node.children = {a: NaiveNode(p) for a, p in enumerate(priors)}
        return value

    backup([root], expand(root, ()))
    for _ in range(simulations):
        node, path, actions = root, [root], ()
        while node.children:
            low, high = min(seen), max(seen)

            def score(child, node=node, low=low, high=high):
                q = child.mean() if child.visits else node.mean()
                q = (q - low) / (high - low) if high > low else 0.5
                return q + c_puct * child.prior * math.sqrt(node.visits) / (1 + child.visits)

            action = max(node.children, key=lambda a: score(node.children[a]))
            node = node.children[action]
            path.append(node)
            actions = (*actions, action)
        backup(path, node.mean() if node.terminal and node.visits else expand(node, actions))
    return root


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_visits_are_those_of_the_textbook(discount):
    for seed in range(3):
        mcts = MonteCarloTreeSearch(300, c_puct=1.1, discount=discount)
        search(mcts, Environment(known_tree(seed)))
        root = naive_mcts(Environment(known_tree(seed)), 300, 1.1, discount)
        assert mcts.root_visits() == {a: child.visits for a, child in root.children.items()}
        assert mcts.mean_value() == pytest.approx(root.mean())


def test_priors_decide_where_values_do_not():
    mcts = MonteCarloTreeSearch(50)
    paths, waiting = [()], 1
    while True:
        priors = np.tile([0.7, 0.3, 0.0], (waiting, 1))
        decision = mcts.decide(priors, np.zeros(waiting), actions=[[30, 20, 10]] * waiting)
        if decision.done:
            break
        paths += decision.parents.tolist()
        waiting = decision.parents.size
    assert set(mcts.root_visits()) == {30, 20}, "an impossible action is no child"
    assert mcts.best_action() == 30


def test_virtual_loss_leaves_no_trace():
    mcts = MonteCarloTreeSearch(64, batch=16)
    search(mcts, Environment(known_tree(0)))
    assert mcts.visits[0] == 65
    children = mcts._children(0)
    assert mcts.visits[children].sum() == 64
    evaluated = mcts.value_sum[0]
    assert np.isfinite(evaluated)


def test_root_noise_mixes_into_the_priors():
    mcts = MonteCarloTreeSearch(1, noise=(0.3, 0.25), seed=1)
    mcts.decide(np.array([[0.5, 0.5]]), [0.0])
    priors = mcts.prior[mcts._children(0)]
    assert priors.sum() == pytest.approx(1)
    assert priors[0] != 0.5


def test_a_terminal_root_ends_the_search():
    mcts = MonteCarloTreeSearch(10)
    assert mcts.decide([[0.5, 0.5]], [1.0], [True]).done
    with pytest.raises(ValueError, match="has not been expanded"):
        mcts.best_action()


def test_the_search_drives_a_live_tree():
    """Every evaluated node keeps a leaf that holds its path open; a child is a fork of it."""
    tree = SequenceTree(PagePool(400), 1)
    open_leaf = [tree.add_request([9, 9])]
    mcts = MonteCarloTreeSearch(100, batch=4)
    environment, paths, waiting = Environment(known_tree(1)), [()], [()]
    while not (decision := mcts.decide(*environment.evaluate(waiting))).done:
        tree.commit()
        waiting = []
        for parent, token in zip(decision.parents, decision.tokens):
            child, open_leaf[parent] = tree.fork(open_leaf[parent], 2)
            tree.append(child, token)
            open_leaf.append(child)
            waiting.append((*paths[parent], int(token)))
        paths += waiting
        assert tree.pending_tokens().tolist() == decision.tokens.tolist()
    for leaf, path in zip(open_leaf, paths):
        assert tree.tokens(leaf).tolist() == [9, 9, *path]
    assert tree.pool.capacity - tree.pool.num_free == 2 + len(paths) - 1, "each token has one slot"


def test_misuse():
    with pytest.raises(ValueError, match="at least 1"):
        MonteCarloTreeSearch(0)
    mcts = MonteCarloTreeSearch(1)
    with pytest.raises(ValueError, match="scores has shape"):
        mcts.decide(np.zeros((2, 2)), [0, 0])
    with pytest.raises(ValueError, match=r"values has shape \(2,\)"):
        mcts.decide(np.zeros((1, 2)), [0, 0])
    with pytest.raises(ValueError, match="NaN"):
        mcts.decide(np.ones((1, 2)), [np.nan])
