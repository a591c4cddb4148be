"""How long something takes at best, beside what the machine takes at the same time for something known."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def quick(work: Callable[[], object], seconds: float, numbers: int, of_a_sort: float) -> bool:
    """Whether the best of some tries is within `seconds`; or, where the machine is slow just now, within that part of
    what it takes to sort so many random float64."""
    best = min(_time(work) for _ in range(300))
    if best <= seconds:
        return True
    # Afterwards, not in turns: what is sorted would push the work out of the caches.
    unsorted = torch.rand(numbers, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return best <= of_a_sort * min(_time(unsorted.sort) for _ in range(50))


def _time(work: Callable[[], object]) -> float:
    """Processor seconds of this thread: the work of others does not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started
