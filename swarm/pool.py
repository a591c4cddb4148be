"""Rollouts made by workers that may die: who gets which request, and what follows when a worker is lost.

    roll_out ─▶ Request ─▶ the least busy worker ─▶ Rollout, in the order asked
                  ▲                  │ lost: died, out of reach, too late
                  └─── again ◀───────┤
                                     └─▶ its keeper starts another, which gets the newest weights first

A request that was with a lost worker is handed out again, with fewer beside it each time and alone the last
time, so that one that kills workers is told from those that stood beside it. After `attempts` it ends as a
rollout with status "error". What cannot be mended (a wrong program, no room) ends the pool with one error.

Not here: what a worker is (`swarm.workers`; `swarm.cluster` makes them of Ray actors), and how a rollout is made.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import trio

from swarm.types import Ledger, Rollout, Trace
from swarm.workers import ClusterConfig, ClusterError, Request, Worker, WorkerError, WorkerLost

log = logging.getLogger(__name__)

_BACKOFF = (0.5, 30.0)
"""Seconds before a worker that came to nothing is started again, doubled each time, and the most."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """`up` now; since the start: workers `lost`, requests handed out `again`, and those `given_up` as errors."""

    up: int = 0
    lost: int = 0
    again: int = 0
    given_up: int = 0


@dataclass(eq=False, slots=True)
class _Life:
    """One worker from its start to its end; `given` are the weights that it has.

    `load` has, for each rollout under way, how often its request was lost; `done` counts those that came.
    """

    worker: Worker
    given: object = None
    load: list[int] = field(default_factory=list[int])
    done: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    cause: str = ""

    def end(self, cause: str) -> None:
        if not self.ended.is_set():
            self.cause = cause
            self.ended.set()


@dataclass(order=True, slots=True)
class _Waiter:
    """A request in the queue: those that were never lost come first, then in the order asked."""

    losses: int
    order: int
    handed: trio.Event = field(default_factory=trio.Event, compare=False)
    life: _Life | None = field(default=None, compare=False)
    gone: bool = field(default=False, compare=False)


class Pool:
    """`async with Pool(spawn, config, room) as pool: rollouts = await pool.roll_out(requests)`.

    `spawn` makes a worker that is not yet placed; `room` says in words what was asked for and what there is.
    """

    def __init__(self, spawn: Callable[[], Worker], config: ClusterConfig, room: Callable[[], str]) -> None:
        self.config, self.stats = config, PoolStats()
        self._spawn, self._room = spawn, room
        self._newest: tuple[Any, int] | None = None
        self._lives: list[_Life] = []
        self._placed: set[_Life] = set()
        self._failed = 0
        self._changed = trio.Event()
        self._queue: list[_Waiter] = []
        self._order = 0
        self._broken: WorkerError | None = None
        self._scopes: set[trio.CancelScope] = set()
        self._nursery_context: AbstractAsyncContextManager[trio.Nursery] | None = None

    async def __aenter__(self) -> Self:
        self._nursery_context = trio.open_nursery()
        self._nursery = await self._nursery_context.__aenter__()
        for _ in range(self.config.workers):
            self._nursery.start_soon(self._keep)
        self._nursery.start_soon(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._nursery_context is not None
        self._nursery.cancel_scope.cancel()
        # The body's own exception is not shown to the nursery, which would wrap it in a group.
        await self._nursery_context.__aexit__(None, None, None)

    # --- what is asked of it -----------------------------------------------------------

    async def roll_out(
        self, requests: Sequence[Request], done: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """One rollout a request, in the order of the requests; `done` hears of each as it ends.

        Raises WorkerError when the pool cannot go on.
        """
        results: list[Rollout | None] = [None] * len(requests)

        async def one(k: int, request: Request) -> None:
            rollout = results[k] = await self._one(request)
            if done is not None and rollout is not None:
                done(rollout)

        await self._together([partial(one, k, request) for k, request in enumerate(requests)])
        return [r for r in results if r is not None]

    async def update(self, weights: object, version: int) -> None:
        """Gives every worker new weights, those started later too; returns when all that are up have them.

        Raises WorkerError where a roller refuses them.
        """
        self._newest = weights, version
        await self._together([partial(self._ask, life, self._give) for life in self._lives])

    async def checksums(self) -> list[Mapping[str, str]]:
        """The checksums of every worker that is up, at least one."""
        sums: list[Mapping[str, str]] = []

        async def add(life: _Life) -> None:
            sums.append(await life.worker.checksums())

        while not sums:
            await self.up(1)
            await self._together([partial(self._ask, life, add) for life in self._lives])
        return sums

    async def up(self, count: int) -> None:
        """Waits until so many workers are up. Raises WorkerError when the pool cannot go on."""

        async def wait() -> None:
            while len(self._lives) < count:
                await self._changed.wait()

        await self._together([wait])

    async def _together(self, works: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Runs them at once, all ended if the pool breaks. Raises what broke it."""
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                if self._broken is not None:
                    scope.cancel()
                async with trio.open_nursery() as nursery:
                    for work in works:
                        nursery.start_soon(work)
            finally:
                self._scopes.discard(scope)
        if self._broken is not None:
            raise self._broken

    async def _ask(self, life: _Life, work: Callable[[_Life], Awaitable[None]]) -> None:
        """Something else than a rollout, of one worker that may be lost under way."""
        try:
            with trio.fail_after(self.config.update_seconds):
                await work(life)
        except WorkerLost as e:
            life.end(str(e))
        except WorkerError as e:
            self._break(e)
        except trio.TooSlowError:
            life.end(f"no answer after {self.config.update_seconds:.0f} s")

    async def _give(self, life: _Life) -> None:
        while self._newest is not None and life.given is not self._newest:
            newest = self._newest
            await life.worker.update(newest[0], newest[1])
            life.given = newest

    def _break(self, error: WorkerError) -> None:
        """Nothing goes on: whoever waits is told. Returned to each caller, not raised through the nursery."""
        self._broken = self._broken or error
        for scope in self._scopes:
            scope.cancel()

    # --- requests ----------------------------------------------------------------------

    async def _one(self, request: Request) -> Rollout | None:
        """The rollout of a request, by as many workers as it takes; None when the pool is broken."""
        cause = ""
        for losses in range(self.config.attempts):
            self._count(again=int(losses > 0))
            async with self._handed(losses) as life:
                try:
                    with trio.fail_after(request.budget.seconds + self.config.grace_seconds):
                        rollout = await life.worker.roll(request)
                    life.done += 1
                    return rollout
                except WorkerLost as e:
                    life.end(str(e))
                except trio.TooSlowError:
                    life.end(f"a rollout was not done {self.config.grace_seconds:.0f} s after its deadline")
                except WorkerError as e:
                    self._break(e)
                    return None
                cause = life.cause
        self._count(given_up=1)
        return _given_up(request, self.config.attempts, cause)

    @asynccontextmanager
    async def _handed(self, losses: int) -> AsyncGenerator[_Life]:
        """Waits for a worker that has room for a request that was lost so often."""
        self._order += 1
        waiter = _Waiter(losses, self._order)
        heapq.heappush(self._queue, waiter)
        try:
            self._hand_out()
            await waiter.handed.wait()
            assert waiter.life is not None
            yield waiter.life
        finally:
            waiter.gone = True
            if waiter.life is not None:
                waiter.life.load.remove(losses)
            self._hand_out()

    def _hand_out(self) -> None:
        while self._queue:
            waiter = self._queue[0]
            life = None if waiter.gone else self._free(waiter.losses)
            if life is None and not waiter.gone:
                return
            heapq.heappop(self._queue)
            if life is not None:
                life.load.append(waiter.losses)
                waiter.life = life
                waiter.handed.set()

    def _free(self, losses: int) -> _Life | None:
        """The least busy worker with room, if any. Nobody takes more than its share of what is left, so that those
        that are still starting find work."""
        lives = [life for life in self._lives if not life.ended.is_set()]
        if not lives:
            return None
        least = min(lives, key=lambda life: len(life.load))
        unfinished = len(self._queue) + sum(len(life.load) for life in lives)
        share = min(self.config.at_once, -(-unfinished // max(1, len(self._placed))))
        room = min(share, self._company(max((*least.load, losses))))
        return least if len(least.load) < room else None

    def _company(self, losses: int) -> int:
        """How many rollouts may be together when one of their requests was lost so often: a quarter for each time,
        and it alone the last time."""
        if losses and losses + 1 >= self.config.attempts:
            return 1
        return max(1, self.config.at_once // 4**losses)

    # --- workers -----------------------------------------------------------------------

    async def _keep(self) -> None:
        """Keeps one worker up: starts another when it is lost, after a while if that came to nothing."""
        fruitless = 0
        while True:
            life = _Life(self._spawn())
            try:
                up = await self._bring_up(life)
                self._failed = 0 if up else self._failed + 1
                if up:
                    await self._listen(life)
            finally:
                self._placed.discard(life)
                life.worker.kill()
            self._count(lost=1)
            self._notify()
            log.warning("a worker was lost: %s", life.cause)
            if self._failed >= self.config.attempts * self.config.workers:
                self._break(ClusterError(f"cluster: {self._failed} workers in a row failed to start: {life.cause}"))
                return
            fruitless = 0 if life.done else fruitless + 1
            if fruitless:
                await trio.sleep(min(_BACKOFF[0] * 2 ** (fruitless - 1), _BACKOFF[1]))

    async def _bring_up(self, life: _Life) -> bool:
        """Whether it is up, with the newest weights. For room it waits as long as others work."""
        try:
            with trio.move_on_after(self.config.place_seconds) as patience:
                await life.worker.placed()
            if patience.cancelled_caught:
                log.warning("a worker waits for room: %s", self._room())
                await life.worker.placed()
            self._placed.add(life)
            self._notify()
            with trio.fail_after(self.config.start_seconds):
                await life.worker.start()
                await self._give(life)
        except (WorkerLost, WorkerError) as e:
            life.end(str(e))
        except trio.TooSlowError:
            life.end(f"not started after {self.config.start_seconds:.0f} s")
        return not life.ended.is_set()

    async def _listen(self, life: _Life) -> None:
        """It works until its end."""

        async def hear() -> None:
            life.end(await life.worker.lost())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            self._lives.append(life)
            self._notify()
            try:
                await life.ended.wait()
            finally:
                self._lives.remove(life)
                nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Ends the pool when no worker has had room for too long."""
        while self._broken is None:
            with trio.move_on_after(self.config.place_seconds):
                while not self._placed:
                    await self._changed.wait()
            if not self._placed:
                seconds = f"{self.config.place_seconds:.0f} s"
                self._break(ClusterError(f"cluster: no room for any worker in {seconds}: {self._room()}"))
            while self._placed:
                await self._changed.wait()

    def _notify(self) -> None:
        """A worker has come or gone."""
        self.stats = replace(self.stats, up=len(self._lives))
        self._changed.set()
        self._changed = trio.Event()
        self._hand_out()

    def _count(self, *, lost: int = 0, again: int = 0, given_up: int = 0) -> None:
        s = self.stats
        self.stats = PoolStats(len(self._lives), s.lost + lost, s.again + again, s.given_up + given_up)


def _given_up(request: Request, attempts: int, cause: str) -> Rollout:
    """What stands for a rollout that no worker could make: counted as an error, never a reward."""
    error = f"lost with {attempts} workers, the last time: {cause}"
    counts = {"worker_lost": attempts}
    return Rollout(request.task, Trace("main", (), "error", error), Ledger(counts=counts), prompt=request.task.query)
