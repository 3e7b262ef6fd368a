"""Shapes of the Mosaic GPU kernel: what one program holds, and which plans it can run.

The planner's tile says how many rows an item has at most; how the kernel cuts them is its own business. A *pass* is
what one program holds at once: ``consumers`` warpgroups of 64 rows, because Hopper's matrix instruction has 64. So a
tile of 16 rows is one pass with 48 idle rows, and a tile of 128 rows at head dim 256 is two passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import layout as lo

# The version of JAX whose Mosaic GPU the kernels are written for.
NEEDS_JAX = (0, 11, 2)
WARPGROUP_ROWS = lo.HALF
WIDTHS = (64, 128, 256)
# The widest heads at which two warpgroups compute: two accumulators of 64 x 256 leave no registers for the second.
PAIR_WIDTH = 128
# Tiles in shared memory have 8 rows, so that a shorter entry comes with its neighbours.
SMALLEST_COPY = 8
# Words of an entry list that one copy brings: enough for a step of plain entries or a part of masked ones, of 8 tokens
# each, and for up to 3 words before them (`META_ALIGN`).
META_WORDS = 64
# Copies read from multiples of 16 bytes of global memory, or die of an illegal instruction: from so many words.
META_ALIGN = 4
# Bulk copies begin at multiples of so many bytes of shared memory: so an LSE is several numbers.
COPY_BYTES = 128
# Bytes of a row of the outputs that wait in shared memory for their copies: more would not fit beside two consumers.
STAGED_BYTES = 256
# Boxes whose places are read together, and which one copy moves where they lie side by side: a read from global memory
# takes as long as many copies.
BATCH = 8
# Shared memory of a Hopper SM that a program may have, less alignment, barriers and the reductions' scratch.
SHARED_BYTES = 227 * 1024 - 2048 - 4096
MAX_STAGES = 8
# Tokens of a wide tile's step.
STEP = 128
# Where there are masks, a step is loaded in parts of so many tokens, and masked ones are walked in them. Smaller ones
# would leave out more of what a warpgroup does not see, but the matrix units want no less.
PART = 64
# Few, so that a short list of entries goes round the ring.
SIMULATED_STAGES = 2


@dataclass(frozen=True)
class Geometry:
    """The static shape of a launch.

    Attributes:
        consumers: warpgroups that compute, 64 rows each; one more loads.
        group, heads: query heads of a KV head, and how many of them a pass holds.
        queries: queries of a pass.
        passes: passes that the queries of an item take.
        head_tiles: passes that the heads of a group take.
        lse_copies: see :func:`lse_copies`.
        box: rows that one copy of queries or outputs moves: heads of one query, side by side in memory.
        live_boxes: how many of a warpgroup's boxes an item can fill, rounded up to a power of two.
        queries_staged: outputs wait for their copies in the memory of the queries, which no one reads any more then.
        staged_apart: partials and final outputs wait in memory of their own: a warpgroup's part of one would overlap
            another's part of the other, which may be a pass behind.
        block: tokens a step; ``stages``: steps in flight.
        part: tokens of a step that are loaded, and given back, at a time.
        unit: slots that an entry is copied with, at least 8; ``entries``: entries a step.
        simulated: for the simulator.
    """

    consumers: int
    group: int
    heads: int
    queries: int
    passes: int
    head_tiles: int
    lse_copies: int
    box: int
    live_boxes: int
    queries_staged: bool
    staged_apart: bool
    block: int
    part: int
    stages: int
    unit: int
    simulated: bool

    @property
    def rows(self) -> int:
        return self.consumers * WARPGROUP_ROWS

    @property
    def boxes(self) -> int:
        """Boxes of the rows of one warpgroup."""
        return WARPGROUP_ROWS // self.box

    @property
    def joined(self) -> bool:
        """Whether boxes side by side in shared memory are those of one query after another."""
        return self.heads == self.box and self.boxes > 1

    @property
    def batch(self) -> int:
        """Boxes that are handled at a time, unrolled. The simulator compiles what is unrolled, so there it is as few as
        show what is to be seen: boxes may be joined."""
        return min(2 if self.simulated else BATCH, self.live_boxes)

    @property
    def row_words(self) -> int:
        """Words of the list that says which queries a pass holds, as one copy brings it; 0: so few boxes are looked up
        in global memory, a batch at a time."""
        if self.consumers * self.live_boxes <= BATCH:
            return 0
        line = COPY_BYTES // 4
        return -(-(self.queries + META_ALIGN) // line) * line

    @property
    def entries(self) -> int:
        return self.block // self.unit

    @property
    def parts(self) -> int:
        return self.block // self.part

    @property
    def part_entries(self) -> int:
        return self.part // self.unit

    @property
    def slots(self) -> int:
        """Parts in flight."""
        return self.stages * self.parts

    @property
    def looks_ahead(self) -> bool:
        """Whether a step finds out if the next one needs a mask: then full steps are one stretch of code, without a
        branch between their products. Only long steps gain by it, and what lies beside the keys must tell."""
        return self.block > WARPGROUP_ROWS and META_ALIGN - 1 + 2 * self.entries * lo.PLAIN_SIZE <= META_WORDS

    @property
    def halves(self) -> bool:
        """Whether the two warpgroups have what the plan calls the halves of a tile."""
        return self.consumers == 2 and self.passes == 1

    @property
    def works(self) -> int:
        """Passes of an item, for one KV head."""
        return self.head_tiles * self.passes


def geometry(shape: lo.WorkShape, tile: lo.TileClass, simulated: bool = False) -> Geometry:
    """How the kernel runs the items of a tile class.

    Raises:
        NotImplementedError: a head dim that the copies cannot bring in the form the matrix units read.
    """
    for name, width in (("head_dim", shape.head_dim), ("v_head_dim", shape.v_head_dim)):
        if width not in WIDTHS:
            raise NotImplementedError(f"{name} is {width}: the Mosaic kernel takes {', '.join(map(str, WIDTHS))}")
    widest = max(shape.head_dim, shape.v_head_dim)
    consumers = 2 if tile.rows > WARPGROUP_ROWS and widest <= PAIR_WIDTH else 1
    # Long steps keep the matrix units busy; narrow tiles cannot use them, and masks take them in parts.
    block = STEP if tile.rows >= WARPGROUP_ROWS and widest <= PAIR_WIDTH else 64
    rows = consumers * WARPGROUP_ROWS
    group = shape.group
    heads = min(group, rows)
    queries = rows // heads
    box = math.gcd(heads, group, WARPGROUP_ROWS)
    # Where there is no room for more; only where a warpgroup's part of it is the same memory whatever it holds.
    queries_staged = consumers > 1 and 2 * shape.head_dim == 2 * shape.v_head_dim == STAGED_BYTES
    staged_apart = consumers > 1 and 2 * shape.v_head_dim < STAGED_BYTES
    return Geometry(
        consumers=consumers,
        group=group,
        heads=heads,
        queries=queries,
        passes=-(-tile.queries_per_tile(group) // queries),
        head_tiles=-(-group // heads),
        lse_copies=lse_copies(shape),
        box=box,
        live_boxes=1 << (-(-min(tile.queries_per_tile(group) * heads, WARPGROUP_ROWS) // box) - 1).bit_length(),
        queries_staged=queries_staged and not simulated,
        staged_apart=staged_apart or simulated,  # which takes parts of two views for the same part
        block=block,
        part=min(block, PART) if tile.masked else block,
        stages=SIMULATED_STAGES if simulated else _stages(shape, rows, block, queries_staged, staged_apart),
        unit=max(tile.unit, SMALLEST_COPY),
        simulated=simulated,
    )


def lse_copies(shape: lo.WorkShape) -> int:
    """Equal numbers side by side that hold an LSE.

    At least 8, which is what a register array has; and as many as make the LSEs of a box a multiple of COPY_BYTES.
    """
    return COPY_BYTES // 4 // math.gcd(shape.group, 4)


def _stages(shape: lo.WorkShape, rows: int, block: int, queries_staged: bool, staged_apart: bool) -> int:
    """As many steps in flight as shared memory holds beside queries (as loaded, and as multiplied) and outputs."""
    itemsize = jnp.dtype(jnp.bfloat16).itemsize
    staged = 0 if queries_staged else STAGED_BYTES + staged_apart * itemsize * shape.v_head_dim
    fixed = rows * (2 * shape.head_dim * itemsize + staged + 4 * lse_copies(shape))
    stage = block * (shape.head_dim + shape.v_head_dim) * itemsize + 2 * META_WORDS * 4
    return min(MAX_STAGES, (SHARED_BYTES - fixed) // stage)
