"""What a plan will do, in numbers: items by tile class, padding, bytes and modelled time, against the floor.

:func:`summarize` counts, from the packed buffer, what the kernels will do; :func:`explain` puts it into a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import ceil_div, ragged_arange, ragged_places

if TYPE_CHECKING:
    from tree_attention_jax.planning.plan import HostView, TreePlan


@dataclass(frozen=True)
class LaunchSummary:
    """The items of one launch.

    Attributes:
        tile: name of the tile class.
        items: how many hold tokens; each is a program a KV head.
        queries: summed over items.
        tokens: summed over items: a token that two items walk counts twice.
        idle_rows: share of the matrix rows, over all steps, that hold no query.
        idle_tokens: share of the token slots of all steps that hold no token.
        masked: share of the (query, token) pairs computed that the mask throws away.
        read_bytes: K/V that the programs load; what the L2 serves again is in it.
        us: modelled time.
        bound: "matrix" or "memory", whichever takes longer.
    """

    tile: str
    items: int
    queries: int
    tokens: int
    idle_rows: float
    idle_tokens: float
    masked: float
    read_bytes: int
    us: float
    bound: str


@dataclass(frozen=True)
class Summary:
    """A whole plan.

    Attributes:
        strategy, gpu: their names.
        nodes, queries: of the forest.
        launches: in order.
        partials: rows of the partial buffer, each an output and a log-sum-exp for every query head.
        partial_bytes: of writing them and reading them again; 0: every item writes its queries' final output.
        reduce_us: modelled time of the reduction.
        unique_bytes: K/V that has to be read at least once.
        useful: share of all matrix elements computed that are visible (query, token) pairs.
        floor_us: no plan takes less: the unique bytes at the memory's rate, or the visible pairs at the best tile's.
    """

    strategy: str
    gpu: str
    nodes: int
    queries: int
    launches: tuple[LaunchSummary, ...]
    partials: int
    partial_bytes: int
    reduce_us: float
    unique_bytes: int
    useful: float
    floor_us: float

    @property
    def us(self) -> float:
        return sum(launch.us for launch in self.launches) + self.reduce_us

    @property
    def read_bytes(self) -> int:
        return sum(launch.read_bytes for launch in self.launches)


def summarize(plan: TreePlan) -> Summary:
    """Count what the kernels will do.

    Raises:
        ValueError: the plan came out of a trace and has no host part.
    """
    from tree_attention_jax.planning.model import launch_times

    host = host_of(plan, "explain")
    problem, profile, shape = host.problem, host.problem.profile, plan.shape
    token_bytes = (shape.head_dim + shape.v_head_dim) * problem.heads.itemsize * shape.num_kv_heads
    times = launch_times(plan)
    walks = [walk(host.buffer, shape, index) for index in range(len(shape.launches))]
    works = [_Work.of(walked, launch, shape.group) for walked, launch in zip(walks, shape.launches)]
    launches = tuple(
        LaunchSummary(
            tile=time.name,
            items=len(walked.records),
            queries=int(walked.records[:, lo.NUM_ROWS].sum()),
            tokens=len(walked.item),
            idle_rows=1 - work.cells_of_queries / work.cells,
            idle_tokens=1 - work.cells_filled / work.cells_of_queries,
            masked=1 - work.cells_visible / work.cells_filled,
            read_bytes=len(walked.item) * work.head_tiles * token_bytes,
            us=time.us,
            bound="matrix" if time.work_us >= time.memory_us else "memory",
        )
        for time, walked, work in zip(times, walks, works)
        if len(walked.records)
    )
    unique_bytes = len(np.unique(np.concatenate([walked.slot for walked in walks]))) * token_bytes
    cells, visible = sum(work.cells for work in works), sum(work.cells_visible for work in works)
    cell_us = min(tile.step_us / (tile.rows * tile.block_kv) for tile in profile.tiles) / profile.num_sms
    cell_us *= (shape.head_dim + shape.v_head_dim) / 256  # profiles are for head dim 128
    return Summary(
        strategy=host.strategy,
        nodes=problem.tree.num_nodes,
        queries=host.num_queries,
        gpu=profile.name,
        launches=launches,
        partials=host.num_partials,
        partial_bytes=2 * 4 * host.num_partials * shape.num_q_heads * (shape.v_head_dim + 1),
        reduce_us=sum(time.us for time in times[len(walks) :]),
        unique_bytes=unique_bytes,
        useful=visible / cells if cells else 1.0,
        floor_us=max(unique_bytes / profile.bytes_per_us, visible * shape.num_kv_heads * cell_us),
    )


def host_of(plan: TreePlan, what: str) -> HostView:
    """The plan's host part, or an error that says why it has none."""
    if plan.host is None:
        raise ValueError(f"{what}: this plan has passed through jax.jit or advance(), which keep only its buffer")
    return plan.host


@dataclass(frozen=True)
class Walk:
    """The items of one launch that hold tokens, and every token that each of them walks."""

    records: np.ndarray  # as in the buffer
    item: np.ndarray  # index into the records, one for each token walked
    slot: np.ndarray  # its place in the cache
    seen: np.ndarray  # how many of the item's rows see it


def walk(buffer: np.ndarray, shape: lo.WorkShape, index: int) -> Walk:
    """Read launch ``index`` from the packed buffer, as a kernel does."""
    launch = shape.launches[index]
    records = buffer[launch.items_at :][: int(buffer[index]) * lo.ITEM_SIZE].reshape(-1, lo.ITEM_SIZE)
    records = records[records[:, lo.PLAIN_COUNT] + records[:, lo.MASKED_COUNT] > 0]  # the others pad the query bucket
    parts = [_tokens_walked(buffer, records, masked) for masked in (False, True)]
    return Walk(records, *(np.concatenate(column) for column in zip(*parts)))


def _tokens_walked(buffer: np.ndarray, records: np.ndarray, masked: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(item, cache slot, rows of the item that see it) of every token of the items' plain or masked entries."""
    size = lo.MASKED_SIZE if masked else lo.PLAIN_SIZE
    count = records[:, lo.MASKED_COUNT if masked else lo.PLAIN_COUNT]
    item, nth = ragged_places(count)
    entry = records[item, lo.MASKED_BEGIN if masked else lo.PLAIN_BEGIN] + nth * size
    filled = buffer[entry + lo.WORD] & lo.COUNT_MASK
    place = ragged_arange(filled)
    item, entry = np.repeat(item, filled), np.repeat(entry, filled)
    low, high = records[item, lo.ROW], records[item, lo.ROW] + records[item, lo.NUM_ROWS]
    if masked:
        seen_from = buffer[entry + lo.LOW]
        low = np.maximum(low, np.where(seen_from < 0, ~seen_from + place, seen_from))
        high = np.minimum(high, buffer[entry + lo.HIGH])
    return item, (buffer[entry + lo.WORD] >> lo.SLOT_SHIFT) + place, np.maximum(high - low, 0).astype(np.int64)


@dataclass(frozen=True)
class _Work:
    """What one launch computes for one KV head. A cell is one matrix row times one token slot of a step."""

    cells: int
    cells_of_queries: int  # in rows that hold a query
    cells_filled: int  # ... and in slots that hold a token
    cells_visible: int  # ... and the query sees the token
    head_tiles: int  # tiles that a large group takes

    @staticmethod
    def of(walked: Walk, launch: lo.Launch, group: int) -> _Work:
        tile, records = launch.tile, walked.records
        head_tiles = ceil_div(group, tile.heads_per_tile(group))
        rows = records[:, lo.NUM_ROWS].astype(np.int64)
        slots = np.zeros(len(records), np.int64)
        for masked, field in ((False, lo.PLAIN_COUNT), (True, lo.MASKED_COUNT)):  # two loops, so two last steps
            slots += ceil_div(records[:, field] * tile.entry_tokens(masked), tile.block_kv) * tile.block_kv
        return _Work(
            cells=int(slots.sum()) * tile.rows * head_tiles,
            cells_of_queries=int((rows * slots).sum()) * group,
            cells_filled=int(rows[walked.item].sum()) * group,
            cells_visible=int(walked.seen.sum()) * group,
            head_tiles=head_tiles,
        )


def explain(plan: TreePlan) -> Any:
    """:func:`summarize` as a ``rich`` table: print it with ``rich.print``."""
    try:
        from rich import box
        from rich.table import Table
    except ImportError:
        raise ImportError(
            "plan.explain() makes its table with rich: pip install 'tree-attention-jax[explain]'"
        ) from None
    summary = summarize(plan)
    table = Table(
        title=f"{summary.strategy}: {summary.queries:,} queries over {summary.nodes:,} nodes",
        caption=_caption(summary),
        box=box.SIMPLE,
        padding=0,  # the box has a blank between columns, and the table should fit a terminal
        show_edge=False,
        show_footer=True,
    )
    for name, footer in (
        ("tile", "total"),
        ("items", f"{sum(launch.items for launch in summary.launches):,}"),
        ("queries\n/ item", ""),
        ("tokens\n/ item", ""),
        ("idle\nrows", ""),
        ("idle\ntokens", ""),
        ("masked\npairs", ""),
        ("bytes", _bytes(summary.read_bytes + summary.partial_bytes)),
        ("time\nµs", f"{summary.us:.1f}"),
        ("bound\nby", ""),
    ):
        justify = "left" if name in ("tile", "bound\nby") else "right"
        table.add_column(name, footer, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in _rows(summary):
        table.add_row(*row)
    return table


def _rows(summary: Summary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            launch.tile,
            f"{launch.items:,}",
            f"{launch.queries / launch.items:.1f}",
            f"{launch.tokens / launch.items:.1f}",
            f"{launch.idle_rows:.0%}",
            f"{launch.idle_tokens:.0%}",
            f"{launch.masked:.0%}",
            _bytes(launch.read_bytes),
            f"{launch.us:.1f}",
            launch.bound,
        )
        for launch in summary.launches
    ]
    if summary.partials:
        cost = _bytes(summary.partial_bytes), f"{summary.reduce_us:.1f}", "memory"
        rows.append(("partials", f"{summary.partials:,}", *[""] * 5, *cost))
    return rows


def _caption(summary: Summary) -> str:
    times = summary.read_bytes / summary.unique_bytes if summary.unique_bytes else 1.0
    return (
        f"{summary.gpu}: modelled {summary.us:.1f} µs, floor {summary.floor_us:.1f} µs. "
        f"{_bytes(summary.unique_bytes)} of K/V, loaded {times:.2f} times on average. "
        f"Of the matrix elements computed, {summary.useful:.0%} are visible pairs."
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
