import numpy as np
import pytest
from scipy.stats import chisquare
from toy_model import ToyModel

from tree_attention_jax.search import SpeculativeVerify

TREE = [-1, -1, 0, 0, 1]  # two tokens after the leaf, two after the first of them, one after the other


def paths_of(parents, tokens):
    paths = []
    for parent, token in zip(parents, tokens):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return [(), *paths]


def draw_draft(draft, prefix, parents, replacement, rng):
    """(tokens, draft_probs): node i's token is drawn from the draft model after its parent's path."""
    tokens, probs = [], np.zeros((len(parents) + 1, draft.vocabulary))
    for i, parent in enumerate(parents):
        path = paths_of(parents[:i], tokens)[parent + 1]
        p = probs[parent + 1] = draft.probs((*prefix, *path))
        taken = [] if replacement else [tokens[j] for j in range(i) if parents[j] == parent]
        p = np.where(np.isin(np.arange(p.size), taken), 0, p)
        tokens.append(int(rng.choice(p.size, p=p / p.sum())))
    probs[probs.sum(axis=1) == 0] = 1 / draft.vocabulary  # nodes without children
    return tokens, probs


def emit(verifier, target, make_draft, length):
    """Draft-verify rounds until `length` tokens are out."""
    out = ()
    while len(out) < length:
        tokens, probs = make_draft(out)
        rows = np.stack([target.probs((*out, *path)) for path in paths_of(TREE, tokens)])
        path, token = verifier.verify(TREE, tokens, rows, probs)
        out = (*out, *(tokens[node] for node in path), token)
    return out[:length]


@pytest.mark.parametrize("kind", ["independent", "without-replacement", "deterministic"])
def test_sampled_tokens_have_the_targets_distribution(kind):
    target, draft, rng = ToyModel(4, 0), ToyModel(4, 1), np.random.default_rng(2)
    replacement = kind == "independent"
    verifier = SpeculativeVerify(greedy=False, replacement=replacement, seed=3)

    def make_draft(prefix):
        if kind == "deterministic":
            return [1, 2, 0, 3, 0], None
        return draw_draft(draft, prefix, TREE, replacement, rng)

    n, counts = 2500, np.zeros((4, 4))
    for _ in range(n):
        counts[emit(verifier, target, make_draft, 2)] += 1
    expected = n * np.array([[target.probs(())[a] * target.probs((a,))[b] for b in range(4)] for a in range(4)])
    assert chisquare(counts.reshape(-1), expected.reshape(-1)).pvalue > 1e-3


def test_the_chi_square_test_would_notice_a_wrong_rule():
    """Accepting by min(1, p / q) but without the residual: what a careless implementation does."""
    target, draft, rng = ToyModel(4, 0), ToyModel(4, 1), np.random.default_rng(2)
    verifier = SpeculativeVerify(greedy=False, seed=3)
    verifier._after_rejection = lambda p, q, x: (p, q)
    counts = np.zeros(4)
    for _ in range(2000):
        tokens, probs = draw_draft(draft, (), TREE, True, rng)
        rows = np.stack([target.probs(path) for path in paths_of(TREE, tokens)])
        path, token = verifier.verify(TREE, tokens, rows, probs)
        counts[tokens[path[0]] if path.size else token] += 1
    assert chisquare(counts, 2000 * target.probs(())).pvalue < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_greedy_acceptance_follows_the_targets_likeliest_tokens(seed):
    target, rng = ToyModel(4, seed), np.random.default_rng(seed)
    parents = [-1, -1, 0, 0, 1, 2, 2, 4]
    tokens = rng.integers(0, 4, len(parents))
    paths = paths_of(parents, tokens)
    path, token = SpeculativeVerify().verify(parents, tokens, np.stack([target.log_probs(p) for p in paths]))
    greedy = []
    for _ in range(5):
        greedy.append(int(np.argmax(target.log_probs(greedy))))
    emitted = [*tokens[path], token]
    assert emitted == greedy[: len(emitted)]
    deeper = [p for p in paths if len(p) >= len(emitted) and list(p) == greedy[: len(p)]]
    assert not deeper, "it stopped before it had to"


def test_a_draft_from_the_target_itself_is_always_accepted():
    target, rng = ToyModel(5, 0), np.random.default_rng(0)
    chain = [-1, 0, 1]
    verifier = SpeculativeVerify(greedy=False)
    for _ in range(50):
        tokens, probs = draw_draft(target, (), chain, True, rng)
        rows = np.stack([target.probs(p) for p in paths_of(chain, tokens)])
        assert verifier.verify(chain, tokens, rows, probs).path.tolist() == [0, 1, 2]


def test_decide_continues_the_deepest_accepted_node():
    target = np.full((4, 3), -1.0)
    target[[0, 1, 2, 3], [2, 1, 0, 1]] = 0
    verifier = SpeculativeVerify()
    verifier.propose([-1, 0, 0], [2, 0, 1])
    decision = verifier.decide(target)
    assert verifier.path.tolist() == [0, 2]
    assert (decision.parents.tolist(), decision.tokens.tolist(), decision.done) == ([3], [1], False)
    verifier.propose([-1], [0])
    assert verifier.decide(target[:2]).parents.tolist() == [0], "all rejected: the leaf itself goes on"
    with pytest.raises(ValueError, match="call propose first"):
        verifier.decide(target)


def test_misuse():
    verifier, rows = SpeculativeVerify(greedy=False), np.full((2, 4), 0.25)
    with pytest.raises(ValueError, match="parents has 1 entries, tokens 2"):
        verifier.verify([-1], [1, 2], rows)
    with pytest.raises(ValueError, match=r"parents\[0\] is 0"):
        verifier.verify([0], [1], rows)
    with pytest.raises(ValueError, match=r"tokens\[0\] is 4"):
        verifier.verify([-1], [4], rows)
    with pytest.raises(ValueError, match="target has shape"):
        verifier.verify([-1, 0], [1, 1], rows)
    with pytest.raises(ValueError, match=r"target\[0\] is not a probability distribution"):
        verifier.verify([-1], [1], 2 * rows)
    with pytest.raises(ValueError, match=r"draft_probs\[1\] is not a probability distribution"):
        verifier.verify([-1], [1], rows, rows * [[1], [-1]])
