"""The load of `benchmarks.scale`, and the same agents written without a framework: asyncio, trio, trio with deadlines.

An agent has `steps` turns. Each turn it asks an engine, which answers everybody who waits every 5 ms, and parses
the answer, 211 bytes of JSON: a tool call, which is run and whose result is kept, or in the last turn the answer.

    python -m benchmarks.scale_cells SYSTEM AGENTS STEPS      one line of JSON

Not here: our loop (`benchmarks.scale_swarm`), LangGraph (`benchmarks.scale_langgraph`), the table.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Protocol

import trio

PERIOD = 0.005
DEADLINE = 3600.0
SIZE = 211
"""Bytes of a message."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one cell cost, and what it did: `answers` of the engine and `calls` of the tool, both counted.

    `cpu` and `wall` in seconds, from before the first agent exists until after the last has ended. `idle_bytes`:
    by how much resident memory has grown when all agents wait for their last answer; `transcript_bytes`: how much
    of that is the lists (or spans) of what they said and saw.
    """

    system: str
    agents: int
    steps: int
    answers: int
    calls: int
    cpu: float
    wall: float
    idle_bytes: int
    transcript_bytes: int


def messages(steps: int) -> tuple[str, ...]:
    """What an agent says in its turns, each 211 bytes of JSON; the last is the answer."""
    calls = [_sized({"name": "look", "arguments": {"page": k, "query": ""}}, "query") for k in range(steps - 1)]
    return (*calls, _sized({"answer": ""}, "answer"))


def _sized(message: dict, field: str) -> str:
    text = "of every airport the name and the elevation " * 5
    inner = message.get("arguments", message)
    inner[field] = text[: SIZE - len(json.dumps(message))]
    return json.dumps(message)


def look(arguments: Mapping[str, object]) -> str:
    """The tool."""
    return f"page {arguments['page']}: nothing new"


class Waker(Protocol):
    """`trio.Event` and `asyncio.Event`."""

    async def wait(self) -> object: ...

    def set(self) -> None: ...


class Ticks:
    """An engine's clock: everybody who waits goes on at the next tick, every 5 ms.

    The last answers come when all agents wait for theirs: then their memory is taken, as `idle_bytes`.
    """

    def __init__(self, agents: int, event: Callable[[], Waker], sleep: Callable[[float], Awaitable[object]]) -> None:
        self._agents, self._event, self._sleep = agents, event, sleep
        self._tick, self._end = event(), event()
        self._waiting = self._ending = self.answers = 0
        self._before = resident()
        self.idle_bytes = 0

    async def next(self, last: bool) -> None:
        """Waits for an answer."""
        if last:
            self._ending += 1
            await self._end.wait()
        else:
            self._waiting += 1
            await self._tick.wait()

    async def drive(self) -> None:
        while self._ending < self._agents:
            await self._sleep(PERIOD)
            tick, self._tick = self._tick, self._event()
            self.answers, self._waiting = self.answers + self._waiting, 0
            tick.set()
        self.idle_bytes = resident() - self._before
        self.answers += self._ending
        self._end.set()


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Alone:
    """An agent without a framework; counts the calls of the tool, and keeps the last transcript."""

    def __init__(self, ticks: Ticks, steps: int) -> None:
        self._ticks, self._said = ticks, messages(steps)
        self.calls = 0
        self.history: list[str] = []

    async def run(self) -> None:
        history: list[str] = []
        for said in self._said:
            await self._ticks.next(said is self._said[-1])
            history.append(said)
            message = json.loads(said)
            if "answer" in message:
                break
            history.append(look(message["arguments"]))
            self.calls += 1
        self.history = history

    async def run_timed(self) -> None:
        with trio.move_on_after(DEADLINE):
            await self.run()


def trio_agents(agents: int, steps: int, *, deadline: bool) -> Measured:
    """A nursery of agents; each with a deadline of its own, if so wanted."""
    ticks, clocks = Ticks(agents, trio.Event, trio.sleep), Clocks()
    alone = Alone(ticks, steps)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ticks.drive)
            for _ in range(agents):
                nursery.start_soon(alone.run_timed if deadline else alone.run)

    trio.run(main)
    name = "trio_deadline" if deadline else "trio"
    return clocks.measured(name, agents, steps, ticks, alone.calls, agents * kept(alone.history))


def asyncio_agents(agents: int, steps: int) -> Measured:
    ticks, clocks = Ticks(agents, asyncio.Event, asyncio.sleep), Clocks()
    alone = Alone(ticks, steps)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(agents):
                group.create_task(alone.run())
            await ticks.drive()

    asyncio.run(main())
    return clocks.measured("asyncio", agents, steps, ticks, alone.calls, agents * kept(alone.history))


def kept(history: list[str]) -> int:
    """Bytes of an agent's list of messages. What it said is the same object for all and counts nothing."""
    return sys.getsizeof(history) + sum(sys.getsizeof(heard) for heard in history[1::2])


class Clocks:
    """Started when they are made."""

    def __init__(self) -> None:
        self._wall, self._cpu = perf_counter(), process_time()

    def measured(self, system: str, agents: int, steps: int, ticks: Ticks, calls: int, transcripts: int) -> Measured:
        wall, cpu = perf_counter() - self._wall, process_time() - self._cpu
        return Measured(system, agents, steps, ticks.answers, calls, cpu, wall, ticks.idle_bytes, transcripts)


Cell = Callable[[int, int], Measured]

CELLS: Mapping[str, Cell] = {
    "asyncio": asyncio_agents,
    "trio": partial(trio_agents, deadline=False),
    "trio_deadline": partial(trio_agents, deadline=True),
}


def measure(cells: Mapping[str, Cell], arguments: Sequence[str]) -> None:
    """Prints what the cell named by the command line cost."""
    system, agents, steps = arguments
    if system not in cells:
        raise SystemExit(f"system = {system!r}, want one of {', '.join(cells)}")
    gc.collect()
    print(json.dumps(asdict(cells[system](int(agents), int(steps)))))


if __name__ == "__main__":
    measure(CELLS, sys.argv[1:])
