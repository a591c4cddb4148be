"""Between trio, in which our engines live, and asyncio, in which LangGraph does.

    trio task ──── Loop.run(graph) ───▶ asyncio thread ── node ── Desk.ask(work) ───▶ trio task, in the nursery
        ◀──── result, error ──────          └── worker thread of a sync node ── Desk.wait(work) ──▶ the same

One thread has one asyncio loop, in which all graphs run at once. A cancellation crosses both ways: a rollout whose
deadline is over cancels its graph, and a node that is cancelled cancels what it waits for. Not here: what crosses.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import trio

T = TypeVar("T")

Work = Callable[[], Awaitable[T]]
"""Something for trio to do: `lambda: engine.generate(ids, sampling)`. Called in the order of asking, then awaited."""

_SYNC = 256
"""How many nodes that are no coroutines may be waiting at once."""


class Loop:
    """An asyncio loop in a thread of its own: `await Loop().run(lambda: graph.ainvoke(state))`.

    The thread ends with the object. A graph that does not end within `grace` seconds of its cancellation, because
    it blocks the loop, is given up: it is Python's way that nobody can stop it.
    """

    def __init__(self, grace: float = 10.0) -> None:
        self.grace = grace
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_SYNC, "graph"))
        # A daemon, which knows the loop only: one that hangs must not keep the process alive, nor this object.
        threading.Thread(target=_forever, args=(self._loop,), name="asyncio", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises; it sees this task's context variables.

        Cancelled here, it is cancelled there, and this waits for its end. Raises TimeoutError when that does not come.
        """
        token, ended, tasks = trio.lowlevel.current_trio_token(), trio.Event(), list[asyncio.Task[T]]()

        def start() -> None:
            tasks.append(asyncio.ensure_future(work()))
            tasks[0].add_done_callback(lambda _: _soon(token, ended.set))

        self._loop.call_soon_threadsafe(start)
        try:
            await ended.wait()
        except trio.Cancelled:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self.grace):
                await ended.wait()
            if not ended.is_set():
                raise TimeoutError(f"a graph did not end within {self.grace:g} s of its cancellation") from None
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise RuntimeError("the graph cancelled itself") from None


class Desk:
    """Takes work for a trio nursery from other threads, until it is closed: `await desk.ask(work)` in asyncio."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False

    async def ask(self, work: Work[T]) -> T:
        """For a task of asyncio. Cancelled there, the work is cancelled here. Raises what the work raises."""
        return await asyncio.wrap_future(self._handed(work))

    def wait(self, work: Work[T]) -> T:
        """For a thread without a loop, which it blocks. Raises what the work raises."""
        return self._handed(work).result()

    def close(self) -> None:
        """From here on all work is refused with RuntimeError."""
        self._closed = True

    def _handed(self, work: Work[T]) -> Future[T]:
        future: Future[T] = Future()
        if self._closed or not _soon(self._token, lambda: self._take(work, future)):
            raise RuntimeError("this rollout is over, want calls only while its graph runs")
        return future

    def _take(self, work: Work[T], future: Future[T]) -> None:
        if self._closed:
            future.cancel()
            return
        try:
            begun = work()
        except Exception as error:  # handed over whole to the thread that waits, which raises it
            _settle(future.set_exception, error)
        else:
            self._nursery.start_soon(self._do, begun, future)

    async def _do(self, work: Awaitable[T], future: Future[T]) -> None:
        with trio.CancelScope() as scope:
            future.add_done_callback(lambda f: _soon(self._token, scope.cancel) if f.cancelled() else None)
            try:
                result = await work
            except trio.Cancelled:
                future.cancel()
                raise
            except Exception as error:
                _settle(future.set_exception, error)
            else:
                _settle(future.set_result, result)


def _settle(give: Callable[[Any], None], value: object) -> None:
    """Gives a future its outcome, unless who waited for it has gone."""
    with suppress(InvalidStateError):
        give(value)


def _soon(token: trio.lowlevel.TrioToken, call: Callable[[], object]) -> bool:
    """Has trio's thread call it; false where trio runs no more."""
    try:
        token.run_sync_soon(call)
    except trio.RunFinishedError:
        return False
    return True


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:  # of none, gather would ask for the loop of this thread, which has none
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
