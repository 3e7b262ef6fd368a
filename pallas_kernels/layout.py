"""The contract between a plan and the kernels: one int32 buffer, described by a small static part.

The buffer holds everything that may change from step to step, so a new plan of the same *shape* (bucket sizes)
reuses the compiled program, and one transfer brings it to the device::

    header | items of launch 0 | items of launch 1 | ... | rows | positions | slots | reduce | entries ...

**Row**: a query in the planner's numbering. ``rows[r]`` is the index in ``q`` of row ``r``.

**Entry**: up to ``unit`` tokens side by side in the cache. A *plain* entry is ``(word, position)``: the word packs the
first cache slot and the count, because one load a token is what the inner loop can afford; its tokens stand at
absolute positions ``position ..``, and every row of the item sees them. A *masked* entry adds ``(low, high)``: rows
``low <= r < high`` see it. A negative low means ``~low`` and that token ``x`` of the entry is seen from row
``~low + x`` on: new tokens of one node, causal among themselves. In tiles of more than ``HALF`` rows, the word of a
masked entry also says which *halves* of the tile have a row that may see it (:meth:`TileClass.halves`): what a
warpgroup of Mosaic's kernel leaves out, it then need not look at.

**Item**: rows ``row .. row + num_rows - 1`` times its plain entries and its masked entries. It writes either
partials, at ``partial .. partial + num_rows - 1``, or, where a row has no other item, the final output
(``partial == -1``). ``query`` is ``rows[row]`` where its other rows follow in ``q`` one by one, so that one copy moves
them all; else -1.

**Padding**: rows of ``q`` beyond the number of queries get 0 and ``-inf``; the programs of the first launch see to it.

**Reduce**: ``reduce[i] .. reduce[i + 1]`` are the places in the buffer that list the partials of query ``i``; the
kernel merges them in that order, so results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_SIZE = 32
# Header fields. 0..7: number of items of each launch.
NUM_QUERIES = 8
STEPS_TAKEN = 9
NUM_GROWING = 10
GROWING_BEGIN = 11
MAX_LAUNCHES = 8

# Fields of an item record.
ITEM_SIZE = 8
ROW, NUM_ROWS, PLAIN_BEGIN, PLAIN_COUNT, MASKED_BEGIN, MASKED_COUNT, PARTIAL, QUERY = range(ITEM_SIZE)

# Fields of an entry; a plain entry stops after POSITION.
WORD, POSITION, LOW, HIGH = range(4)
PLAIN_SIZE = 2
MASKED_SIZE = 4
# A word is slot << SLOT_SHIFT | second half << HALVES_SHIFT + 1 | first half << HALVES_SHIFT | count.
HALVES_SHIFT = 5
SLOT_SHIFT = 7
COUNT_MASK = (1 << HALVES_SHIFT) - 1
MAX_UNIT = 16
MAX_SLOTS = 1 << (31 - SLOT_SHIFT)
# Rows of a half of a tile: what one of Mosaic's warpgroups computes, as Hopper's matrix instruction has so many.
HALF = 64


@dataclass(frozen=True)
class TileClass:
    """The shape of a program: which items suit it is the planner's business.

    Attributes:
        rows: rows of the matrix tile, that is queries x (query heads a KV head). A power of two, at least 16.
        block_kv: tokens a step, a power of two, at least 16 and a multiple of ``unit``.
        unit: tokens a plain entry holds at most, a power of two up to ``MAX_UNIT``.
        masked_unit: the same of masked entries; 0: the program walks none. It divides ``unit``: draft tokens, each with
            rows of its own, fill one entry each below a prompt that fills sixteen.
        warps, stages: Triton's launch parameters.
        mosaic: for Mosaic GPU's kernels, where there are any; Triton's run it too.
    """

    rows: int
    block_kv: int
    unit: int
    masked_unit: int
    warps: int
    stages: int
    mosaic: bool = False

    @property
    def masked(self) -> bool:
        return self.masked_unit > 0

    def entry_tokens(self, masked: bool) -> int:
        """Tokens that an entry of the plain or the masked kind holds at most."""
        return self.masked_unit if masked else self.unit

    def heads_per_tile(self, group: int) -> int:
        """Query heads of one KV head that share a tile (all, unless the group is larger than the tile)."""
        return min(group, self.rows)

    def queries_per_tile(self, group: int) -> int:
        return self.rows // self.heads_per_tile(group)

    def halves(self, group: int) -> tuple[int, int]:
        """Where the first half of a tile's rows ends, and where the second one begins, in queries.

        The two overlap where a query has heads in both.
        """
        heads, half = self.heads_per_tile(group), self.rows // 2
        return -(-half // heads), half // heads

    def name(self) -> str:
        masked = f"m{self.masked_unit}" if self.masked else ""
        kernel = "mosaic" if self.mosaic else f"w{self.warps}s{self.stages}"
        return f"r{self.rows}k{self.block_kv}u{self.unit}{masked}{kernel}"


@dataclass(frozen=True)
class Launch:
    """Up to ``capacity`` items of one tile class, with records from ``items_at`` on.

    ``grid`` programs take one item and one KV head (or one part of its group) each, or share them if they are fewer.
    """

    tile: TileClass
    grid: int
    capacity: int
    items_at: int


@dataclass(frozen=True)
class WorkShape:
    """The static part of a plan: all that decides which program is compiled."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    launches: tuple[Launch, ...]
    row_capacity: int
    rows_at: int
    positions_at: int
    slots_at: int
    reduce_at: int
    reduce_block: int  # partials the reduction merges at a time: a power of two
    partial_rows: int  # rows of the partial buffer; 0: every item is final and there is nothing to reduce
    buffer_size: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def head_tiles(self, tile: TileClass) -> int:
        """Tiles that the query heads of one KV head take (1, unless the group is larger than the tile)."""
        return -(-self.group // tile.heads_per_tile(self.group))
