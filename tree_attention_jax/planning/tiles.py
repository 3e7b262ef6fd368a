"""Which tile suits how many rows and how many tokens.

From measurements (docs/performance.md): a tile must fit the run. One warp and 16 tokens a step move a 16-token node
three times faster than a wide tile does, while a node shared by hundreds of rows wants 128 rows to be bound by the
tensor cores rather than by loads.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels.layout import TileClass
from pallas_kernels.mosaic_geometry import NEEDS_JAX, PAIR_WIDTH, SMALLEST_COPY, STEP, WIDTHS
from tree_attention_jax.planning.problem import Heads, Problem
from tree_attention_jax.planning.profile import TileCost

# Of a matrix instruction that four warps share.
WIDE_ROWS = 64
# Bytes of one token's K and V that the profile's tiles were measured with.
PROFILE_TOKEN_BYTES = 512
# Shared memory that the K and V stages of one program may take anyhow: two programs fit on an SM.
MAX_STAGE_BYTES = 100_000
SHARED_BYTES_PER_SM = 228 * 1024
# Of each program: a kilobyte that the driver keeps, and what reductions and the softmax pass between threads.
SCRATCH_BYTES = 2048
REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255
# Registers a thread needs beside its accumulator: query rows, logits, addresses.
OTHER_REGISTERS = 176
# Bytes of float32 accumulator a thread can hold before it spills.
MAX_ACCUMULATOR_BYTES = 512


def loaded_at_once(tile: TileClass) -> int:
    """Tokens that a program loads at once: a split item has whole multiples of it, but for its end."""
    return STEP if tile.mosaic else tile.block_kv


def tile_class(rows: int, block_kv: int, warps: int, stages: int, unit: int, mosaic: bool = False) -> TileClass:
    """A class, kept legal: a step is a whole number of entries."""
    return TileClass(rows, max(block_kv, unit), unit, 0, warps, stages, mosaic)


@functools.lru_cache(maxsize=64)
def suits_mosaic(heads: Heads, unit: int) -> bool:
    """Whether the wide tile of Mosaic's kernels is one to choose: here it can run, and with two warpgroups."""
    widths = {heads.head_dim, heads.v_head_dim}
    narrow = widths <= set(WIDTHS) and max(widths) <= PAIR_WIDTH
    return narrow and heads.itemsize == 2 and unit >= SMALLEST_COPY and jax.__version_info__ >= NEEDS_JAX


def fitted(heads: Heads, cost: TileCost, unit: int) -> TileClass:
    """The profile's tile (made for head dim 128, two bytes) adapted to another head dim and type."""
    key_width, value_width = _padded(heads.head_dim), _padded(heads.v_head_dim)
    rows, block_kv, warps, stages = cost.rows, cost.block_kv, cost.warps, cost.stages
    while rows > 16 and rows * value_width * 4 > MAX_ACCUMULATOR_BYTES * 32 * warps:
        if warps < 8:
            warps *= 2
        else:
            rows //= 2
    token_bytes = (key_width + value_width) * heads.itemsize
    limit = max(MAX_STAGE_BYTES, block_kv * PROFILE_TOKEN_BYTES * stages)
    while stages > 2 and block_kv * token_bytes * stages > limit:
        stages -= 1
    while block_kv > 16 and block_kv * token_bytes * stages > limit:
        block_kv //= 2
    return tile_class(rows, block_kv, warps, stages, unit, cost.mosaic)


def resident_programs(heads: Heads, tile: TileClass) -> int:
    """Programs of a tile class that an SM runs at once: what shared memory and registers leave room for.

    Read off kernels that ptxas compiled for an H200 (docs/performance.md). Mosaic's take all of an SM.
    """
    if tile.mosaic:
        return 1
    key_width, value_width = _padded(heads.head_dim), _padded(heads.v_head_dim)
    token_bytes = (key_width + value_width) * heads.itemsize
    used = token_bytes * tile.block_kv * _stage_buffers(tile) + tile.rows * key_width * heads.itemsize + SCRATCH_BYTES
    if 16 * tile.warps > tile.rows:  # warps share rows, so the weights pass through shared memory
        used += tile.rows * tile.block_kv * heads.itemsize
    accumulator = tile.rows * value_width // (32 * tile.warps)
    registers = REGISTERS_PER_SM // (32 * tile.warps * min(accumulator + OTHER_REGISTERS, MAX_REGISTERS + 1))
    return max(1, min(SHARED_BYTES_PER_SM // used, registers))


def _stage_buffers(tile: TileClass) -> int:
    """Copies of a step's K and V that Triton's pipeline keeps in shared memory.

    Fewer where a step has fewer tokens than the program threads: loading the slots takes stages of its own then.
    """
    if tile.block_kv >= 32 * tile.warps:
        return max(1, tile.stages - 1)
    return max(1, (tile.stages - 1) // 2) + (tile.rows >= 64)


def _padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def standard_tiles(problem: Problem) -> tuple[TileClass, ...]:
    """Three of the profile's tiles for strategies that go by rule: narrow for short and long runs, and wide.

    Few, because each combination that a growing tree meets compiles a program.
    """
    unit = problem.unit
    costs = [cost for cost in problem.profile.tiles if not cost.mosaic]
    layout = problem.layout
    most = int((layout.row_end - layout.row_begin).max(initial=1)) * problem.heads.group
    narrow = [cost for cost in costs if cost.rows == costs[0].rows][:2]
    wide = [cost for cost in costs if cost.rows >= WIDE_ROWS]
    wide = [cost for cost in wide if cost.rows <= max(most, wide[0].rows)][-1:]
    return tuple(dict.fromkeys(fitted(problem.heads, cost, unit) for cost in [*narrow, *wide]))


def choose(rows: np.ndarray, tokens: np.ndarray, tiles: tuple[TileClass, ...], group: int) -> np.ndarray:
    """Class of blocks with so many rows (queries) and tokens: the narrowest that holds the rows, else the widest.

    Among equally wide tiles the one with the shortest step whose run is not many steps long.
    """
    kind = np.full(len(rows), len(tiles) - 1, np.int32)
    for index in reversed(range(len(tiles))):
        fits = rows * min(group, tiles[index].rows) <= tiles[index].rows
        if index + 1 < len(tiles) and tiles[index + 1].rows == tiles[index].rows:
            fits &= tokens <= 4 * tiles[index].block_kv
        kind[fits] = index
    return kind


def drop_unused(kind: np.ndarray, tiles: tuple[TileClass, ...]) -> tuple[np.ndarray, tuple[TileClass, ...]]:
    """Renumber so that only classes in use stay (at least one)."""
    used = np.bincount(kind, minlength=len(tiles)) > 0
    if not used.any():
        used[0] = True
    place = np.cumsum(used) - 1
    return place[kind].astype(np.int32), tuple(t for t, u in zip(tiles, used) if u)
