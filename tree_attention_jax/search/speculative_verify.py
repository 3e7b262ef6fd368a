"""Which tokens of a draft tree the target model accepts: greedily, or by lossless sampling.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022, and Chen et al., "Accelerating
Large Language Model Decoding with Speculative Sampling", 2023: accept a draft token x with probability
min(1, p(x) / q(x)), else draw from what is left, max(p - q, 0). Miao et al., "SpecInfer", 2023: over the children of a
tree node, one after the other, each rejection leaving such a rest (multi-step speculative sampling). Jeon et al.,
"Recursive Speculative Decoding", 2024: the same for siblings drawn without replacement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tree_attention_jax.search.controller import Decision, as_scores


class Verdict(NamedTuple):
    """The accepted draft nodes, root to leaf (int64 [n], n may be 0), and the target's own token after them."""

    path: np.ndarray
    token: int


class SpeculativeVerify:
    """Verifies draft trees against the target model's scores of all their nodes in one pass.

    The tokens that `verify` emits, round after round, have exactly the distribution that sampling from the target
    alone would give them (`greedy`: are exactly its greedy tokens), whatever the draft.
    """

    def __init__(self, greedy: bool = True, replacement: bool = True, seed: int = 0):
        """
        Args:
            greedy: accept a draft token where it is the target's likeliest; else lossless sampling.
            replacement: siblings are independent draws from the draft model; False: drawn without replacement.
                (Only matters when `verify` gets `draft_probs`.)
            seed: of NumPy's generator.
        """
        self.greedy, self.replacement = greedy, replacement
        self._rng = np.random.default_rng(seed)
        self._draft: tuple[np.ndarray, np.ndarray, Any] | None = None
        self.path = np.zeros(0, np.int64)  # what the last `decide` accepted

    def verify(self, parents: Any, tokens: Any, target: Any, draft_probs: Any = None) -> Verdict:
        """
        Args:
            parents: int [T], draft node i hangs under node `parents[i]` < i, or under the leaf where it is -1.
            tokens: int [T], its token.
            target: [T + 1, vocabulary], row 0 at the leaf, row i + 1 at draft node i. Logits if `greedy`, else
                probabilities.
            draft_probs: [T + 1, vocabulary], the distribution that the children of the same row were drawn from.
                None: the draft is not random given the sequence so far (top-k of a draft model, an n-gram lookup).
        """
        parents, tokens = _as_draft(parents, tokens)
        target = as_scores("target", target, parents.size + 1)
        if (outside := (tokens < 0) | (tokens >= target.shape[1])).any():
            at = int(np.argmax(outside))
            raise ValueError(f"tokens[{at}] is {tokens[at]}, not a token id (0..{target.shape[1] - 1})")
        if draft_probs is not None:
            draft_probs = as_scores("draft_probs", draft_probs, parents.size + 1)
            draft_probs = _as_probabilities("draft_probs", draft_probs)
        if not self.greedy:
            target = _as_probabilities("target", target)
        children: list[list[int]] = [[] for _ in range(parents.size + 1)]
        for node, parent in enumerate(parents.tolist()):
            children[parent + 1].append(node)
        path: list[int] = []
        at = -1
        while True:
            q = None if draft_probs is None else draft_probs[at + 1]
            node, token = self._step(target[at + 1], q, children[at + 1], tokens)
            if node is None:
                return Verdict(np.array(path, np.int64), int(token))
            path.append(node)
            at = node

    def propose(self, parents: Any, tokens: Any, draft_probs: Any = None) -> None:
        """Sets the draft that the next `decide` is about; arguments as for `verify`."""
        self._draft = *_as_draft(parents, tokens), draft_probs

    def decide(self, scores: Any) -> Decision:
        """scores: `target` of `verify`, for the draft of the last `propose`.

        The rows are the leaf and the draft nodes; the one next leaf continues the deepest accepted one.
        """
        if self._draft is None:
            raise ValueError("decide needs a draft: call propose first")
        parents, tokens, draft_probs = self._draft
        self.path, token = self.verify(parents, tokens, scores, draft_probs)
        self._draft = None
        row = self.path[-1] + 1 if self.path.size else 0
        return Decision(np.array([row], np.int64), np.array([token], np.int32), False)

    def _step(self, p, q, children, tokens):
        # (the accepted child, None) or (None, the target's own token)
        if self.greedy:
            best = int(np.argmax(p))
            return next(((node, None) for node in children if tokens[node] == best), (None, best))
        for node in children:
            x = tokens[node]
            chance = p[x] if q is None else p[x] / q[x] if q[x] > 0 else 1.0
            if self._rng.random() < chance:
                return node, None
            p, q = self._after_rejection(p, q, x)
        return None, self._rng.choice(p.size, p=p / p.sum())

    def _after_rejection(self, p, q, x):
        rest = p.copy()
        if q is None:
            rest[x] = 0
        else:
            rest = np.maximum(p - q, 0)
            if not self.replacement:
                q = q.copy()
                q[x] = 0
                q = _normalised(q)
        return _normalised(rest), q


def _normalised(p):
    total = p.sum()
    # Rounding can leave nothing where nothing could have been rejected; then any choice is as good.
    return p / total if total > 0 else np.full_like(p, 1 / p.size)


def _as_draft(parents, tokens):
    parents, tokens = np.asarray(parents, np.int64).reshape(-1), np.asarray(tokens, np.int64).reshape(-1)
    if parents.size != tokens.size:
        raise ValueError(f"parents has {parents.size} entries, tokens {tokens.size}")
    if (bad := (parents < -1) | (parents >= np.arange(parents.size))).any():
        at = int(np.argmax(bad))
        raise ValueError(f"parents[{at}] is {parents[at]}; it must be an earlier node, or -1 for the leaf")
    return parents, tokens


def _as_probabilities(name, p):
    total = p.sum(axis=1, keepdims=True)
    bad = (p < 0).any(axis=1) | (np.abs(total[:, 0] - 1) > 1e-2)  # sums of bfloat16 are that far off
    if bad.any():
        raise ValueError(f"{name}[{int(np.argmax(bad))}] is not a probability distribution")
    return p / total
