# pyright: basic
"""The innermost step of the training attention, written as LLVM vectors: a small product that stays in registers.

Scores, weighted sums and all gradients of attention are products of strips of rows; each is covered by tiles of
ROWS x LANES sums, which fill eight of the sixteen registers of AVX2 (numba's own loops keep sums in memory).
Not here: loops over tiles (`swarm.engine.attention`), large products (torch).
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

ROWS = 4
LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FAST = ("fast",)


@intrinsic
def multiply_tile(typingctx, a, a_at, a_row, a_step, b, b_at, b_step, c, c_at, c_row, count, add):
    """c[i, lane] = Σ_j a[i, j] · b[j, lane] for ROWS rows i, LANES lanes and `count` steps j, or += where `add`.

    All three are flat float32 arrays: a[i, j] stands at `a_at + i·a_row + j·a_step`, b[j, lane] at
    `b_at + j·b_step + lane`, c[i, lane] at `c_at + i·c_row + lane`. Nothing is checked.
    """
    long = types.int64
    kinds = (a, long, long, long, b, long, long, c, long, long, long, types.boolean)
    return types.void(*kinds), _emit


def _emit(context, b, signature, args):
    def pointer(k):
        return context.make_array(signature.args[k])(context, b, args[k]).data

    _, a_at, a_row, a_step, _, b_at, b_step, _, c_at, c_row, count, add = args
    a_data, b_data, c_data = pointer(0), pointer(4), pointer(7)
    outs = [_vector_at(b, c_data, b.add(c_at, b.mul(c_row, c_row.type(i)))) for i in range(ROWS)]
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    # Kept in stack slots between rounds of the loop; LLVM moves them to registers.
    slots = [cgutils.alloca_once(b, _VECTOR) for _ in range(ROWS)]
    with b.if_else(add) as (then, otherwise):
        with then:
            for slot, out in zip(slots, outs, strict=True):
                b.store(b.load(out, align=4), slot)
        with otherwise:
            for slot in slots:
                b.store(zero, slot)
    with cgutils.for_range(b, count) as loop:
        line = b.load(_vector_at(b, b_data, b.add(b_at, b.mul(loop.index, b_step))), align=4)
        first = b.add(a_at, b.mul(loop.index, a_step))
        for i, slot in enumerate(slots):
            x = b.load(b.gep(a_data, [b.add(first, b.mul(a_row, a_row.type(i)))]))
            product = b.fmul(_splat(b, x), line, flags=_FAST)
            b.store(b.fadd(product, b.load(slot), flags=_FAST), slot)
    for slot, out in zip(slots, outs, strict=True):
        b.store(b.load(slot), out, align=4)
    return context.get_dummy_value()


def _vector_at(b, data, index):
    return b.bitcast(b.gep(data, [index]), _VECTOR.as_pointer())


def _splat(b, x):
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, _INT(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))
