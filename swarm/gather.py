"""Many rollouts at once, results in the order in which they were asked for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from swarm.checks import want
from swarm.types import Budget, Rollout, Runner, Task

YOUNG = 50_000
"""How many objects are made, less those that are freed, before the garbage collector looks at them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to make: a task, how it is run, and the seed that all of its randomness comes from."""

    harness: Runner
    task: Task
    seed: int
    budget: Budget


async def gather(
    jobs: Sequence[Job], *, at_once: int = 256, done: Callable[[Rollout], None] | None = None
) -> list[Rollout]:
    """Runs the jobs, at most `at_once` root agents at a time; `done` hears of each as it ends.

    Raises ValueError for an `at_once` below 1.
    """
    want("gather", "at_once", at_once, at_once >= 1, "at least 1")
    results: list[Rollout | None] = [None] * len(jobs)
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for k, job in waiting:
            results[k] = rollout = await job.harness.roll(job.task, job.seed, job.budget)
            if done is not None:
                done(rollout)

    with _collecting_less():
        async with trio.open_nursery() as nursery:
            for _ in range(min(at_once, len(jobs))):
                nursery.start_soon(work)
    return [r for r in results if r is not None]


@contextmanager
def _collecting_less() -> Generator[None]:
    """Has the garbage collector look at young objects less often, and at what was alive before not at all.

    Agents are many objects that live from turn to turn. The full collections that they bring about look through all
    of them, and through all that torch and transformers made when they were imported, and find nothing: an agent
    leads to no cycle. What somebody has frozen already, as vLLM does, stays so.
    """
    young, *older = gc.get_threshold()
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    gc.set_threshold(max(young, YOUNG) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        if not frozen:
            gc.unfreeze()
