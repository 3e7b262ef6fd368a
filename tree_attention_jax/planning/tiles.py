"""Which tile suits how many rows and how many tokens.

From measurements (docs/performance.md): a tile must fit the run. One warp and 16 tokens a step move a 16-token node
three times faster than a wide tile does, while a node shared by hundreds of rows wants 128 rows to be bound by the
tensor cores rather than by loads.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.layout import TileClass


def tile_class(rows: int, block_kv: int, warps: int, stages: int, unit: int) -> TileClass:
    """A class, kept legal: a step is a whole number of entries."""
    return TileClass(rows, max(block_kv, unit), unit, False, warps, stages)


def standard_tiles(unit: int, group: int) -> tuple[TileClass, ...]:
    """Narrow short, narrow long, and wide: three classes are enough for a good plan, and each costs a launch."""
    return (
        tile_class(16, 16, 1, 2, unit),
        tile_class(16 if group <= 16 else 32, 64, 4, 3, unit),
        tile_class(64 if group <= 8 else 128, 64, 4, 3, unit),
    )


SHORT, LONG, WIDE = range(3)
SHORT_TOKENS = 64


def choose(rows: np.ndarray, tokens: np.ndarray, tiles: tuple[TileClass, ...], group: int) -> np.ndarray:
    """Class of blocks with so many rows (queries) and tokens."""
    narrow = tiles[LONG].queries_per_tile(group)
    kind = np.where(tokens <= SHORT_TOKENS, SHORT, LONG)
    return np.where(rows > narrow, WIDE, kind).astype(np.int32)


def drop_unused(kind: np.ndarray, tiles: tuple[TileClass, ...]) -> tuple[np.ndarray, tuple[TileClass, ...]]:
    """Renumber so that only classes in use stay (at least one)."""
    used = np.bincount(kind, minlength=len(tiles)) > 0
    if not used.any():
        used[0] = True
    place = np.cumsum(used) - 1
    return place[kind].astype(np.int32), tuple(t for t, u in zip(tiles, used) if u)
