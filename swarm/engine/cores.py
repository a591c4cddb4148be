# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A differentiable function of parts of its input, each part computed on a core of its own, forward and backward.

torch splits each operation over its threads, which wait for each other at every one; here threads meet once a
pass. That setting of torch reaches beyond a thread, so it is 1 while a pass runs and the caller's after it.
Not here: how to cut the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

A = TypeVar("A")
B = TypeVar("B")


class Share(Protocol):
    """A part of the input: its rows from `first` to `last`."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...


S = TypeVar("S", bound=Share)


def on_cores(f: Callable[..., Tensor], shares: Sequence[S], x: Tensor, *weights: Tensor) -> Tensor:
    """`f(share, rows of x, *weights)` of every share, a thread each, one after another along the first axis.

    Gradients arrive at `x` and the weights; those of the weights are added in the order of the shares.
    """
    if not torch.is_grad_enabled():
        # Whether gradients are wanted is a setting of each thread.
        return torch.cat(_each(torch.no_grad()(lambda s: f(s, x[s.first : s.last], *weights)), shares))
    if len(shares) == 1:
        return f(shares[0], x[shares[0].first : shares[0].last], *weights)
    return cast(Tensor, _OnCores.apply(f, shares, x, *weights))


class _OnCores(Function):
    """Each share has a graph of its own, from its rows and from every weight."""

    @staticmethod
    def forward(ctx: Any, f: Callable[..., Tensor], shares: Sequence[Share], x: Tensor, *weights: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[2:]

        def one(share: Share) -> tuple[list[Tensor], Tensor]:
            inputs = (x[share.first : share.last], *weights)
            leaves = [y.detach().requires_grad_(w) for y, w in zip(inputs, wanted, strict=True)]
            with torch.enable_grad():
                return leaves, f(share, *leaves)

        ctx.parts, ctx.shares, ctx.rows = _each(one, shares), shares, len(x)
        return torch.cat([out.detach() for _, out in ctx.parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        cuts = grads[0].split([len(out) for _, out in ctx.parts])

        def one(part: tuple[list[Tensor], Tensor, Tensor]) -> list[Tensor]:
            leaves, out, d_out = part
            return list(torch.autograd.grad(out, [y for y in leaves if y.requires_grad], d_out))

        work = [(leaves, out, d_out) for (leaves, out), d_out in zip(ctx.parts, cuts, strict=True)]
        ctx.parts = None
        found = _each(one, work)
        d_x = None
        if wanted[0]:
            d_x = grads[0].new_zeros(ctx.rows, *found[0][0].shape[1:])
            for share, part in zip(ctx.shares, found, strict=True):
                d_x[share.first : share.last] = part.pop(0)
        sums = iter([reduce(torch.add, parts) for parts in zip(*found, strict=True)])
        return None, None, d_x, *(next(sums) if w else None for w in wanted[1:])


def _each(f: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """`f` of every item, the first in this thread, the others in threads of their own."""
    if len(items) == 1:
        return [f(items[0])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(items) - 1, "cores", torch.set_num_threads, (1,)) as pool:
            others = [pool.submit(f, x) for x in items[1:]]
            return [f(items[0]), *(other.result() for other in others)]
    finally:
        torch.set_num_threads(threads)
