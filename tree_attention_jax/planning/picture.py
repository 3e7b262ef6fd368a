"""A plan as a picture: queries down, tokens across, both depth first; what is visible, and the items laid over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_kernels import layout as lo
from tree_attention_jax._arrays import exclusive_cumsum, ragged_arange, ragged_places
from tree_attention_jax.planning.explain import host_of, summarize, walk

if TYPE_CHECKING:
    from tree_attention_jax.planning.plan import TreePlan

VISIBLE = "#b8b8b8"
ALPHA = 0.42  # of an item
# Ten hues that stay apart when translucent; neighbours in the order of the items differ strongly.
COLORS = (
    "#1f77b4",
    "#e6550d",
    "#2ca02c",
    "#9467bd",
    "#d62728",
    "#17a2b8",
    "#8c564b",
    "#e377c2",
    "#b59b00",
    "#3b3b98",
)
INCHES = (7.2, 3.2)
DPI = 150
# Nodes beyond which their borders would be all one sees.
MAX_BORDERS = 200


def draw(plan: TreePlan, path: Any = None, ax: Any = None, title: str | None = None) -> Any:
    """Draw the plan: each item in a colour, dark where its queries see the tokens, light where the mask throws it away.

    Pieces of one colour in the same rows are one item.

    Args:
        plan: fresh from ``plan_tree``.
        path: where to save the picture, if anywhere; the suffix gives the format.
        ax: ``matplotlib`` axes to draw into; ``None`` makes a figure.
        title: instead of the plan's strategy and counts.

    Returns:
        The ``matplotlib`` figure.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plan.draw() draws with matplotlib: pip install 'tree-attention-jax[explain]'") from None
    host = host_of(plan, "draw")
    if ax is None:
        figure = Figure(INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.add_subplot()
    layout, tree = host.problem.layout, host.problem.tree
    token_begin = np.zeros(tree.num_nodes, np.int64)
    lengths = tree.kv_len[layout.order]
    token_begin[layout.order] = np.cumsum(lengths) - lengths
    _draw_visible(ax, layout, tree, token_begin)
    _draw_items(ax, *_rectangles(plan, token_begin))
    ax.set_xlim(0, max(int(lengths.sum()), 1))
    ax.set_ylim(max(layout.num_rows, 1), 0)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("tokens, depth first")
    ax.set_ylabel("queries")
    ax.spines[["top", "right"]].set_visible(False)
    _add_legend(ax)
    ax.set_title(_title(plan) if title is None else title, loc="left", fontsize=10)
    if path is not None:
        ax.figure.savefig(path, dpi=DPI)
    return ax.figure


def _draw_visible(ax: Any, layout: Any, tree: Any, token_begin: np.ndarray) -> None:
    """Old tokens of a node: a rectangle. New tokens of one node: columns that start a row lower each."""
    node, new = ragged_places(tree.kv_len - layout.old_len)
    begin = np.concatenate([token_begin, token_begin[node] + layout.old_len[node] + new])
    end = np.concatenate([token_begin + layout.old_len, begin[tree.num_nodes :] + 1])
    low = np.concatenate([layout.row_begin, layout.row_begin[node] + new])
    high = np.concatenate([layout.row_end, layout.row_end[node]])
    _add_rectangles(ax, begin, end, low, high, facecolors=VISIBLE, edgecolors="none")
    borders = token_begin[tree.kv_len > 0][1:] if tree.num_nodes <= MAX_BORDERS else []
    for border in borders:
        ax.axvline(border, color="white", linewidth=0.6)


def _rectangles(plan: TreePlan, token_begin: np.ndarray) -> tuple[np.ndarray, ...]:
    """(item, first token, end token, first row, end row): one for each stretch of neighbouring tokens of an item."""
    host, shape = host_of(plan, "draw"), plan.shape
    tree = host.problem.tree
    node = np.repeat(np.arange(tree.num_nodes), tree.kv_len)
    place = np.full(max(host.num_pages, 1) * shape.page_size, -1, np.int64)
    place[tree.token_slots(host.problem.page_size)] = token_begin[node] + ragged_arange(tree.kv_len)
    walks = [walk(host.buffer, shape, index) for index in range(len(shape.launches))]
    records = np.concatenate([walked.records for walked in walks])
    first = exclusive_cumsum(np.array([len(walked.records) for walked in walks]))
    item = np.concatenate([walked.item + first[index] for index, walked in enumerate(walks)])
    token = place[np.concatenate([walked.slot for walked in walks])]
    order = np.lexsort((token, item))
    item, token = item[order], token[order]
    opens = np.ones(len(item), bool)
    opens[1:] = (item[1:] != item[:-1]) | (token[1:] != token[:-1] + 1)
    closes = np.ones(len(item), bool)
    closes[:-1] = opens[1:]
    low = records[item[opens], lo.ROW]
    return item[opens], token[opens], token[closes] + 1, low, low + records[item[opens], lo.NUM_ROWS]


def _draw_items(ax: Any, item: np.ndarray, begin: np.ndarray, end: np.ndarray, low: np.ndarray, high: np.ndarray):
    """Every item in a colour of its own, as far as there are colours."""
    # Colours go round by place in the picture, so that neighbours differ.
    _, first = np.unique(item, return_index=True)
    order = np.lexsort((begin[first], low[first]))
    color = np.empty(len(first), np.int64)
    color[order] = np.arange(len(first))
    colors = [COLORS[c % len(COLORS)] for c in color[item]]
    _add_rectangles(ax, begin, end, low, high, facecolors=colors, edgecolors="none", alpha=ALPHA)
    _add_rectangles(ax, begin, end, low, high, facecolors="none", edgecolors=colors, linewidths=0.9)


def _add_rectangles(
    ax: Any, begin: np.ndarray, end: np.ndarray, low: np.ndarray, high: np.ndarray, **style: Any
) -> None:
    from matplotlib.collections import PolyCollection

    x = np.stack([begin, end, end, begin], axis=1)
    y = np.stack([low, low, high, high], axis=1)
    ax.add_collection(PolyCollection(list(np.stack([x, y], axis=2)), **style))


def _add_legend(ax: Any) -> None:
    """In the upper right, where nothing is visible: the first queries see none of the last tokens."""
    from matplotlib.patches import Patch

    color = COLORS[0]
    visible, masked = (Patch(facecolor=_on(color, ground), edgecolor=color) for ground in (VISIBLE, "#ffffff"))
    labels = ["an item, where visible", "computed, then masked"]
    ax.legend([visible, masked], labels, loc="upper right", frameon=False, fontsize=8, borderaxespad=0.2)


def _on(color: str, ground: str) -> str:
    """The translucent colour as it looks on a ground."""
    from matplotlib.colors import to_hex, to_rgb

    (r, g, b), (r0, g0, b0) = to_rgb(color), to_rgb(ground)
    return to_hex((r0 + ALPHA * (r - r0), g0 + ALPHA * (g - g0), b0 + ALPHA * (b - b0)))


def _title(plan: TreePlan) -> str:
    summary = summarize(plan)
    items = sum(launch.items for launch in summary.launches)
    return (
        f"{summary.strategy}: {items} items, {summary.partials} partials, {summary.useful:.0%} useful work, "
        f"modelled {summary.us:.1f} µs"
    )
