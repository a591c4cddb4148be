"""An engine whose weights change while it serves, whatever does the serving.

    generate ──▶ backend.sample ──▶ stop, length ──▶ Completion
                     ▲      │
                     │      └─ interrupted ─▶ wait for the new weights ─▶ sample on, after what was said
    update   ── close the gate, interrupt all, replace the weights, open the gate

A sampling that is interrupted goes on as a new request whose prompt is all that was said so far: nothing that the
old weights computed is used again, and every token knows its version. Not here: how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import trio
from msgspec import structs

from swarm.seeds import derive
from swarm.types import CheckpointRef, Completion, EngineError, Finish, Sampling


@dataclass(frozen=True, slots=True)
class Part:
    """What was sampled of one turn: all of it, or what there was when it was interrupted."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | Literal["interrupted"]
    cached: int = 0
    seconds_queued: float = 0.0


class Backend(Protocol):
    """What serves. All calls but `sample` come one at a time; `replace` when nothing is being sampled."""

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Part:
        """Raises EngineError. Cancelling it drops the request."""
        ...

    async def interrupt(self) -> None:
        """Every `sample` under way returns soon, interrupted."""
        ...

    async def replace(self, weights: Mapping[str, Any]) -> None:
        """Puts tensors, by the names of the model's state dict, in use, and forgets what was computed with others."""
        ...

    async def checksum(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_len` tokens of context, ids below `vocab`; an update that takes more than `seconds` has failed."""

    max_len: int
    vocab: int
    seconds: float = 120.0


class Serving:
    """A `ServingEngine` over a backend: `engine = Serving(backend, Limits(4096, 2560), read, version=3)`.

    `read` gives the weights of a checkpoint, and refuses one that is not what it says.
    """

    def __init__(self, backend: Backend, limits: Limits, read: Read, version: int = 0) -> None:
        self.backend, self.limits, self.version = backend, limits, version
        self._read = read
        self._running = 0
        self._broken = ""
        self._updating = trio.Lock()
        self._open = trio.Event()
        self._open.set()
        self._idle = trio.Event()

    @property
    def running(self) -> int:
        """Requests that are being sampled now."""
        return self._running

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Samples one turn after `ids`; ends with "length" at `max_tokens` or when the context is full.

        Raises ValueError for a prompt that does not fit or settings out of range, EngineError when the backend fails.
        """
        check_request(ids, sampling, self.limits)
        limit = min(sampling.max_tokens, self.limits.max_len - len(ids))
        said: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        earlier: tuple[tuple[int, int], ...] = ()
        cached, queued = 0, 0.0
        while True:
            while not self._open.is_set():  # and nothing runs between this and the request: the gate may close again
                await self._open.wait()
            version = self.version
            seed = derive(sampling.seed, len(said)) if said else sampling.seed
            part = await self._sample((*ids, *said), structs.replace(sampling, max_tokens=limit - len(said), seed=seed))
            cached, queued = (cached if said else part.cached), queued + part.seconds_queued
            said, logprobs = said + part.ids, logprobs + part.logprobs
            if part.finish != "interrupted":
                return Completion(said, logprobs, version, part.finish, cached, queued, earlier)
            if part.ids:
                earlier = (*earlier, (version, len(part.ids)))

    async def load(self, ref: CheckpointRef) -> None:
        """Takes the weights of a checkpoint. Raises CheckpointError where it is not what it says."""
        weights = await trio.to_thread.run_sync(self._read, ref)
        await self.update(weights, ref.version)

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """See `ServingEngine`. One that fails leaves no weights that can be trusted: until another succeeds, every
        request raises EngineError."""
        async with self._updating:
            self._open = trio.Event()
            self._broken = f"the update to version {version} failed"
            try:
                with trio.fail_after(self.limits.seconds):
                    await self.backend.interrupt()
                    while self._running:
                        self._idle = trio.Event()
                        await self._idle.wait()
                    await self.backend.replace(weights)
            except trio.TooSlowError as e:
                raise EngineError(f"{self._broken}: not done within {self.limits.seconds:g} s") from e
            else:
                self.version, self._broken = version, ""
            finally:
                self._open.set()

    async def checksum(self) -> str:
        """See `ServingEngine`."""
        return await self.backend.checksum()

    async def _sample(self, ids: Sequence[int], sampling: Sampling) -> Part:
        if self._broken:
            raise EngineError(self._broken)
        self._running += 1
        try:
            return await self.backend.sample(ids, sampling)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


class Read(Protocol):
    """The tensors of a checkpoint, by the names of the model's state dict."""

    def __call__(self, ref: CheckpointRef, /) -> Mapping[str, Any]: ...


def check_request(ids: Sequence[int], sampling: Sampling, limits: Limits) -> None:
    """Raises ValueError for what no engine can do."""
    check_size(len(ids), sampling, limits)
    check_ids(ids, limits.vocab)


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raises ValueError for ids that are no tokens."""
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"prompt ids span {min(ids)} to {max(ids)}, want 0 to {vocab - 1}")


def check_size(prompt: int, sampling: Sampling, limits: Limits) -> None:
    """Raises ValueError for a prompt of so many tokens if it does not fit, and for settings out of range."""
    if not 0 < prompt < limits.max_len:
        raise ValueError(f"prompt of {prompt} tokens, want 1 to {limits.max_len - 1} (max_len = {limits.max_len})")
    if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(f"{sampling}: want max_tokens >= 1, temperature >= 0, 0 < top_p <= 1")
