"""Zeros in some lines of shared memory, each thread by itself: what Pallas' stores of whole arrays cannot do.

Those would read what they do not change, and wait for the whole warpgroup before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic_work import Scalar

# V as it is cleaned: lines of 128 bytes. A tile of 8 tokens by 64 columns is 8 lines, a token's columns in one of them.
# A swizzle moves columns within their line, which does not matter to zeros.
LINE_BYTES = 128
LINE_COLUMNS = 64
TILE_TOKENS = 8
THREADS = 128
# A thread writes so much at once: eight of them a line.
STORE_BYTES = 16
WORD_BITS = 32


def zero_tokens(lines_ref: Any, width: int, holds: Sequence[Scalar]) -> None:
    """Zeros the tokens that are not held: lines_ref int32 [lines, 32], of tokens with ``width`` columns of 16 bits.

    holds: a bit a token, in words of 32. Call it from a whole warpgroup, and commit the memory afterwards.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * len(holds)))
    def store(_, lines, *words) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def constant(value: int) -> ir.Value:
            return utils.c(value, i32)

        thread = arith.remui(utils.thread_idx(), constant(THREADS))
        line = arith.divui(thread, constant(LINE_BYTES // STORE_BYTES))  # of those that a pass writes
        first = utils.getelementptr(utils.memref_ptr(lines), [arith.muli(thread, constant(STORE_BYTES))], _byte())
        zeros = _zeros(i32)
        lines_a_pass = THREADS * STORE_BYTES // LINE_BYTES
        tile_lines = TILE_TOKENS * width // LINE_COLUMNS
        tokens = WORD_BITS * len(words)
        for i in range(tokens * width // LINE_COLUMNS // lines_a_pass):
            tile, within = divmod(i * lines_a_pass, tile_lines)
            # A pass begins with a tile, or within one at the first of its tokens.
            token = arith.remui(line, constant(TILE_TOKENS))
            if tile_lines < lines_a_pass:
                tiles = arith.muli(arith.divui(line, constant(tile_lines)), constant(TILE_TOKENS))
                token = arith.addi(token, tiles)
            assert within % TILE_TOKENS == 0
            word, bit = divmod(tile * TILE_TOKENS, WORD_BITS)
            bits = arith.shrui(words[word].registers.flat[0], arith.addi(token, constant(bit)))
            empty = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(bits, constant(1)), constant(0))
            with utils.when(empty):
                place = utils.getelementptr(first, [i * lines_a_pass * LINE_BYTES], _byte())
                llvm.store(zeros, place, alignment=STORE_BYTES)

    store(lines_ref, *holds)


def _byte() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def _zeros(i32: ir.Type) -> ir.Value:
    vector = ir.VectorType.get((STORE_BYTES // 4,), i32)
    constant: Any = arith.constant  # whose stub knows no vectors
    return constant(vector, ir.DenseElementsAttr.get_splat(vector, ir.IntegerAttr.get(i32, 0)))
