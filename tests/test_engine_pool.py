"""Several engines as one, the shares of two sides, several checkpoints in turns: with engines that compute nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from swarm.engine.pool import Member, Pool, PoolConfig, Prefixes, pool
from swarm.engine.shares import Balance, Shares, shift
from swarm.engine.turns import turns
from swarm.folders import CheckpointError
from swarm.types import CheckpointRef, Completion, EngineError, Sampling

ONE = Sampling(1)
A, B = CheckpointRef(Path("a"), "sha-a", 1), CheckpointRef(Path("b"), "sha-b", 2)


@dataclass(eq=False)
class Fake:
    """Says what its weights are. `trouble`: what every call raises; `hangs`: no answer ever; `seconds` a request."""

    weights: str = "sha-0"
    version: int = 0
    trouble: str = ""
    hangs: bool = False
    seconds: float = 0.0
    queued: float = 0.0
    asked: list[tuple[int, ...]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(tuple(ids))
        self.running += 1
        self.most = max(self.most, self.running)
        weights = self.weights
        try:
            await self._go(self.seconds)
        finally:
            self.running -= 1
        assert weights == self.weights, "changed while it was sampling"
        said = (int(self.weights.encode().hex(), 16) % 97,)
        return Completion(said, (-0.5,), self.version, "length", seconds_queued=self.queued)

    async def load(self, ref: CheckpointRef) -> None:
        if ref.path == Path("none"):
            raise CheckpointError("none: no such checkpoint folder")
        await self.update({"sha": ref.sha256}, ref.version)

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        await self._go(0.0)
        self.weights, self.version = weights["sha"], version
        self.loads.append(self.weights)

    async def checksum(self) -> str:
        await self._go(0.0)
        return self.weights

    async def _go(self, seconds: float) -> None:
        await trio.sleep(seconds)
        if self.hangs:
            await trio.sleep_forever()
        if self.trouble:
            raise EngineError(self.trouble)


@asynccontextmanager
async def two(ref: CheckpointRef | None = None, **config: float) -> AsyncIterator[tuple[Pool, Fake, Fake]]:
    a, b = Fake(), Fake()
    async with pool({"a": a, "b": b}, ref, PoolConfig(**config)) as engine:
        for fake in (a, b):
            fake.asked.clear()
        yield engine, a, b


async def at_once(engine: Pool, prompts: Sequence[Sequence[int]]) -> None:
    async with trio.open_nursery() as nursery:
        for ids in prompts:
            nursery.start_soon(engine.generate, ids, ONE)


async def test_requests_go_to_the_engine_with_the_fewest(autojump_clock):
    async with two() as (engine, a, b):
        a.seconds = b.seconds = 1.0
        await at_once(engine, [[k] for k in range(10)])
    assert (len(a.asked), len(b.asked)) == (5, 5)


async def test_a_conversation_stays_with_the_engine_that_knows_it(autojump_clock):
    prompts = [[k] * 200 for k in range(6)]
    async with two() as (engine, a, b):
        a.seconds = b.seconds = 1.0
        await at_once(engine, prompts)
        first = {k for (k, *_) in a.asked}
        await at_once(engine, [[*p, 0, *[7] * 90] for p in reversed(prompts)])
    assert {k for (k, *_) in a.asked} == first
    assert len(a.asked) == len(b.asked) == 6


async def test_one_beginning_for_all_does_not_keep_the_others_idle(autojump_clock):
    """A system prompt is shared by every conversation: the pool's slack bounds how far they crowd together."""
    async with two() as (engine, a, b):
        a.seconds = b.seconds = 1.0
        await engine.generate([1] * 200, ONE)
        await at_once(engine, [[1] * 200 + [k] for k in range(40)])
    assert min(len(a.asked), len(b.asked)) >= 14


def test_a_prompt_of_which_less_than_half_is_known_is_new():
    known = Prefixes()
    member = Member(Fake(), "a")
    known.add([1] * 128, member)
    assert known.member([1] * 128 + [2] * 64) is member
    assert known.member([1] * 128 + [2] * 192) is None
    assert known.member([1] * 63) is None


async def test_a_failed_request_is_answered_by_another_engine(autojump_clock):
    async with two() as (engine, a, b):
        a.trouble = "gone"
        await at_once(engine, [[k] for k in range(8)])
        assert [m.name for m in engine.serving] == ["b"]
        assert engine.failovers >= 1
    assert len(b.asked) == 8


async def test_when_all_fail_the_error_says_what_the_last_one_said(autojump_clock):
    async with two() as (engine, a, b):
        a.trouble = b.trouble = "out of memory"
        with pytest.raises(EngineError, match="none of 2 engines answers: out of memory"):
            await engine.generate([1], ONE)


async def test_an_engine_that_is_well_again_is_brought_back(autojump_clock):
    async with two() as (engine, a, _b):
        a.trouble = "gone"
        await at_once(engine, [[1], [2]])
        await trio.sleep(40)
        assert [m.name for m in engine.serving] == ["b"]
        a.trouble = ""
        await trio.sleep(31)
        assert [m.name for m in engine.serving] == ["a", "b"]


async def test_a_request_waits_for_an_engine_to_come_back_and_no_longer_than_the_patience(autojump_clock):
    async with two(patience=20.0) as (engine, a, b):
        a.trouble = b.trouble = "gone"
        for member in engine.members:
            engine.take_out(member, "gone")
        began = trio.current_time()
        with pytest.raises(EngineError, match="gone"):
            await engine.generate([1], ONE)
        assert trio.current_time() - began == pytest.approx(20.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, [1], ONE)
            await trio.sleep(1)
            b.trouble = ""
    assert (1,) in b.asked


async def test_an_engine_that_hangs_is_not_brought_back(autojump_clock):
    async with two(probe_seconds=5.0) as (engine, a, _b):
        a.hangs = True
        engine.take_out(engine.members[0], "no answer")
        await trio.sleep(100)
        assert engine.members[0].out == "no answer to a probe within 5 s"


async def test_an_update_reaches_all(autojump_clock):
    async with two() as (engine, a, b):
        await engine.update({"sha": "sha-1"}, 1)
        assert (a.weights, b.weights, engine.version) == ("sha-1", "sha-1", 1)
        assert await engine.checksum() == "sha-1"


async def test_an_update_that_one_does_not_take_names_it_and_leaves_the_others_right(autojump_clock):
    async with two() as (engine, _a, b):
        b.trouble = "disk full"
        with pytest.raises(EngineError, match="^version 1 was not taken by b: disk full$"):
            await engine.update({"sha": "sha-1"}, 1)
        assert (await engine.generate([1], ONE)).version == 1
        assert [m.name for m in engine.serving] == ["a"]


async def test_an_engine_that_missed_an_update_stays_out_until_the_next(autojump_clock):
    async with two() as (engine, _a, b):
        b.trouble = "gone"
        with pytest.raises(EngineError):
            await engine.update({"sha": "sha-1"}, 1)
        b.trouble = ""
        await trio.sleep(100)
        assert engine.members[1].out == "its weights are not those of version 1"
        await engine.update({"sha": "sha-2"}, 2)
        assert [m.name for m in engine.serving] == ["a", "b"]
        assert await engine.checksum() == "sha-2"


async def test_an_engine_that_started_anew_loads_the_checkpoint_of_the_pool(autojump_clock):
    async with two(A) as (engine, _a, b):
        b.trouble = "gone"
        await at_once(engine, [[1], [2]])
        b.weights, b.version, b.trouble = "sha-0", 0, ""
        await trio.sleep(100)
        assert [m.name for m in engine.serving] == ["a", "b"]
        assert b.weights == "sha-a"


async def test_an_engine_that_refuses_until_it_is_loaded_is_loaded(autojump_clock):
    class Anew(Fake):
        async def load(self, ref: CheckpointRef) -> None:
            self.trouble = ""
            await super().load(ref)

    a, b = Fake(), Anew()
    async with pool({"a": a, "b": b}, A) as engine:
        b.trouble = "started again"
        await at_once(engine, [[1], [2]])
        await trio.sleep(1)
        assert len(engine.serving) == 2
    async with pool({"a": a, "b": b}) as engine:
        b.trouble = "started again"
        await at_once(engine, [[1], [2]])
        await trio.sleep(100)
        assert engine.members[1].out == "started again"


async def test_an_update_does_not_wait_for_an_engine_that_is_out(autojump_clock):
    async with two(patience=10.0) as (engine, _a, b):
        b.hangs = True
        engine.take_out(engine.members[1], "no answer")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await engine.update({"sha": "sha-1"}, 1)
        assert trio.current_time() - began == pytest.approx(10.0)
        assert (await engine.generate([1], ONE)).version == 1


async def test_engines_of_different_weights_are_no_pool():
    with pytest.raises(EngineError, match="the engines of a pool serve a sha-0, b sha-1, want the same weights"):
        async with pool({"a": Fake(), "b": Fake("sha-1")}):
            pass


async def test_one_that_changes_its_weights_by_itself_is_noticed():
    async with two() as (engine, _a, b):
        b.weights = "sha-x"
        with pytest.raises(EngineError, match="a sha-0, b sha-x"):
            await engine.checksum()


async def test_a_checkpoint_that_is_none_is_refused_and_nothing_is_out():
    async with two() as (engine, _a, _b):
        with pytest.raises(CheckpointError):
            await engine.load(CheckpointRef(Path("none"), "x"))
        assert len(engine.serving) == 2


async def test_a_prompt_that_no_engine_takes_is_no_failure_of_the_engine():
    class Strict(Fake):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
            if not ids:
                raise ValueError("prompt of 0 tokens")
            return await super().generate(ids, sampling)

    async with pool({"a": Strict()}) as engine:
        with pytest.raises(ValueError, match="prompt of 0"):
            await engine.generate([], ONE)
        assert len(engine.serving) == 1


async def test_a_cancelled_request_is_off_the_count(autojump_clock):
    async with two() as (engine, a, b):
        a.hangs = b.hangs = True
        with trio.move_on_after(1):
            await at_once(engine, [[1], [2], [3]])
        assert engine.running == a.running == b.running == 0


@pytest.mark.parametrize(
    ("engines", "queued", "expected"),
    [
        # The policy: 2.0 · 1/2 = 1.0, the subagents: 0.5 · 3/2 = 0.75. 1.0 is half of 2.0.
        ((1, 3), (2.0, 0.5), 1),
        # 1.0 · 2/3 = 0.67 and 0.5 · 2/1 = 1.0: no shorter than before.
        ((2, 2), (1.0, 0.5), 0),
        # 1.0 · 3/4 = 0.75 and 0.1 · 2/1 = 0.2: a quarter shorter.
        ((3, 2), (1.0, 0.1), 1),
        # 1.0 · 5/6 = 0.83: a sixth shorter, and 0.2 is wanted.
        ((5, 2), (1.0, 0.1), 0),
        # The same for the other side.
        ((3, 1), (0.5, 2.0), -1),
        ((2, 3), (0.1, 1.0), -1),
        # The last engine of a side stays.
        ((3, 1), (9.0, 0.0), 0),
        ((1, 3), (0.0, 9.0), 0),
        # Nobody waits long enough to be worth a move.
        ((2, 2), (0.04, 0.0), 0),
        ((2, 2), (0.0, 0.0), 0),
    ],
)
def test_shift(engines: tuple[int, int], queued: tuple[float, float], expected: int):
    assert shift(*engines, *queued, Balance(floor=0.05, gain=0.2)) == expected


@pytest.mark.parametrize("loads", [(1.0, 1.0), (4.0, 1.0), (0.3, 9.0), (5.0, 4.9), (0.0, 3.0)])
def test_a_steady_load_ends_the_moves(loads: tuple[float, float]):
    """Waits that fall with the engines as assumed: no engine goes back and forth."""
    policy, subagents, moves = 4, 4, list[int]()
    for _ in range(20):
        moves.append(shift(policy, subagents, loads[0] / policy, loads[1] / subagents, Balance()))
        policy, subagents = policy + moves[-1], subagents - moves[-1]
    assert set(moves[8:]) == {0}
    assert len(set(moves) - {0}) <= 1


@asynccontextmanager
async def sides(policy: int, subagents: int) -> AsyncIterator[tuple[Shares, list[Fake]]]:
    fakes = [Fake() for _ in range(policy + subagents)]
    names = {f"server {k}": fake for k, fake in enumerate(fakes)}
    ours, theirs = dict(list(names.items())[:policy]), dict(list(names.items())[policy:])
    async with pool(ours) as p, pool(theirs, A) as s:
        yield Shares(p, s, Balance(seconds=5.0)), fakes


async def test_an_engine_goes_where_requests_wait_and_serves_from_the_next_update(autojump_clock):
    async with sides(1, 2) as (shares, (_, one, other)):
        shares.policy.members[0].engine.queued = 1.0
        await shares.policy.generate([1], ONE)
        await shares.subagents.generate([1], ONE)
        metrics = await shares.rebalance()
        assert metrics == {
            "serving/policy_engines": 2,
            "serving/subagent_engines": 1,
            "serving/queued_policy": 1.0,
            "serving/queued_subagents": 0.0,
        }
        assert len(shares.policy.serving) == 1
        await shares.policy.update({"sha": "sha-1"}, 1)
        assert len(shares.policy.serving) == 2
        assert await shares.policy.checksum() == "sha-1"
        assert await shares.subagents.checksum() == "sha-a"
    assert sorted((one.weights, other.weights)) == ["sha-1", "sha-a"]


async def test_an_engine_that_the_subagents_gain_loads_their_checkpoint(autojump_clock):
    async with sides(2, 1) as (shares, fakes):
        fakes[2].queued = 3.0
        await shares.subagents.generate([1], ONE)
        await shares.rebalance()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        assert len(shares.subagents.serving) == 2
        assert await shares.subagents.checksum() == "sha-a"
    assert shares.moves == 1


async def test_what_was_waited_before_the_last_decision_counts_no_more(autojump_clock):
    async with sides(2, 2) as (shares, fakes):
        fakes[0].queued = fakes[1].queued = 5.0
        await shares.policy.generate([1], ONE)
        first = await shares.rebalance()
        second = await shares.rebalance()
    assert (first["serving/queued_policy"], second["serving/queued_policy"]) == (5.0, 0.0)
    assert second["serving/policy_engines"] == 3


async def test_an_engine_answers_what_it_was_asked_before_it_moves(autojump_clock):
    async with sides(1, 2) as (shares, fakes):
        fakes[0].queued = 9.0
        await shares.policy.generate([1], ONE)
        fakes[1].seconds = fakes[2].seconds = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shares.subagents.generate, [1], ONE)
            nursery.start_soon(shares.subagents.generate, [2], ONE)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            await shares.rebalance()
        assert trio.current_time() - began == pytest.approx(2.0)
    assert (shares.moves, len(shares.policy.members)) == (1, 2)


async def test_the_last_engine_that_is_in_is_not_given_away():
    async with two() as (engine, _a, b):
        b.trouble = "gone"
        engine.take_out(engine.members[1], "gone")
        assert await engine.release(1.0) is None
        assert [m.name for m in engine.serving] == ["a"]


async def test_an_engine_that_is_not_empty_in_time_stays_and_goes_on(autojump_clock):
    async with sides(1, 2) as (shares, fakes):
        fakes[0].queued = 9.0
        await shares.policy.generate([1], ONE)
        fakes[1].seconds = fakes[2].seconds = 30.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shares.subagents.generate, [1], ONE)
            nursery.start_soon(shares.subagents.generate, [2], ONE)
            await trio.testing.wait_all_tasks_blocked()
            metrics = await shares.rebalance()
    assert metrics["serving/subagent_engines"] == 2
    assert len(shares.subagents.serving) == 2
    assert shares.moves == 0


async def test_each_checkpoint_is_served_from_its_own_weights(autojump_clock):
    fake = Fake(seconds=0.1)
    said: dict[str, set[int]] = {"a": set(), "b": set()}
    async with turns(fake) as shared, trio.open_nursery() as nursery:
        views = {"a": shared.view(A), "b": shared.view(B)}

        async def ask(name: str) -> None:
            c = await views[name].generate([1], ONE)
            said[name].add(c.version)

        for k in range(20):
            nursery.start_soon(ask, "ab"[k % 2])
    assert said == {"a": {1}, "b": {2}}


async def test_requests_of_one_checkpoint_are_served_together(autojump_clock):
    fake = Fake(seconds=1.0)
    async with turns(fake) as shared:
        a, b = shared.view(A), shared.view(B)
        async with trio.open_nursery() as nursery:
            for k in range(20):
                nursery.start_soon((a, b)[k % 2].generate, [k], ONE)
    assert len(fake.loads) == shared.loads == 2
    assert fake.most == 10


async def test_a_checkpoint_waits_no_longer_than_the_patience_and_what_is_sampled(autojump_clock):
    fake = Fake(seconds=1.0)
    async with turns(fake, patience=5.0) as shared, trio.open_nursery() as nursery:
        a, b = shared.view(A), shared.view(B)

        async def forever(offset: float) -> None:
            await trio.sleep(offset)
            while True:
                await a.generate([1], ONE)

        nursery.start_soon(forever, 0.0)
        nursery.start_soon(forever, 0.5)  # so that the engine is never empty
        await trio.sleep(0.25)
        c = await b.generate([2], ONE)
        nursery.cancel_scope.cancel()
    assert 5.0 <= c.seconds_queued <= 6.0


async def test_a_cancelled_request_gives_its_turn_back(autojump_clock):
    fake = Fake(seconds=100.0)
    async with turns(fake, patience=1.0) as shared:
        with trio.move_on_after(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shared.view(A).generate, [1], ONE)
                nursery.start_soon(shared.view(B).generate, [1], ONE)
        fake.seconds = 0.0
        with trio.fail_after(1):
            assert (await shared.view(B).generate([1], ONE)).version == 2


async def test_a_checkpoint_that_does_not_load_fails_its_own_requests_only(autojump_clock):
    fake = Fake()
    async with turns(fake) as shared:
        with pytest.raises(CheckpointError):
            await shared.view(CheckpointRef(Path("none"), "x")).generate([1], ONE)
        assert (await shared.view(A).generate([1], ONE)).version == 1


async def test_the_checksum_of_a_checkpoint_in_turns_is_of_its_own_weights(autojump_clock):
    fake = Fake()
    async with turns(fake) as shared:
        a, b = shared.view(A), shared.view(B)
        assert [await a.checksum(), await b.checksum(), await a.checksum()] == ["sha-a", "sha-b", "sha-a"]
        await a.load(B)
        assert await a.checksum() == "sha-b"
        with pytest.raises(EngineError, match="want a checkpoint"):
            await a.update({}, 1)
