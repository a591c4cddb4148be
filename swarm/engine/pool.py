"""Several engines of the same weights as one: each request to one of them, to another when it fails.

    generate ──▶ the one that knows the prompt's beginning, unless it is busier than the others ──▶ Completion
                     │ EngineError                                  ▲
                     ▼                                              │ generates again, with the pool's weights
                   out ── probed at once, then more and more rarely ┘

An engine that is out gets no requests. One whose weights are not the pool's stays out until it has them: from the
pool's checkpoint, if it was loaded, else with the next update. Not here: what the engines are, and how many of them
the policy and the subagents have (`swarm.engine.shares`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from swarm.engine.settle import running
from swarm.folders import CheckpointError
from swarm.types import CheckpointRef, Completion, EngineError, Sampling, ServingEngine

_PROBE = Sampling(1)
_RARELY = 30.0
_BLOCK, _BLOCKS = 64, 1 << 16
_SLACK = 4


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A request waits `patience` seconds for an engine to come back; a probe has `probe_seconds` to be answered."""

    patience: float = 30.0
    probe_seconds: float = 20.0


@dataclass(eq=False, slots=True)
class Member:
    """One engine of a pool: how many of the pool's requests it has, and why it is out ("" while it is in)."""

    engine: ServingEngine
    name: str
    running: int = 0
    out: str = ""
    fails: int = 0
    next_probe: float = 0.0


@dataclass(slots=True)
class Waits:
    """The seconds that requests have waited in queues, since they were last asked for."""

    seconds: float = 0.0
    requests: int = 0

    def take(self) -> float:
        """The mean of a request; counts from 0 again."""
        mean = self.seconds / max(1, self.requests)
        self.seconds, self.requests = 0.0, 0
        return mean


@asynccontextmanager
async def pool(
    engines: Mapping[str, ServingEngine], ref: CheckpointRef | None = None, config: PoolConfig | None = None
) -> AsyncGenerator[Pool]:
    """`async with pool({"a": a, "b": b}) as engine: ...`. All load `ref` if there is one, as does who comes later.

    Raises EngineError where their weights or versions differ, CheckpointError for a checkpoint that is none.
    """
    made = Pool([Member(engine, name) for name, engine in engines.items()], config or PoolConfig())
    if ref is not None:
        await made.load(ref)
    await made.check()
    async with running(made.probe):
        yield made


class Pool:
    """A `ServingEngine` of several."""

    def __init__(self, members: Sequence[Member], config: PoolConfig) -> None:
        self.members, self.config = list(members), config
        self.version = 0
        self.waits = Waits()
        self.failovers = 0
        self._sha = ""
        self._ref: CheckpointRef | None = None
        self._known = Prefixes()
        self._changing = trio.Lock()
        self._probing = trio.CancelScope()
        """Of the probes that run now: a change waits for none."""
        self._changed = trio.Event()

    @property
    def running(self) -> int:
        """Requests that are being sampled now."""
        return sum(m.running for m in self.members)

    @property
    def serving(self) -> list[Member]:
        """The members that are in."""
        return [m for m in self.members if not m.out]

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Raises EngineError when every member that could be asked has failed, ValueError as the engines do."""
        tried: list[Member] = []
        error: EngineError | None = None
        while True:
            member = await self._choose(ids, tried, error)
            member.running += 1
            try:
                completion = await member.engine.generate(ids, sampling)
            except EngineError as e:
                self.failovers += 1
                self.take_out(member, str(e))
                tried, error = [*tried, member], e
                continue
            finally:
                member.running -= 1
                self._tell()
            self._known.add([*ids, *completion.ids], member)
            self.waits.seconds += completion.seconds_queued
            self.waits.requests += 1
            return completion

    async def load(self, ref: CheckpointRef) -> None:
        """Loads it in every member. Raises CheckpointError where it is not what it says, EngineError as `update`."""
        await self._change(ref.version, ref, lambda engine: engine.load(ref))

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """Raises EngineError that names the members which were in and did not take the weights: they are out then.

        The others have them. Members that were out are tried too, for no longer than a request would wait.
        """
        await self._change(version, None, lambda engine: engine.update(weights, version))

    async def checksum(self) -> str:
        """What all members that are in serve. Raises EngineError where they differ, or none is in."""
        found = await self._checksums(self.serving)
        if len(set(found.values())) != 1:
            seen = ", ".join(f"{name} {sha[:12]}" for name, sha in found.items())
            raise EngineError(f"the engines of a pool serve {seen or 'nothing'}, want the same weights")
        return next(iter(found.values()))

    async def check(self) -> None:
        """Raises EngineError where the members' weights or versions differ."""
        self._sha = await self.checksum()
        versions = {m.name: (await m.engine.generate([0], _PROBE)).version for m in self.serving}
        if len(set(versions.values())) != 1:
            raise EngineError(f"the engines of a pool serve versions {versions}, want the same")
        self.version = next(iter(versions.values()))

    def take_out(self, member: Member, why: str) -> None:
        """No more requests, until a probe finds it well."""
        if not member.out:
            member.fails, member.next_probe = 0, trio.current_time()
        member.out = why
        self._tell()

    async def release(self, seconds: float) -> Member | None:
        """Gives away the member with the fewest requests, when it has none left.

        None if that takes longer than so many seconds, or if it is the last one that is in.
        """
        self._probing.cancel()
        async with self._changing:
            if len(self.serving) < 2:
                return None
            member = min(self.serving, key=lambda m: m.running)
            member.out, member.next_probe = "leaving", float("inf")
            with trio.move_on_after(seconds):
                while member.running:
                    await self._wait()
            if member.running:
                member.out = ""
                self._tell()
                return None
            self.members.remove(member)
            return member

    def add(self, member: Member) -> None:
        """One more, which is in as soon as it has the pool's weights."""
        self.members.append(Member(member.engine, member.name, out="new", next_probe=trio.current_time()))
        self._tell()

    async def probe(self) -> None:
        """The background task: brings back what is out."""
        while True:
            out = [m for m in self.members if m.out]
            due = min((m.next_probe for m in out), default=float("inf"))
            if due > trio.current_time():
                with trio.move_on_at(due):
                    await self._wait()
                continue
            with trio.CancelScope() as self._probing:
                async with self._changing, trio.open_nursery() as nursery:
                    for member in out:
                        if member.out and member.next_probe <= trio.current_time():
                            nursery.start_soon(self._bring_back, member)

    async def _choose(self, ids: Sequence[int], tried: Sequence[Member], error: EngineError | None) -> Member:
        with trio.move_on_after(self.config.patience):
            while True:
                free = [m for m in self.serving if m not in tried]
                if free:
                    least = min(free, key=lambda m: m.running)
                    known = self._known.member(ids)
                    near = known in free and known.running <= _SLACK + 1.25 * least.running
                    return known if known is not None and near else least
                if all(m in tried for m in self.members):
                    break
                await self._wait()
        last = error or next((m.out for m in self.members if m.out), "")
        raise EngineError(f"none of {len(self.members)} engines answers: {last}") from error

    async def _change(
        self, version: int, ref: CheckpointRef | None, change: Callable[[ServingEngine], Awaitable[None]]
    ) -> None:
        failed: dict[str, str] = {}
        wrong: list[CheckpointError] = []
        done: list[Member] = []

        async def one(member: Member, *, was_in: bool) -> None:
            try:
                with trio.move_on_after(float("inf") if was_in else self.config.patience):
                    await change(member.engine)
                    done.append(member)
            except EngineError as e:
                self.take_out(member, str(e))
                failed.update({member.name: str(e)} if was_in else {})
            except CheckpointError as e:  # before anything was changed
                wrong.append(e)

        self._probing.cancel()
        async with self._changing:
            async with trio.open_nursery() as nursery:
                for member in self.members:
                    nursery.start_soon(partial(one, member, was_in=not member.out))
            if done:
                self.version, self._ref = version, ref
                self._known = Prefixes()
                for member in done:
                    member.out = ""
                self._sha = await self.checksum()
                self._tell()
        if wrong:
            raise wrong[0]
        if failed or not done:
            seen = "; ".join(f"{name}: {why}" for name, why in failed.items())
            raise EngineError(f"version {version} was not taken by {seen or 'any engine'}")

    async def _bring_back(self, member: Member) -> None:
        member.fails += 1
        member.next_probe = trio.current_time() + min(_RARELY, 2.0 ** (member.fails - 1))
        trouble = await self._trouble(member)
        if not trouble:
            member.out = ""
            self._tell()
        else:
            member.out = trouble

    async def _trouble(self, member: Member) -> str:
        """Why a member cannot serve, "" when it can."""
        try:
            with trio.fail_after(self.config.probe_seconds):
                trouble = await self._stale(member)
            if trouble and self._ref is not None:
                with trio.fail_after(self.config.patience):
                    await member.engine.load(self._ref)
                    return await self._stale(member)
        except (EngineError, CheckpointError) as e:
            return str(e)
        except trio.TooSlowError:
            return f"no answer to a probe within {self.config.probe_seconds:g} s"
        return trouble

    async def _stale(self, member: Member) -> str:
        """What is wrong with it, "" when nothing is. Raises EngineError where no checkpoint is there to mend it."""
        try:
            version = (await member.engine.generate([0], _PROBE)).version
        except EngineError as e:
            if self._ref is None:
                raise
            return str(e)
        right = (version, await member.engine.checksum()) == (self.version, self._sha)
        return "" if right else f"its weights are not those of version {self.version}"

    async def _checksums(self, members: Sequence[Member]) -> dict[str, str]:
        found: dict[str, str] = {}

        async def one(member: Member) -> None:
            try:
                found[member.name] = await member.engine.checksum()
            except EngineError as e:
                self.take_out(member, str(e))

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(one, member)
        return {m.name: found[m.name] for m in members if m.name in found}

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _wait(self) -> None:
        await self._changed.wait()


@dataclass(slots=True)
class Prefixes:
    """Which member has last seen the beginning of a prompt, by blocks of ids: the most recent blocks are kept."""

    seen: OrderedDict[int, Member] = field(default_factory=OrderedDict[int, Member])

    def add(self, ids: Sequence[int], member: Member) -> None:
        for key in _keys(ids):
            self.seen[key] = member
            self.seen.move_to_end(key)
        while len(self.seen) > _BLOCKS:
            self.seen.popitem(last=False)

    def member(self, ids: Sequence[int]) -> Member | None:
        """The one that knows most of it, if that is at least half."""
        keys = _keys(ids)
        half = keys[max(0, (len(keys) - 1) // 2) :]
        return next((self.seen[key] for key in reversed(half) if key in self.seen), None)


def _keys(ids: Sequence[int]) -> list[int]:
    """One for each whole block, of all ids up to its end."""
    keys: list[int] = []
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        keys.append(hash((keys[-1] if keys else 0, tuple(ids[end - _BLOCK : end]))))
    return keys
