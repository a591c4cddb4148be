"""An engine's background task, and when it takes its next step: a step costs about the same for one as for many.

When a completion arrives, its agent parses it, runs its tools and asks for the next turn, which takes some passes of
the scheduler. An engine that steps right away takes those requests one step later, in batches that are half full.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

_PASSES = 64


async def settle() -> None:
    """Returns when no other task is ready to run, or after some passes when there is always one."""
    for _ in range(_PASSES):
        await trio.lowlevel.checkpoint()
        if not trio.lowlevel.current_statistics().tasks_runnable:
            return


@asynccontextmanager
async def running(task: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Runs `task` beside the body, and cancels it at the end. What the body raises comes out as it is, in no group."""
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task)
        try:
            yield
        except BaseException as e:  # kept whole, and raised again below
            raised = e
        nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised
