"""One thread that runs what trio tasks hand it, in order: for a library that must be called from one thread.

    await thread.call(step)      the task waits, other tasks go on; what the step raises is raised here

trio's own threads come from a pool, where each new one would start a set of OpenMP threads of its own. A call that
takes too long cannot be stopped: the thread is given up, and with it whatever it works on. What takes no longer than
handing it over is run where it is asked for, if nothing else runs: never two calls at once. Not here: what is run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import trio

from swarm.types import EngineError

T = TypeVar("T")


class _Call(Generic[T]):
    """One piece of work, its result or error, and the event that its task waits for."""

    def __init__(self, work: Callable[[], T], limit: float) -> None:
        self.work, self.limit = work, limit
        self.done = trio.Event()
        self.token = trio.lowlevel.current_trio_token()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as e:  # handed over whole to the task that waits, which raises it
            self.error = e
        with suppress(trio.RunFinishedError):  # nobody waits any more
            self.token.run_sync_soon(self.done.set)


class Thread:
    """`thread = Thread("vllm", seconds=120); await thread.call(engine.step); thread.close()`."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.lost = ""
        self._waiting: list[_Call[Any]] = []
        self._busy = threading.Lock()
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        # A daemon: one that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T], seconds: float | None = None, *, brief: bool = False) -> T:
        """What `work` returns or raises. Raises EngineError when it takes too long; every later call does so too.

        `seconds` begin when the calls before it are done. Work that is `brief`, and waits for nobody, is run here and
        now if it can be, without a limit.
        """
        if self.lost:
            raise EngineError(self.lost)
        if brief and self._busy.acquire(blocking=False):
            try:
                return work()
            finally:
                self._busy.release()
        call = _Call(work, self.seconds if seconds is None else seconds)
        limit = call.limit + sum(c.limit for c in self._waiting)
        self._waiting.append(call)
        self._calls.put(call)
        try:
            # Not to be cancelled: the work goes on all the same, and what it changes is changed.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + limit):
                await call.done.wait()
        finally:
            self._waiting.remove(call)
        if not call.done.is_set():
            self.lost = self.lost or f"{self.name}: no answer within {limit:g} s"
            raise EngineError(self.lost)
        if call.error is not None:
            raise call.error
        return call.result  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Lets the thread end after what it was handed; does not wait for one that was given up."""
        self._calls.put(None)
        if not self.lost:
            self._thread.join(self.seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with self._busy:
                call.run()
