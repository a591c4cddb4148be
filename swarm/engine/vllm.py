"""vLLM in this process: its engine cores, stepped by one thread between the turns of the agents.

    sample ──▶ queue ──▶ step, step, … ──▶ Part
    (any task)     one background task a core: let all who are ready speak, step, hand out

vLLM keeps in globals what it is doing, so all cores of a process share one thread, whenever they are opened. A step of
a small model on the CPU, which waits for nobody, is taken in trio's thread, like the embedded engine's.

What is known to go wrong with new weights in a running engine, and what is done about it: the CPU backend packs its
matrices, and a reload leaves the packed head as it was when it is tied (packed again here); keys and values of the
old weights stay in the prefix cache, and a reset is refused without a word while anything runs (nothing runs, and
the answer is checked); a request with a seed of its own cannot be taken back on the CPU, whose generators have no
offset (it is cut at an update, and goes on as a new one, and prompts are not computed in chunks); tensors are kept
lazily, so what they lie on must not be closed (they are copied first); the CPU's attention reads whole blocks of
keys and values, so that a NaN which broken weights left in one spoils what right weights do with it (cleared then).

Not here: vLLM itself (`swarm.engine.vllm_core`), gates and versions (`swarm.engine.serving`), servers
(`swarm.engine.http`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import trio

from swarm.checkpoint import filed, load_model, ref_of
from swarm.engine.serving import Limits, Part, Serving
from swarm.engine.settle import running, settle
from swarm.engine.thread import Thread
from swarm.engine.vllm_core import Core, Output, Request, VLLMConfig
from swarm.types import CheckpointRef, EngineError, Finish, Sampling

_START_SECONDS = 600.0


@asynccontextmanager
async def vllm_engine(folder: Path, config: VLLMConfig, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves the checkpoint in `folder`: `async with vllm_engine(path, VLLMConfig()) as engine: ...`.

    Raises CheckpointError for a folder that is none, EngineError where vLLM is not installed or does not start.
    """
    async with vllm_engines((folder,), config, version) as engines:
        yield engines[0]


@asynccontextmanager
async def vllm_engines(
    folders: Sequence[Path], config: VLLMConfig, version: int = 0, adapters: Sequence[Path] = ()
) -> AsyncGenerator[tuple[Serving, ...]]:
    """An engine for each checkpoint.

    After them come the LoRA adapters, folders as PEFT writes them, on the last of the checkpoints: frozen, and served
    in one batch with it. Raises CheckpointError, EngineError where vLLM does not start or take an adapter.
    """
    for folder in folders:
        await trio.to_thread.run_sync(ref_of, folder)
    configs = [*[config] * (len(folders) - 1), replace(config, adapters=len(adapters))]
    with shared_thread(config.seconds) as thread:
        cores: list[Core] = []
        try:
            async with AsyncExitStack() as stack:
                for folder, each in zip(folders, configs, strict=True):
                    core = await thread.call(partial(Core, folder, each), _START_SECONDS)
                    cores += [core]
                engines = [await stack.enter_async_context(serving(core, thread, version)) for core in cores]
                numbers = [await thread.call(partial(cores[-1].adapt, adapter)) for adapter in adapters]
                yield (*engines, *(_adapted(engines[-1], number) for number in numbers))
        finally:
            for core in cores:
                if not thread.lost:
                    with trio.CancelScope(shield=True):
                        await thread.call(core.shutdown)


@contextmanager
def shared_thread(seconds: float) -> Generator[Thread]:
    """This process's one thread for vLLM, open while it is used; `seconds` as in `Thread`, of who is first."""
    with _using:
        thread = _users[0] if _users else Thread("vllm", seconds)
        _users.append(thread)
    try:
        yield thread
    finally:
        with _using:
            _users.remove(thread)
            last = not _users
        if last:
            thread.close()


_using = threading.Lock()
_users: list[Thread] = []
"""The thread, as often as it is used."""


@asynccontextmanager
async def serving(core: Core, thread: Thread, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves with a core that is there already, and leaves it there."""
    backend = _Backend(core, thread)
    limits = Limits(core.config.max_len, core.vocab, core.config.seconds)
    try:
        async with running(backend.drive):
            yield Serving(backend, limits, _read, version)
    finally:
        backend.fail("the engine was closed")
        if not thread.lost:
            with trio.CancelScope(shield=True):
                await thread.call(partial(core.step, (), backend.dropped))


def _adapted(base: Serving, number: int) -> Serving:
    assert isinstance(base.backend, _Backend)
    return Serving(_Adapted(base.backend, number), base.limits, _read, base.version)


def _read(ref: CheckpointRef) -> Mapping[str, Any]:
    return filed(load_model(ref))


class _Backend:
    """The requests and the task that serves them."""

    def __init__(self, core: Core, thread: Thread) -> None:
        self._core, self._thread = core, thread
        self._count = 0
        self._queue: list[Request] = []
        self._active: dict[str, Request] = {}
        self.dropped: list[str] = []
        self._wake = trio.Event()

    async def sample(self, ids: Sequence[int], sampling: Sampling, adapter: int = 0) -> Part:
        if self._thread.lost:
            raise EngineError(self._thread.lost)
        self._count += 1
        request = Request(str(self._count), list(ids), sampling, perf_counter(), adapter)
        self._queue.append(request)
        self._wake.set()
        try:
            await request.done.wait()
        finally:
            if not request.done.is_set():
                self._forget(request)
        if request.error:
            raise EngineError(request.error)
        finish: Finish | str = request.finish
        return Part(tuple(request.ids), tuple(request.logprobs), finish, request.cached, request.queued)  # pyright: ignore[reportArgumentType]

    async def interrupt(self) -> None:
        for request in (*self._active.values(), *self._queue):
            self._end(request, "interrupted")
        self.dropped += self._active
        self._active, self._queue = {}, []

    async def replace(self, weights: Mapping[str, Any]) -> None:
        copied = {name: w.detach().to("cpu", copy=True) for name, w in weights.items()}
        dropped, self.dropped = self.dropped, []
        await self._thread.call(partial(self._core.replace, copied, dropped))

    async def checksum(self, adapter: int = 0) -> str:
        return await self._thread.call(partial(self._core.checksum, adapter))

    async def drive(self) -> None:
        """The background task: lets those who are ready speak, so that one step serves them all, and steps."""
        while True:
            await settle()
            if not (self._queue or self._active or self.dropped):
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            new, self._queue = self._queue, []
            dropped, self.dropped = self.dropped, []
            self._active |= {r.name: r for r in new}
            try:
                step = partial(self._core.step, new, dropped)
                outputs = await self._thread.call(step, self._core.config.seconds, brief=self._core.brief)
            except Exception as e:  # the boundary: whatever vLLM raises is a failure of the engine
                self.fail(f"vLLM step failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
                continue
            for output in outputs:
                self._take(output)

    def fail(self, error: str) -> None:
        """Every waiter gets an EngineError."""
        for request in (*self._active.values(), *self._queue):
            request.error = error
            request.done.set()
        self.dropped += self._active
        self._active, self._queue = {}, []

    def _forget(self, request: Request) -> None:
        if request in self._queue:
            self._queue.remove(request)
        elif self._active.pop(request.name, None) is not None:
            self.dropped.append(request.name)
            self._wake.set()

    def _take(self, output: Output) -> None:
        request = self._active.get(output.name)
        if request is None:
            return
        if request.queued < 0:
            request.queued, request.cached = max(0.0, output.began - request.born), output.cached
        request.ids += output.ids
        request.logprobs += output.logprobs
        if output.finish == "failed" or not all(map(math.isfinite, output.logprobs)):
            request.error = "vLLM gave up the request" if output.finish else "the logits are not finite"
            self.dropped += [] if output.finish else [request.name]
            self._end(request, "")
        elif output.finish:
            self._end(request, output.finish)
        if request.done.is_set():
            del self._active[request.name]

    def _end(self, request: Request, finish: str) -> None:
        request.finish, request.queued = finish, max(0.0, request.queued)
        request.done.set()


class _Adapted:
    """A `Backend` that is a frozen adapter on the checkpoint of another."""

    def __init__(self, base: _Backend, number: int) -> None:
        self._base, self._number = base, number

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Part:
        return await self._base.sample(ids, sampling, self._number)

    async def interrupt(self) -> None:
        """What is sampled goes on: nothing will be replaced."""

    async def replace(self, weights: Mapping[str, Any]) -> None:
        raise EngineError(f"new weights for LoRA adapter {self._number}, which is frozen")

    async def checksum(self) -> str:
        return await self._base.checksum(self._number)
