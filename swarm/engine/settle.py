"""An engine's background task, and when it takes its next step: a step costs about the same for one as for many.

When a completion arrives, its agent parses it, runs its tools and asks for the next turn, which takes some passes of
the scheduler. An engine that steps right away takes those requests one step later, in batches that are half full.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing

_PATIENCE = 0.01


async def settle() -> None:
    """Returns when every other task waits for something, or after 10 ms where one is always busy."""
    with trio.move_on_after(_PATIENCE):
        await trio.testing.wait_all_tasks_blocked()


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
