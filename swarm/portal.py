"""Trio in a thread of its own, for callers that have none: a notebook, whose thread runs asyncio, or a sync graph.

    with Portal() as portal:
        engine = portal.enter(open_engine)           a context manager, held open in a task of its own
        rollout = portal.call(harness.roll, task)    any async function; Ctrl-C cancels it

Not here: what is called. For trio in the one direction and asyncio in the other see `swarm.graph_bridge`.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Portal:
    """A running trio. What was entered is left, in the opposite order, when it is closed."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._held: list[trio.Event] = []
        self._left: list[trio.Event] = []
        # A daemon: a program that forgets to close it must still end.
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="trio", daemon=True)
        self._thread.start()
        self._ready.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """What the function returns or raises. To be called from any thread but trio's own."""
        scope = trio.CancelScope()

        async def scoped() -> T:
            with scope:
                return await function(*args)
            raise RuntimeError("the call was cancelled")

        try:
            return trio.from_thread.run(scoped, trio_token=self._token)
        except KeyboardInterrupt:
            self._token.run_sync_soon(scope.cancel)
            raise

    def enter(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Enters a context manager; what it gives stays open until the portal is closed. Raises as entering does."""
        return self.call(self._enter, opens)

    def close(self) -> None:
        """Leaves all that was entered and ends the thread. Again, it does nothing."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stop.set)
            self._thread.join()

    async def _main(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._ready.set()
            await self._stop.wait()
            for leave, gone in zip(reversed(self._held), reversed(self._left), strict=True):
                leave.set()
                await gone.wait()

    async def _enter(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        value: list[T] = []
        errors: list[Exception] = []
        opened, leave, gone = trio.Event(), trio.Event(), trio.Event()

        async def hold() -> None:
            try:
                async with opens() as entered:
                    value.append(entered)
                    opened.set()
                    await leave.wait()
            except Exception as error:  # whoever enters gets it whole
                if value:
                    raise
                errors.append(error)
            finally:
                opened.set()
                gone.set()

        self._nursery.start_soon(hold)
        await opened.wait()
        if errors:
            raise errors[0]
        self._held.append(leave)
        self._left.append(gone)
        return value[0]
