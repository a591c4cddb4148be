"""The thread that a library is called in: one call at a time, in it or here, each with its limit."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio

from swarm.engine.thread import Thread
from swarm.types import EngineError


async def test_what_is_brief_runs_here_and_the_rest_in_the_thread():
    thread = Thread("t", 5.0)
    assert await thread.call(threading.get_ident, brief=True) == threading.get_ident()
    assert await thread.call(threading.get_ident) != threading.get_ident()
    thread.close()


async def test_what_is_brief_waits_its_turn_where_something_runs():
    thread, begun, release = Thread("t", 5.0), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        release.wait()

    async def brief() -> None:
        ran.append(await thread.call(threading.get_ident, brief=True))

    ran: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.call, long)
        await trio.to_thread.run_sync(begun.wait)
        nursery.start_soon(brief)
        await trio.testing.wait_all_tasks_blocked()
        assert not ran
        release.set()
    assert ran != [threading.get_ident()]
    thread.close()


async def test_what_a_brief_call_raises_is_raised_and_the_next_one_runs():
    thread = Thread("t", 5.0)
    with pytest.raises(ZeroDivisionError):
        await thread.call(partial(divmod, 1, 0), brief=True)
    assert await thread.call(partial(divmod, 7, 2), brief=True) == (3, 1)
    assert await thread.call(partial(divmod, 7, 3)) == (2, 1)
    thread.close()


async def test_the_limit_of_a_call_begins_when_those_before_it_are_done(autojump_clock: trio.testing.MockClock):
    thread, release = Thread("t", 10.0), threading.Event()
    errors: list[str] = []

    async def call(seconds: float) -> None:
        try:
            await thread.call(release.wait, seconds)
        except EngineError as e:
            errors.append(f"{e} at {trio.current_time() - began:g}")

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, 600.0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(call, 10.0)
    assert errors[0] == "t: no answer within 600 s at 600"
    assert errors[1].endswith("at 610")
    release.set()
