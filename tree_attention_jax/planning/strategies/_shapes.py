"""Tile shapes with their measured costs, adapted to a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.layout import TileClass
from tree_attention_jax.planning.problem import Problem
from tree_attention_jax.planning.profile import TileCost
from tree_attention_jax.planning.tiles import entry_unit, fitted


@dataclass(frozen=True)
class Shape:
    """A tile shape and what it costs here; microseconds of one SM unless said otherwise."""

    tile: TileClass
    queries: int  # queries a tile holds
    programs: float  # programs an item makes (KV heads x parts of a group), over the SMs
    item_us: float
    step_us: float
    masked_step_us: float
    latency_us: float  # of one step, seen by one program

    @property
    def token_us(self) -> float:
        return self.step_us / self.tile.block_kv

    @property
    def masked_token_us(self) -> float:
        return self.masked_step_us / self.tile.block_kv

    def masked_if(self, masked: bool) -> Shape:
        """The same shape with ``step_us`` of the masked path."""
        return replace(self, step_us=self.masked_step_us) if masked else self


def shapes_for(problem: Problem) -> list[Shape]:
    """The profile's shapes; costs grow with the head dim, and a group never spans more tiles than it must."""
    unit = entry_unit(problem)
    scale = (problem.head_dim + problem.v_head_dim) / 256

    def shape(cost: TileCost) -> Shape:
        tile = fitted(problem, cost, unit)
        per_step = scale * tile.block_kv / cost.block_kv
        parts = -(-problem.group // tile.heads_per_tile(problem.group))
        return Shape(
            tile=tile,
            queries=tile.queries_per_tile(problem.group),
            programs=problem.num_kv_heads * parts / problem.profile.num_sms,
            item_us=cost.item_us * scale,
            step_us=cost.step_us * per_step,
            masked_step_us=cost.masked_step_us * per_step,
            latency_us=cost.latency_us * per_step,
        )

    shapes = {shape(cost) for cost in problem.profile.tiles}
    return sorted(shapes, key=lambda s: (s.tile.rows, s.tile.block_kv, s.tile.warps, s.tile.stages))
