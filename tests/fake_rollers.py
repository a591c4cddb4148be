"""Rollers of scripted agents for the tests of workers, in a module that is imported quickly. Not a test itself."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness, begin, run
from swarm.seeds import derive
from swarm.tools import CallContext
from swarm.types import Budget, Rollout, Sampling, Task, ToolCall, ToolResult, ToolSpec, Turn
from swarm.workers import Request
from swarm.workspace import Workspace

TASK = Task("t", "Count.", "numbers", "airport", ("number",), ())
STOP = 0


class Letters:
    """A chat format whose ids are code points. A turn that begins with `?` is a call of `echo`."""

    stop = (STOP,)

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [ord(c) for c in user]

    def observe(self, results: Sequence[str], note: str, *, closed: bool) -> list[int]:
        return [ord(c) for c in " ".join(results)]

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Turn:
        text = "".join(chr(i) for i in ids if i != STOP)
        return Turn("", (ToolCall("echo", {"text": text[1:]}),)) if text.startswith("?") else Turn(text)


ECHO = ToolSpec("echo", "Echo.", {})


@dataclass(frozen=True)
class Echo:
    """Answers what it is told."""

    spec: ToolSpec = ECHO

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace:
        return context.workspace

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        await trio.lowlevel.checkpoint()
        return ToolResult((str(call.arguments["text"]),))


def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
    """Random letters of the turn's own seed; one turn in twenty is the answer."""
    rng = random.Random(derive(sampling.seed, len(ids)))
    said = [rng.randrange(97, 123) for _ in range(8)]
    return [*([] if rng.random() < 0.05 else [ord("?")]), *said, STOP]


@dataclass
class ScriptedRoller:
    """Rollouts by a scripted engine; `request.system` says what else is to happen."""

    nursery: trio.Nursery
    engine: ScriptedEngine
    seen: float = 0.0

    async def roll(self, request: Request) -> Rollout:
        match request.system:
            case "poison":
                os._exit(9)
            case "wrong":
                raise ZeroDivisionError("of a roller")
            case "collapse":
                self.nursery.start_soon(self._collapse)
                await trio.sleep_forever()
            case _:
                harness = Harness(
                    self.engine, Letters(), (Echo(),), "", Sampling(16, stop=Letters.stop), request.budget
                )
                return await run(harness, begin(harness, request.task, request.seed))
        raise AssertionError

    async def _collapse(self) -> None:
        await trio.lowlevel.checkpoint()
        raise MemoryError("of an engine")

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        await trio.lowlevel.checkpoint()
        if version < 0:
            raise ValueError("weights of no version")
        self.seen, self.engine.version = float(sum(w.sum() for w in weights.values())), version

    async def checksums(self) -> Mapping[str, str]:
        await trio.lowlevel.checkpoint()
        return {"policy": f"{self.engine.version}: {self.seen:g}"}


@dataclass(frozen=True)
class OpenScripted:
    """Opens a scripted roller and files its process in `folder`. `broken`: it raises instead."""

    folder: Path
    broken: bool = False

    def __call__(self) -> Any:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[ScriptedRoller]:
        if self.broken:
            raise OSError("no such device")
        (self.folder / str(os.getpid())).touch()
        async with trio.open_nursery() as nursery:
            yield ScriptedRoller(nursery, ScriptedEngine(speak))
            nursery.cancel_scope.cancel()

    def processes(self) -> list[int]:
        """Those that are alive."""
        return sorted(int(p.name) for p in self.folder.iterdir() if running(int(p.name)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def requests(count: int, system: Mapping[int, str] | None = None) -> list[Request]:
    named = system or {}
    return [Request(TASK, derive(7, k), Budget(100, 4096, 60.0), named.get(k, "")) for k in range(count)]
