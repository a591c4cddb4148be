"""Several frozen checkpoints on one engine, which serves one of them at a time.

    generate ──▶ wait ──▶ its checkpoint is on, and nobody of another has waited too long ──▶ the engine
                  └─────▶ the engine is empty: the checkpoint whose request has waited longest is loaded

Requests of the checkpoint that is on go first, so that many are served between two loads; once a request of another
has waited `patience` seconds, what is being sampled ends and nothing else begins. So a request waits at most as long
as that, and the longest sampling and a load, for each of the other checkpoints. For when there are more checkpoints
than engines: an engine for each is faster. Not here: how an engine loads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from swarm.engine.settle import running, settle
from swarm.folders import CheckpointError
from swarm.types import CheckpointRef, Completion, EngineError, Sampling, ServingEngine


@asynccontextmanager
async def turns(engine: ServingEngine, patience: float = 2.0) -> AsyncGenerator[Turns]:
    """`async with turns(engine) as shared: reader, checker = shared.view(a), shared.view(b)`."""
    made = Turns(engine, patience)
    async with running(made.drive):
        yield made


@dataclass(eq=False, slots=True)
class _Waiting:
    ref: CheckpointRef
    since: float
    done: trio.Event = field(default_factory=trio.Event)
    error: EngineError | CheckpointError | None = None


class Turns:
    """Who may use the engine now. `loads` counts the changes of checkpoint."""

    def __init__(self, engine: ServingEngine, patience: float) -> None:
        self.engine, self.patience = engine, patience
        self.loads = 0
        self._on: CheckpointRef | None = None
        self._active = 0
        self._waiting: list[_Waiting] = []
        self._wake = trio.Event()

    def view(self, ref: CheckpointRef) -> View:
        """An engine that serves this checkpoint, in turns."""
        return View(self, ref)

    @asynccontextmanager
    async def turn(self, ref: CheckpointRef) -> AsyncGenerator[None]:
        """The engine serves the checkpoint as long as the body runs. Raises EngineError or CheckpointError."""
        waiting = _Waiting(ref, trio.current_time())
        self._waiting.append(waiting)
        self._wake.set()
        try:
            await waiting.done.wait()
        except trio.Cancelled:  # never of one that was let in, whose wait has ended by then
            self._waiting.remove(waiting)
            raise
        if waiting.error is not None:
            raise waiting.error
        try:
            yield
        finally:
            self._leave()

    async def drive(self) -> None:
        """The background task: lets in, and loads."""
        while True:
            await settle()
            now = trio.current_time()
            others = [w for w in self._waiting if w.ref != self._on]
            due = others[0].since + self.patience if others else float("inf")
            if now < due:
                self._let_in()
            if others and not self._active:
                await self._load(others[0].ref)
                continue
            self._wake = trio.Event()
            with trio.move_on_at(due if now < due else float("inf")):
                await self._wake.wait()

    async def _load(self, ref: CheckpointRef) -> None:
        self._on, self.loads = None, self.loads + 1
        try:
            await self.engine.load(ref)
        except (EngineError, CheckpointError) as e:
            for waiting in [w for w in self._waiting if w.ref == ref]:
                waiting.error = e
                self._end(waiting)
        else:
            self._on = ref
            self._let_in()

    def _let_in(self) -> None:
        for waiting in [w for w in self._waiting if w.ref == self._on]:
            self._active += 1
            self._end(waiting)

    def _end(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        waiting.done.set()

    def _leave(self) -> None:
        self._active -= 1
        self._wake.set()


class View:
    """A `ServingEngine` of one frozen checkpoint, on an engine that is shared."""

    def __init__(self, shared: Turns, ref: CheckpointRef) -> None:
        self.ref = ref
        self._shared = shared

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """What was waited for a turn counts as queued. Raises as the engine does, or its `load`."""
        born = trio.current_time()
        async with self._shared.turn(self.ref):
            waited = trio.current_time() - born
            c = await self._shared.engine.generate(ids, sampling)
        queued = waited + c.seconds_queued
        return Completion(c.ids, c.logprobs, c.version, c.finish, c.cached, queued, c.earlier)

    async def load(self, ref: CheckpointRef) -> None:
        """From now on another checkpoint. Raises EngineError or CheckpointError where it cannot be loaded."""
        async with self._shared.turn(ref):
            self.ref = ref

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """Raises EngineError: the weights would be gone with the next turn."""
        await trio.lowlevel.checkpoint()
        raise EngineError(f"version {version} of weights for an engine of several checkpoints, want a checkpoint")

    async def checksum(self) -> str:
        """Of this checkpoint as it is served."""
        async with self._shared.turn(self.ref):
            return await self._shared.engine.checksum()
