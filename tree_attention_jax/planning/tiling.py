"""Rectangles over rows x token runs.

Rows are queries in depth-first order (:mod:`tree_attention_jax._layout`). A block is a contiguous row range times a
list of token runs. It stands for the *visible* part of that rectangle, so a strategy need not care about causality:
:mod:`.lowering` drops what no row of a tile sees, and separates what all of them see from what needs a mask. A valid
tiling covers each visible (row, token) pair exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.layout import TileClass


class Tiling(NamedTuple):
    """Blocks in CSR form; arrays of integers.

    Attributes:
        row_begin, row_end: [B] rows of each block. More rows than a tile holds are cut into several tiles.
        run_indptr: [B + 1] offsets into the runs.
        node, begin, end: [R] each run is tokens ``begin .. end - 1`` of ``node``.
        tile: [B] index into ``tiles``.
        max_tokens: [B] a block with more tokens is split into items of about equal length (0: never).
        tiles: the tile classes used; each becomes one launch.
        uniform: entries are of one length, and launches can mask, whatever they hold: one program for all such tilings.
        cut: it is known that each block has as many rows as a tile holds at most, and that some row sees each run.
    """

    row_begin: np.ndarray
    row_end: np.ndarray
    run_indptr: np.ndarray
    node: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    tile: np.ndarray
    max_tokens: np.ndarray
    tiles: tuple[TileClass, ...]
    uniform: bool = False
    cut: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.row_begin)

    def of_blocks(self, values: Sequence[int]) -> Any:
        """int32 [B]: what is given of each tile class, of the blocks; of a single class one number for all of them."""
        return values[0] if len(values) == 1 else np.array(values, np.int32).take(self.tile)
