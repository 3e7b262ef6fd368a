"""A decoder whose layers are one `lax.scan`, for programs that would otherwise take longer to compile than to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tree_attention_jax.models.configs import LlamaConfig
from tree_attention_jax.models.llama import CosSin, LayerStep, Llama, LlamaLayer
from tree_attention_jax.models.paged_cache import Pages

WORTH_ROLLING = 4  # layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolledLlama:
    """The same decoder with all layers in one scan, called like a `Llama`.

    A program over it holds one layer instead of all. In return it holds a second copy of the layers' weights, and
    every step copies each layer's weights and pages out of and into the stack.

    Attributes:
        llama: the decoder it was made of, for everything but the layers.
        stacked: all layers in one, every parameter [num_layers, ...].
    """

    llama: Llama
    stacked: LlamaLayer

    @classmethod
    def of(cls, llama: Llama) -> RolledLlama:
        return cls(llama, _stack(list(llama.layers)))

    @property
    def config(self) -> LlamaConfig:
        return self.llama.config

    @property
    def dtype(self) -> Any:
        return self.llama.dtype

    def embed(self, token_ids: jax.Array) -> jax.Array:
        return self.llama.embed(token_ids)

    def rope(self, positions: jax.Array) -> CosSin:
        return self.llama.rope(positions)

    def logits(self, x: jax.Array) -> jax.Array:
        return self.llama.logits(x)

    def run_layers(
        self, step: LayerStep, x: jax.Array, k_pages: Sequence[jax.Array], v_pages: Sequence[jax.Array]
    ) -> tuple[jax.Array, Pages, Pages]:
        """As `Llama.run_layers`."""

        def body(x, slices):
            x, k_layer, v_layer = step(slices[0], x, *slices[1:])
            return x, (k_layer, v_layer)

        x, new = jax.lax.scan(body, x, (self.stacked, _stack(k_pages), _stack(v_pages)))
        new_k, new_v = (tuple(pages[i] for i in range(len(k_pages))) for pages in new)
        return x, new_k, new_v

    __call__ = Llama.__call__


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
