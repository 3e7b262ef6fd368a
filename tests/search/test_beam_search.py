import numpy as np
import pytest
from toy_model import ToyModel, run

from tree_attention_jax.search import BeamSearch, BranchController


def best_of_all(model, controller, max_length, eos=(), n=1):
    scored = [
        (controller.score(model.sequence_log_prob(tokens), len(tokens)), tokens)
        for tokens in model.all_sequences(max_length, eos)
    ]
    return sorted(scored, key=lambda x: -x[0])[:n]


def check_results(controller, expected):
    got = controller.results()
    assert [tuple(h.tokens.tolist()) for h in got[: len(expected)]] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([h.score for h in got[: len(expected)]], [score for score, _ in expected], rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_width_of_the_vocabulary_is_exact_for_two_tokens(seed):
    model = ToyModel(7, seed)
    beam = BeamSearch(7, max_length=2)
    run(beam, model)
    check_results(beam, best_of_all(model, beam, 2, n=7))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 2.0, -0.5])
@pytest.mark.parametrize("eos", [(), (0,), (0, 3)], ids=["no-eos", "eos", "two-eos"])
def test_a_beam_as_wide_as_the_tree_is_exact_with_any_length_penalty(alpha, eos):
    for seed in range(4):
        model = ToyModel(4, seed, sharpness=2.0)
        beam = BeamSearch(4**4, max_length=4, eos=eos, length_penalty=alpha)
        run(beam, model)
        check_results(beam, best_of_all(model, beam, 4, eos, n=20))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_stopping_when_nothing_can_win_any_more_changes_nothing(alpha):
    stopped_early = 0
    for seed in range(20):
        model = ToyModel(5, seed, sharpness=2.5)
        beam, long = (BeamSearch(3, 8, eos=0, length_penalty=alpha) for _ in range(2))
        long._is_over = lambda group, running: not running.size
        run(beam, model)
        run(long, model)
        check_results(beam, [(h.score, tuple(h.tokens.tolist())) for h in long.results()])
        stopped_early += beam._beams.shape[1] < 8
    assert stopped_early > 2


def naive_beam_search(model, width, length):
    beams = [((), 0.0)]
    for _ in range(length):
        grown = [(b + (t,), s + model.log_probs(b)[t]) for b, s in beams for t in range(model.vocabulary)]
        beams = sorted(grown, key=lambda x: -x[1])[:width]
    return beams


def test_a_narrow_beam_is_the_textbooks():
    for seed in range(5):
        model = ToyModel(6, seed)
        beam = BeamSearch(3, 5)
        run(beam, model)
        check_results(beam, [(s, b) for b, s in naive_beam_search(model, 3, 5)])


def test_scores_of_the_best_tokens_alone_are_enough():
    model = ToyModel(9, 1)
    beam, compact = (BeamSearch(3, 5, eos=0, length_penalty=0.6) for _ in range(2))
    run(beam, model)
    leaves, done = [()], False
    while not done:
        scores = np.stack([model.log_probs(leaf) for leaf in leaves])
        best = np.argsort(-scores, axis=1)[:, :6]
        decision = compact.decide(np.take_along_axis(scores, best, axis=1), best)
        leaves = [leaves[p] + (int(t),) for p, t in zip(decision.parents, decision.tokens)]
        done = decision.done
    check_results(compact, [(h.score, tuple(h.tokens.tolist())) for h in beam.results()])


def test_early_stop_ends_with_the_first_hypotheses():
    model = ToyModel(5, 3, sharpness=0.3)
    beam = BeamSearch(2, 20, eos=[0, 1], early_stop=True, length_penalty=2.0)
    run(beam, model)
    assert len(beam.results()) == 2
    assert beam._beams.shape[1] < 20


def test_groups_without_diversity_are_the_same_beam_many_times():
    model = ToyModel(6, 0)
    one, many = BeamSearch(2, 4), BeamSearch(6, 4, groups=3)
    run(one, model)
    run(many, model)
    expected = [h for h in one.results() for _ in range(3)]
    check_results(many, [(h.score, tuple(h.tokens.tolist())) for h in expected])


def test_each_group_avoids_the_tokens_of_the_ones_before_it():
    model = ToyModel(6, 0)
    beam = BeamSearch(3, 3, groups=3, diversity=100.0)
    leaves = run(beam, model)
    assert all(len(set(tokens)) == 3 for tokens in zip(*leaves)), "a token twice in one step"
    greedy = naive_beam_search(model, 1, 3)
    assert beam.results()[0].tokens.tolist() == list(greedy[0][0])
    scores = [model.sequence_log_prob(h.tokens) for h in beam.results()]
    np.testing.assert_allclose(scores, [h.log_probability for h in beam.results()], err_msg="scores exclude diversity")


def test_impossible_tokens_are_never_taken():
    scores = np.full((1, 5), -np.inf)
    scores[0, 2] = 0.0
    decision = BeamSearch(3, 4).decide(scores)
    assert decision.tokens.tolist() == [2]


def test_misuse():
    with pytest.raises(ValueError, match="multiple of groups"):
        BeamSearch(4, 3, groups=3)
    with pytest.raises(ValueError, match="max_length"):
        BeamSearch(4, 0)
    beam = BeamSearch(2, 3)
    with pytest.raises(ValueError, match=r"scores has shape \(2, 5\); \(1, vocabulary\) expected"):
        beam.decide(np.zeros((2, 5)))
    with pytest.raises(ValueError, match="NaN in row 0"):
        beam.decide(np.full((1, 5), np.nan))
    with pytest.raises(ValueError, match="a token for each score"):
        beam.decide(np.zeros((1, 5)), np.zeros((1, 4), int))
    assert beam.decide(np.zeros((1, 5))).parents.tolist() == [0, 0]
    assert isinstance(beam, BranchController)
