"""A language model small enough to enumerate: the next token's distribution is a table of the path so far."""

import itertools

import numpy as np


class ToyModel:
    def __init__(self, vocabulary, seed, sharpness=1.0):
        self.vocabulary, self.seed, self.sharpness = vocabulary, seed, sharpness
        self._rows = {}

    def log_probs(self, tokens):
        """float64 [vocabulary]: of the token after `tokens`."""
        key = tuple(int(t) for t in tokens)
        if key not in self._rows:
            rng = np.random.default_rng([self.seed, len(key), *key])
            logits = self.sharpness * rng.normal(size=self.vocabulary)
            self._rows[key] = logits - np.log(np.exp(logits).sum())
        return self._rows[key]

    def probs(self, tokens):
        return np.exp(self.log_probs(tokens))

    def sequence_log_prob(self, tokens):
        return sum(self.log_probs(tokens[:i])[t] for i, t in enumerate(tokens))

    def all_sequences(self, max_length, eos=()):
        """Every sequence that ends with an eos token or has `max_length` tokens."""
        for n in range(1, max_length + 1):
            for tokens in itertools.product(range(self.vocabulary), repeat=n):
                if any(t in eos for t in tokens[:-1]):
                    continue
                if tokens[-1] in eos or n == max_length:
                    yield tokens


def run(controller, model, prompt=(), most_steps=100):
    """Drives a controller with the model's log-probabilities; returns the leaves' tokens at the end."""
    leaves = [tuple(prompt)]
    for _ in range(most_steps):
        decision = controller.decide(np.stack([model.log_probs(leaf) for leaf in leaves]))
        leaves = [leaves[p] + (int(t),) for p, t in zip(decision.parents, decision.tokens)]
        if decision.done:
            return leaves
    raise AssertionError("the controller does not come to an end")
