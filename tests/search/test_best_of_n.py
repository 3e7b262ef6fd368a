import numpy as np
import pytest
from scipy.stats import chisquare
from toy_model import ToyModel, run

from tree_attention_jax.search import BestOfN


def test_samples_have_the_models_distribution():
    model = ToyModel(3, 0)
    controller = BestOfN(20_000, max_length=2, eos=0, seed=1)
    run(controller, model)
    sequences = list(model.all_sequences(2, (0,)))
    counts = dict.fromkeys(sequences, 0)
    for h in controller.results():
        counts[tuple(h.tokens.tolist())] += 1
    expected = [20_000 * np.exp(model.sequence_log_prob(s)) for s in sequences]
    assert chisquare([counts[s] for s in sequences], expected).pvalue > 1e-3


def test_the_best_is_the_best_of_what_was_sampled():
    model = ToyModel(5, 2)
    by_likelihood = BestOfN(50, max_length=6, eos=0)
    by_reward = BestOfN(50, max_length=6, eos=0, reward=lambda tokens: (tokens == 3).sum())
    run(by_likelihood, model)
    run(by_reward, model)
    results = by_likelihood.results()
    assert len(results) == 50
    means = [model.sequence_log_prob(h.tokens) / len(h.tokens) for h in results]
    np.testing.assert_allclose([h.score for h in results], means)
    assert means == sorted(means, reverse=True)
    assert by_reward.results()[0].score == max((h.tokens == 3).sum() for h in results), (
        "the same seed, the same samples"
    )


def test_temperature_zero_is_greedy():
    model = ToyModel(5, 2)
    controller = BestOfN(2, max_length=4, temperature=0)
    greedy = []
    for _ in range(4):
        greedy.append(int(np.argmax(model.log_probs(greedy))))
    run(controller, model)
    assert [h.tokens.tolist() for h in controller.results()] == [greedy, greedy]


def test_top_p_and_top_k_leave_out_the_unlikely():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    nucleus = BestOfN(500, max_length=1, top_p=0.75).decide(np.log(probs)[None])
    assert nucleus.done
    controller = BestOfN(500, max_length=2, top_p=0.75)
    assert set(controller.decide(np.log(probs)[None]).tokens) == {0, 1}
    controller = BestOfN(500, max_length=1)
    controller.decide(np.log(probs[:2])[None], tokens=np.array([[7, 9]]))
    results = controller.results()
    assert {int(h.tokens[0]) for h in results} == {7, 9}
    assert results[0].log_probability == pytest.approx(np.log(0.5)), "as given, not normalised to the two"


def test_a_vote():
    controller = BestOfN(100, max_length=1)
    controller.decide(np.log([[0.1, 0.6, 0.3]]))
    assert controller.vote(lambda tokens: int(tokens[0])) == 1
    with pytest.raises(ValueError, match="no sequence has ended"):
        BestOfN(1, 1).vote(lambda tokens: 0)


def test_leaves_that_ended_are_not_continued():
    controller = BestOfN(8, max_length=5, eos=0, seed=3)
    leaves = 1
    while True:
        decision = controller.decide(np.zeros((leaves, 2)))
        if decision.done:
            break
        assert decision.parents.max() < leaves
        assert (decision.tokens != 0).all()
        leaves = decision.parents.size
    assert len(controller.results()) == 8


def test_misuse():
    with pytest.raises(ValueError, match="n and max_length"):
        BestOfN(0, 1)
    with pytest.raises(ValueError, match="temperature"):
        BestOfN(1, 1, temperature=-1)
    with pytest.raises(ValueError, match="top_p"):
        BestOfN(1, 1, top_p=0)
    with pytest.raises(ValueError, match="scores has shape"):
        BestOfN(3, 4).decide(np.zeros((3, 2)))
