"""What else computes this attention, measured beside ours in the same process on the same data.

A peer is a name and ``prepare(inputs)``, which does everything that a serving engine would do once a step (planning,
index arrays, compiling) and returns a :class:`Ready` to be timed, or raises :class:`Unsuitable` with the reason why it
cannot take this forest. Each is a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.harness import LayerData
from benchmarks.suites import Cell
from tree_attention_jax import TokenTree


class Unsuitable(Exception):
    """This peer cannot run here, or not on this forest; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """A cell and its data: q and the paged K/V of each layer, as our own kernels get them."""

    cell: Cell
    tree: TokenTree
    data: LayerData


@dataclass(frozen=True)
class Ready:
    """A peer prepared for a cell.

    Attributes:
        run: one call over all layers, returning at once.
        wait: until what ``run`` returned has been computed.
        output: what ``run`` returned -> the first layer's output, float32 [Q, Hq, D] in the tree's query order.
        layers: how many ``run`` goes through.
        capture: so many runs as one CUDA graph whose buffers stay where they are, or None where ``run`` is that.
        note: how it was called, for whoever reads the numbers.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    output: Callable[[Any], np.ndarray]
    layers: int
    capture: Callable[[int], Callable[[], Any]] | None = None
    note: str = ""


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    def prepare(self, inputs: Inputs) -> Ready: ...


def find_peers(spec: str) -> list[Peer]:
    """The peers of ``"flashinfer,jax,fasttree=PATH,deft=PATH"``.

    Raises:
        ValueError: an unknown name, a path that is missing or does not exist.
    """
    from benchmarks.peers import deft, fasttree, flashinfer, jax_own

    known: dict[str, Callable[..., list[Peer]]] = {
        "flashinfer": flashinfer.peers,
        "jax": jax_own.peers,
        "fasttree": fasttree.peers,
        "deft": deft.peers,
    }
    found: list[Peer] = []
    for word in filter(None, (word.strip() for word in spec.split(","))):
        name, _, path = word.partition("=")
        if name not in known:
            raise ValueError(f"peer is {name!r}: known are {', '.join(known)}")
        if name in ("fasttree", "deft"):
            if not path:
                raise ValueError(f"peer {name} needs a checkout of its repository: {name}=PATH")
            if not Path(path).is_dir():
                raise ValueError(f"peer {name}: there is no folder {path}")
            found += known[name](Path(path).resolve())
        elif path:
            raise ValueError(f"peer {name} is an installed package: it takes no path, got {path!r}")
        else:
            found += known[name]()
    return found


def need_torch(peers: list[Peer]) -> bool:
    """Whether any of them takes GPU memory through PyTorch, beside JAX."""
    return any(getattr(peer, "uses_torch", False) for peer in peers)
