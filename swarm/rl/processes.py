# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""The processes that train together, as sums and maxima: the part of accelerate that is used here.

With one process every function gives back what it was given. Not here: who holds which rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor


def alone() -> Accelerator:
    """The processes that were launched, or the only one: `Accelerator()` with its defaults."""
    return Accelerator()


def total(accelerator: Accelerator, x: Tensor) -> Tensor:
    """The sum of `x` over processes, known to all of them."""
    return cast(Tensor, accelerator.reduce(x, reduction="sum"))


def largest(accelerator: Accelerator, x: Tensor) -> Tensor:
    """The largest of the scalars `x` of all processes."""
    return cast(Tensor, accelerator.gather(x)).max()


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    accelerator.backward(loss)


def same_everywhere(accelerator: Accelerator, parameters: Iterable[Tensor]) -> None:
    """Gives all processes the first one's weights."""
    if accelerator.num_processes > 1:
        for p in parameters:
            p.data.copy_(cast(Tensor, broadcast(p.data)))
