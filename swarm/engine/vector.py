# pyright: basic
"""The innermost step of the engine's attention, written as LLVM vectors: numba's own loops are five times slower here.

One query against one block of keys and values: the scores, the running softmax (arXiv 2205.14135)
and the weighted sum stay in registers. LLVM lowers the vectors to what the processor has.
Not here: loops over queries, heads and blocks (`swarm.engine.kernels`).
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

BLOCK = 32
"""Tokens of a cache block: a key block of head width 32 is 4 KB, so a pair stays in the first cache level."""
LANES = 16
"""Values are summed in pieces of so many floats: a head's width is a multiple of it."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FAST = ("fast",)
_HIDDEN = -1e30
_SUMS = 4


@intrinsic
def attend_block(typingctx, query_D, keys, values, seen, out_D, state):
    """Folds the first `seen` tokens of a block into `out_D`.

    `query_D` is scaled by log2(e) / sqrt(D); `keys` is (D, BLOCK) and `values` (BLOCK, D), both flat;
    `state` holds the greatest score so far and the sum of 2^(score - greatest), the divisor of `out_D`.
    """
    return types.void(query_D, keys, values, types.int64, out_D, state), _emit


def _emit(context, b, signature, args):
    def pointer(k):
        return context.make_array(signature.args[k])(context, b, args[k]).data

    width = b.extract_value(context.make_array(signature.args[0])(context, b, args[0]).shape, 0)
    state = pointer(5)
    total = b.gep(state, [_INT(1)])
    scores = _hide(b, _scores(b, width, pointer(0), pointer(1)), args[3])
    old = b.load(state)
    high = _reduce(b, "fmax", scores)
    high = b.select(b.fcmp_ordered(">", high, old), high, old)
    weights = _exp2(b, b.fsub(scores, _splat(b, high, BLOCK)))
    fade = b.extract_element(_exp2(b, _splat(b, b.fsub(old, high), 1)), _INT(0))
    b.store(high, state)
    b.store(_mul_add(b, b.load(total), fade, _reduce(b, "fadd", weights, _FLOAT(0.0))), total)
    _weigh(b, width, weights, fade, pointer(2), pointer(4))
    return context.get_dummy_value()


def _scores(b, width, query, keys):
    """query · key for the BLOCK keys at once, in `_SUMS` sums side by side: an addition takes four cycles."""
    zero = _const(0.0, BLOCK)
    # Kept in stack slots between rounds of the loop; LLVM moves them to registers.
    slots = [cgutils.alloca_once(b, zero.type) for _ in range(_SUMS)]
    for slot in slots:
        b.store(zero, slot)
    with cgutils.for_range_slice(b, width.type(0), width, width.type(_SUMS)) as (d, _):
        for i, slot in enumerate(slots):
            at = b.add(d, d.type(i))
            q = _splat(b, b.load(b.gep(query, [at])), BLOCK)
            b.store(_mul_add(b, q, _load(b, keys, b.mul(at, d.type(BLOCK)), BLOCK), b.load(slot)), slot)
    return _add_up(b, [b.load(slot) for slot in slots])


def _hide(b, scores, seen):
    lane = ir.Constant(ir.VectorType(_INT, BLOCK), list(range(BLOCK)))
    visible = b.icmp_signed("<", lane, _splat(b, b.trunc(seen, _INT), BLOCK))
    return b.select(visible, scores, _const(_HIDDEN, BLOCK))


def _weigh(b, width, weights, fade, values, out):
    """out = out * fade + weights · values, in `_SUMS` sums side by side."""
    with cgutils.for_range_slice(b, width.type(0), width, width.type(LANES)) as (d, _):
        zero = _const(0.0, LANES)
        sums = [b.fmul(_load(b, out, d, LANES), _splat(b, fade, LANES)), *[zero] * (_SUMS - 1)]
        for t in range(BLOCK):
            weight = b.shuffle_vector(weights, weights, ir.Constant(ir.VectorType(_INT, LANES), [t] * LANES))
            value = _load(b, values, b.add(d, b.mul(width, d.type(t))), LANES)
            sums[t % _SUMS] = _mul_add(b, weight, value, sums[t % _SUMS])
        both = _add_up(b, sums)
        b.store(both, b.bitcast(b.gep(out, [d]), both.type.as_pointer()), align=4)


def _add_up(b, sums):
    while len(sums) > 1:
        sums = [b.fadd(x, y, flags=_FAST) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _exp2(b, x):
    """2^x for x <= 0, relative error 1e-7: 2^k by the exponent's bits, the rest by a Taylor polynomial."""
    n = x.type.count
    floats, ints = x.type, ir.VectorType(_INT, n)
    least = _const(-126.0, n)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    k = b.fptosi(b.fsub(x, _const(0.5, n)), ints)
    r = b.fsub(x, b.sitofp(k, floats))
    y = _const(math.log(2) ** 7 / math.factorial(7), n)
    for i in range(6, -1, -1):
        y = _mul_add(b, y, r, _const(math.log(2) ** i / math.factorial(i), n))
    bits = b.shl(b.add(k, ir.Constant(ints, [127] * n)), ir.Constant(ints, [23] * n))
    return b.fmul(y, b.bitcast(bits, floats))


def _splat(b, x, n):
    one = b.insert_element(ir.Constant(ir.VectorType(x.type, n), ir.Undefined), x, _INT(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, n), [0] * n))


def _const(x, n):
    # LLVM refuses a float constant that is not exactly a single: round the significand to 24 bits.
    significand, exponent = math.frexp(x)
    single = math.ldexp(round(significand * 2**24), exponent - 24)
    return ir.Constant(ir.VectorType(_FLOAT, n), [single] * n)


def _mul_add(b, x, y, z):
    return b.fadd(b.fmul(x, y, flags=_FAST), z, flags=_FAST)


def _load(b, pointer, index, n):
    vector = ir.VectorType(_FLOAT, n).as_pointer()
    return b.load(b.bitcast(b.gep(pointer, [index]), vector), align=4)


def _reduce(b, name, x, *start):
    kind = ir.FunctionType(_FLOAT, [*(_FLOAT for _ in start), x.type])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.vector.reduce.{name}.v{x.type.count}f32")
    return b.call(function, [*start, x], fastmath=_FAST)
