"""Rollouts by workers that die: simulated in virtual time, with deaths at every kind of moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import trio

from swarm.pool import Pool
from swarm.types import Budget, Ledger, Rollout, Trace
from swarm.workers import ClusterConfig, ClusterError, Request, WorkerError, WorkerLost
from tests.swarm_cases import TASK

CONFIG = ClusterConfig(workers=3, at_once=16)


def requests(count: int, seconds: float = 100.0) -> list[Request]:
    return [Request(TASK, k, Budget(5, 100, seconds)) for k in range(count)]


def rollout(request: Request) -> Rollout:
    """What a worker makes of a request, whichever worker it is."""
    return Rollout(TASK, Trace("main", (), "answered"), Ledger(), answer=str(request.seed))


def answers(rollouts: list[Rollout]) -> list[str]:
    return [r.answer for r in rollouts]


@dataclass(eq=False)
class Site:
    """Where simulated workers run, and what is wrong there. `poison` kills the worker, `stuck` never ends."""

    room: int = 100
    seconds: float = 1.0
    start_seconds: float = 2.0
    poison: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    refuse_start: int = 0
    alive: list[Simulated] = field(default_factory=list)
    handed: Counter[int] = field(default_factory=Counter)
    together: dict[int, list[int]] = field(default_factory=dict)
    changed: trio.Event = field(default_factory=trio.Event)

    def spawn(self) -> Simulated:
        return Simulated(self)

    def words(self) -> str:
        return f"asked 1 CPU each, there are {self.room}"

    def make_room(self, room: int) -> None:
        self.room = room
        self.changed.set()
        self.changed = trio.Event()


class Simulated:
    """A worker of a site; `version` is that of its weights, `now` the requests that it has."""

    def __init__(self, site: Site) -> None:
        self.site, self.version = site, -1
        self.dead = trio.Event()
        self.now: set[int] = set()
        self.made = 0

    async def _busy(self, seconds: float) -> None:
        """Passes the time, unless the worker dies."""
        with trio.move_on_after(seconds):
            await self.dead.wait()
            raise WorkerLost("killed")

    async def placed(self) -> None:
        while len(self.site.alive) >= self.site.room:
            await self.site.changed.wait()
        self.site.alive.append(self)

    async def start(self) -> None:
        await self._busy(self.site.start_seconds)
        if self.site.refuse_start:
            self.site.refuse_start -= 1
            raise WorkerLost("no memory")

    async def lost(self) -> str:
        await self.dead.wait()
        return "killed"

    async def roll(self, request: Request) -> Rollout:
        k = request.seed
        self.site.handed[k] += 1
        self.now.add(k)
        self.site.together.setdefault(k, []).append(len(self.now))
        try:
            if k in self.site.wrong:
                raise WorkerError("ValueError: wrong")
            await self._busy(1e9 if k in self.site.stuck else self.site.seconds * random.Random(k).uniform(0.5, 2))
            if k in self.site.poison:
                self.kill()
                raise WorkerLost("killed")
            self.made += 1
            return rollout(request)
        finally:
            self.now.discard(k)

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        await self._busy(0.5)
        self.version = version

    async def checksums(self) -> Mapping[str, str]:
        await self._busy(0.1)
        return {"policy": str(self.version)}

    def kill(self) -> None:
        self.dead.set()
        if self in self.site.alive:
            self.site.alive.remove(self)
            self.site.make_room(self.site.room)


async def test_rollouts_come_in_the_order_asked_and_each_is_heard_of_once(autojump_clock: trio.abc.Clock) -> None:
    site, heard = Site(), list[str]()
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        made = await pool.roll_out(requests(50), lambda r: heard.append(r.answer))
    assert answers(made) == [str(k) for k in range(50)]
    assert sorted(heard, key=int) == answers(made)
    assert heard != answers(made)
    assert not site.alive


@pytest.mark.parametrize("seed", range(20))
async def test_deaths_at_any_moment_change_nothing_in_the_result(seed: int, autojump_clock: trio.abc.Clock) -> None:
    site, rng = Site(), random.Random(seed)
    heard = Counter[str]()

    async def kill_now_and_then() -> None:
        wait = rng.uniform(2, 4)
        while True:
            await trio.sleep(wait)
            if site.alive:
                rng.choice(site.alive).kill()
            wait = rng.expovariate(1 / 4)

    async with Pool(site.spawn, CONFIG, site.words) as pool, trio.open_nursery() as nursery:
        nursery.start_soon(kill_now_and_then)
        made = await pool.roll_out(requests(200), lambda r: heard.update([r.answer]))
        nursery.cancel_scope.cancel()
    given_up = [r for r in made if r.failed]
    assert len(made) == 200
    assert [r.answer or str(k) for k, r in enumerate(made)] == [str(k) for k in range(200)]
    assert sum(heard.values()) == 200
    assert max(heard[str(k)] for k in range(200)) == 1
    # Deaths can meet one request three times; it is then counted. Of 16 requests beside it, few share its lot.
    assert len(given_up) == pool.stats.given_up <= pool.stats.lost // 2
    assert pool.stats.lost > 0


async def test_a_request_that_kills_its_workers_ends_as_one_error(autojump_clock: trio.abc.Clock) -> None:
    site = Site(poison=frozenset([17]))
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        made = await pool.roll_out(requests(40))
    assert [k for k, r in enumerate(made) if r.failed] == [17]
    assert made[17].trace.error == "lost with 3 workers, the last time: killed"
    assert made[17].ledger.counts == {"worker_lost": 3}
    assert site.handed[17] == 3
    assert site.together[17][-1] == 1, "the last time it was not alone"
    assert pool.stats.lost == 3


async def test_two_that_kill_take_nobody_with_them(autojump_clock: trio.abc.Clock) -> None:
    site = Site(poison=frozenset([0, 5, 30]))
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        made = await pool.roll_out(requests(60))
    assert [k for k, r in enumerate(made) if r.failed] == [0, 5, 30]


async def test_a_worker_started_later_has_the_newest_weights_before_any_request(
    autojump_clock: trio.abc.Clock,
) -> None:
    site = Site()
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        await pool.roll_out(requests(3))
        await pool.update({}, 7)
        assert await pool.checksums() == [{"policy": "7"}] * 3
        old = list(site.alive)
        for worker in old:
            worker.kill()
        assert {sums["policy"] for sums in await pool.checksums()} == {"7"}
        await pool.roll_out(requests(30))
        assert not set(old) & set(site.alive)
        assert [w.version for w in site.alive] == [7, 7, 7]


async def test_weights_that_come_while_a_worker_starts_are_not_missed(autojump_clock: trio.abc.Clock) -> None:
    site = Site(start_seconds=5)
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        await pool.update({}, 1)
        await trio.sleep(5.2)
        await pool.update({}, 2)
        assert set(w["policy"] for w in await pool.checksums()) == {"2"}


async def test_weights_that_a_dying_worker_cannot_take_do_not_hold_up_the_others(
    autojump_clock: trio.abc.Clock,
) -> None:
    site = Site()
    async with Pool(site.spawn, CONFIG, site.words) as pool, trio.open_nursery() as nursery:
        await pool.roll_out(requests(3))
        nursery.start_soon(pool.update, {}, 1)
        await trio.sleep(0.2)
        site.alive[0].kill()
    assert pool.stats.lost == 1


async def test_no_room_for_any_worker_is_one_error(autojump_clock: trio.abc.Clock) -> None:
    site = Site(room=0)
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        with pytest.raises(ClusterError, match="no room for any worker in 60 s: asked 1 CPU each, there are 0"):
            await pool.roll_out(requests(3))
        with pytest.raises(WorkerError, match="no room"):
            await pool.update({}, 1)
    assert trio.current_time() < 62


async def test_one_worker_does_it_all_where_there_is_no_room_for_more(autojump_clock: trio.abc.Clock) -> None:
    site = Site(room=1)
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        assert len(await pool.roll_out(requests(400))) == 400
        assert pool.stats.up == 1
        site.make_room(3)
        await trio.sleep(10)
        assert pool.stats.up == 3


async def test_room_that_goes_and_comes_back_is_survived(autojump_clock: trio.abc.Clock) -> None:
    site = Site()

    async def come_and_go() -> None:
        await trio.sleep(3)
        site.room = 0
        for worker in list(site.alive):
            worker.kill()
        await trio.sleep(30)
        site.make_room(2)

    async with Pool(site.spawn, CONFIG, site.words) as pool, trio.open_nursery() as nursery:
        nursery.start_soon(come_and_go)
        assert answers(await pool.roll_out(requests(200))) == [str(k) for k in range(200)]


async def test_a_worker_that_hangs_is_replaced_after_the_deadline(autojump_clock: trio.abc.Clock) -> None:
    site = Site(stuck=frozenset([4]))
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        made = await pool.roll_out(requests(12))
    assert [k for k, r in enumerate(made) if r.failed] == [4]
    assert "a rollout was not done 60 s after its deadline" in made[4].trace.error
    # Three times a deadline of 100 s, 60 s of grace, and the starts.
    assert trio.current_time() < 3 * 160 + 20


async def test_a_wrong_program_is_raised_once_and_ends_the_rest(autojump_clock: trio.abc.Clock) -> None:
    site = Site(wrong=frozenset([4]), stuck=frozenset(range(5, 12)))
    async with Pool(site.spawn, CONFIG, site.words) as pool:
        with pytest.raises(WorkerError, match="ValueError: wrong"):
            await pool.roll_out(requests(12))
    assert site.handed[4] == 1


async def test_a_worker_that_cannot_start_is_tried_three_times(autojump_clock: trio.abc.Clock) -> None:
    site = Site(refuse_start=2)
    async with Pool(site.spawn, ClusterConfig(workers=1), site.words) as pool:
        assert len(await pool.roll_out(requests(2))) == 2
    site = Site(refuse_start=3)
    async with Pool(site.spawn, ClusterConfig(workers=1), site.words) as pool:
        with pytest.raises(ClusterError, match="3 workers in a row failed to start: no memory"):
            await pool.roll_out(requests(2))


async def test_a_worker_that_does_not_get_up_in_time_is_replaced(autojump_clock: trio.abc.Clock) -> None:
    site = Site(start_seconds=1e6)
    async with Pool(site.spawn, ClusterConfig(workers=1, start_seconds=10), site.words) as pool:
        with pytest.raises(ClusterError, match="3 workers in a row failed to start: not started after 10 s"):
            await pool.roll_out(requests(2))


async def test_what_is_no_longer_wanted_is_withdrawn(autojump_clock: trio.abc.Clock) -> None:
    site = Site(seconds=10)
    async with Pool(site.spawn, ClusterConfig(workers=1, at_once=2), site.words) as pool:
        with trio.move_on_after(4):
            await pool.roll_out(requests(10))
        assert site.handed.total() == 2
        assert site.alive[0].now == set()
        site.seconds = 1
        assert answers(await pool.roll_out(requests(4))) == ["0", "1", "2", "3"]


async def test_the_faster_worker_makes_more(autojump_clock: trio.abc.Clock) -> None:
    class Slow(Simulated):
        async def roll(self, request: Request) -> Rollout:
            await self._busy(20)
            return await super().roll(request)

    site = Site()
    kinds = [Slow, Simulated]
    async with Pool(lambda: kinds.pop()(site), ClusterConfig(workers=2, at_once=8), site.words) as pool:
        await pool.roll_out(requests(100))
        slow, fast = sorted(site.alive, key=lambda w: w.made)
        assert isinstance(slow, Slow)
        assert slow.made <= 8
        assert fast.made >= 92


async def test_nobody_takes_all_while_others_are_still_starting(autojump_clock: trio.abc.Clock) -> None:
    class Late(Simulated):
        async def start(self) -> None:
            await trio.sleep(2.5)

    site = Site(seconds=10)
    kinds = [Late, Simulated]
    async with Pool(lambda: kinds.pop()(site), ClusterConfig(workers=2, at_once=16), site.words) as pool:
        await pool.roll_out(requests(16))
        assert [w.made for w in site.alive] == [8, 8]


async def test_an_error_of_the_caller_is_not_wrapped(autojump_clock: trio.abc.Clock) -> None:
    site = Site()

    async def body() -> NoReturn:
        async with Pool(site.spawn, CONFIG, site.words):
            await trio.sleep(3)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await body()
    assert not site.alive


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"address": "ray://head:10001"}, "cluster: address = 'ray://head:10001', want '', 'auto' or host:port"),
        ({"workers": 0}, "cluster: workers = 0, want 1 or more"),
        ({"worker_cpus": 0}, "cluster: worker_cpus = 0, want more than 0"),
        ({"learner_gpus": -1}, "cluster: learner_gpus = -1, want 0 or more"),
        ({"grace_seconds": 0}, "cluster: grace_seconds = 0, want more than 0"),
    ],
)
def test_a_setting_out_of_range_is_one_line(setting: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        ClusterConfig(**setting)
