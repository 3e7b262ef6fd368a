"""A meeting of two warpgroups at a barrier of the hardware's own, an instruction a warp.

One of Pallas' barriers takes an arrival of each of 256 threads in shared memory, and then as many looks at its phase.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# Mosaic takes number 0 for a whole program, and the next ones for its warpgroups.
NUMBER = 8
THREADS = 256


@plgpu.inline_mgpu()
def meet(_) -> None:
    """Wait until both computing warpgroups are here."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], f"bar.sync {NUMBER}, {THREADS};", "", has_side_effects=True)
