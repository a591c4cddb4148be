"""What runs in the processes of workers and learners, and is called from outside: the other half of `swarm.cluster`.

    call (asyncio) ──▶ trio loop in a thread of its own: the open roller, all its rollouts at once ──▶ Answer

What goes wrong here is an answer, not an exception: whoever asked decides what follows. Not here: who starts these
processes and what becomes of them.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import trio

from swarm.rl.ranks import RankFactory
from swarm.workers import RollerFactory


@dataclass(frozen=True, slots=True)
class Answer:
    """What a roller's method gave, or what it raised, in one line and as a traceback.

    `lost`: nothing was raised by it; the loop that it ran in came to an end, for the reason in `error`.
    """

    value: Any = None
    error: str = ""
    trace: str = ""
    lost: bool = False


async def _guarded(work: Callable[..., Awaitable[Any]], *arguments: object) -> Answer:
    try:
        return Answer(await work(*arguments))
    except Exception as e:  # the boundary: what a roller raises is told to who asked, and ends nothing here
        return Answer(error=first_line(e), trace="".join(traceback.format_exception(e)))


def first_line(error: BaseException) -> str:
    """The first error of a group, in one line."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_line(group.exceptions[0])
    return f"{type(error).__name__}: {error}".splitlines()[0]


class RankActor:
    """A rank in its process; what Ray shows it of GPUs is its own."""

    def __init__(self, factory: RankFactory, rank: int, host: Callable[[], str]) -> None:
        self._rank = factory(rank, host(), 0)

    def placed(self) -> None:
        """An answer says that there is a process."""

    def ask(self, method: str, *arguments: object) -> Answer:
        try:
            return Answer(getattr(self._rank, method)(*arguments))
        except Exception as e:  # the boundary: what a rank raises is told to who asked
            return Answer(error=first_line(e), trace=traceback.format_exc())


class RollerActor:
    """The worker in its process. Ray calls it in asyncio; the roller lives in a trio loop in a thread of its own."""

    def __init__(self) -> None:
        self._thread: _Loop | None = None

    async def placed(self) -> None:
        """An answer says that there is a process."""

    async def start(self, factory: RollerFactory) -> str:
        """Opens the roller; returns what went wrong."""
        self._thread = _Loop(factory)
        return await self._thread.opened

    async def lost(self) -> str:
        """The end of the roller's loop, which is the end of this worker; returns what went wrong."""
        assert self._thread is not None
        return await asyncio.shield(self._thread.ended)

    async def ask(self, method: str, *arguments: Any) -> Answer:
        assert self._thread is not None
        return await self._thread.call(method, *arguments)


class _Loop:
    """A trio loop with one open roller. `opened` is "" or why it did not open, `ended` why the loop is no more."""

    def __init__(self, factory: RollerFactory) -> None:
        self._factory, self._host = factory, asyncio.get_running_loop()
        self._open = True
        self.opened: asyncio.Future[str] = self._host.create_future()
        self.ended: asyncio.Future[str] = self._host.create_future()
        threading.Thread(target=self._run, name="roller", daemon=True).start()

    def _run(self) -> None:
        answer = Answer(error="its loop was interrupted")
        try:
            answer = trio.run(_guarded, self._live)
        finally:
            self._tell(self.opened, answer.error)
            self._tell(self.ended, answer.error or "its loop ended")

    async def _live(self) -> None:
        async with self._factory() as roller, trio.open_nursery() as nursery:
            self._roller, self._nursery = roller, nursery
            self._token = trio.lowlevel.current_trio_token()
            self._tell(self.opened, "")
            try:
                await trio.sleep_forever()
            finally:
                self._open = False

    def _tell(self, future: asyncio.Future[Any], value: object) -> None:
        def set_once() -> None:
            if not future.done():
                future.set_result(value)

        self._host.call_soon_threadsafe(set_once)

    async def call(self, method: str, *arguments: object) -> Answer:
        """Runs a method of the roller in its loop, beside whatever runs there; lost when the loop ends before it.

        Cancelling this cancels it.
        """
        answer: asyncio.Future[Answer] = self._host.create_future()
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                self._tell(answer, await _guarded(getattr(self._roller, method), *arguments))

        def begin() -> None:
            if self._open:  # what is raised here would end the loop
                self._nursery.start_soon(run)

        try:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(begin)
            await asyncio.wait((answer, self.ended), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else Answer(error=self.ended.result(), lost=True)
        except asyncio.CancelledError:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)
            raise
