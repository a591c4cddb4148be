"""A worker's loop: what becomes of calls when the loop comes to an end under them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from swarm.actors import Answer, RollerActor
from swarm.workers import RollerFactory

LOST = Answer(error="MemoryError: of an engine", lost=True)


class Closing:
    """A roller whose loop collapses when told, and then stands still until `closed` is set."""

    def __init__(self, *, stands_still: bool = False) -> None:
        self.collapsed, self.closed = threading.Event(), threading.Event()
        if not stands_still:
            self.closed.set()

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[Closing]:
        try:
            async with trio.open_nursery() as self.nursery:
                yield self
        finally:
            self.collapsed.set()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.closed.wait)

    async def collapse(self) -> None:
        async def fail() -> None:
            raise MemoryError("of an engine")

        self.nursery.start_soon(fail)
        await trio.sleep_forever()

    async def echo(self, word: str) -> str:
        return word

    async def late(self, cancelled: Callable[[], None]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled()


async def started(roller: Closing) -> RollerActor:
    actor = RollerActor()
    assert await actor.start(cast(RollerFactory, roller)) == ""
    return actor


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 30))


def test_a_call_is_answered_in_the_loop() -> None:
    async def work() -> Answer:
        return await (await started(Closing())).ask("echo", "a")

    assert run(work) == Answer("a")


def test_a_call_under_which_the_loop_ends_is_lost_with_the_cause() -> None:
    async def work() -> tuple[Answer, str]:
        actor = await started(Closing())
        return await actor.ask("collapse"), await actor.lost()

    assert run(work) == (LOST, LOST.error)


def test_a_call_while_the_loop_closes_is_lost_with_the_cause() -> None:
    async def work() -> list[Answer]:
        roller = Closing(stands_still=True)
        actor = await started(roller)
        calls = [asyncio.create_task(actor.ask("collapse"))]
        await asyncio.to_thread(roller.collapsed.wait)
        calls.append(asyncio.create_task(actor.ask("echo", "a")))
        await asyncio.sleep(0)  # the call is on its way
        roller.closed.set()
        return await asyncio.gather(*calls)

    assert run(work) == [LOST, LOST]


def test_a_call_after_the_loop_has_ended_is_lost_with_the_cause() -> None:
    async def work() -> Answer:
        actor = await started(Closing())
        await actor.ask("collapse")
        return await actor.ask("echo", "a")

    assert run(work) == LOST


def test_who_stops_waiting_for_the_end_takes_nobody_along() -> None:
    async def work() -> Answer:
        actor = await started(Closing())
        waiting = asyncio.create_task(actor.lost())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return await actor.ask("collapse")

    assert run(work) == LOST


def test_a_cancelled_call_is_cancelled_in_the_loop() -> None:
    async def work() -> bool:
        actor = await started(Closing())
        cancelled = threading.Event()
        call = asyncio.create_task(actor.ask("late", cancelled.set))
        assert await actor.ask("echo", "a") == Answer("a")
        call.cancel()
        await asyncio.wait([call])
        return await asyncio.to_thread(cancelled.wait, 10)

    assert run(work)
