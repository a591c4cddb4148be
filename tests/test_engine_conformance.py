"""What every engine does. An engine under test comes with a way to make it fail and a checkpoint to load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from transformers import Qwen3ForCausalLM

from swarm.checkpoint import save
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.scripted import ScriptedEngine
from swarm.types import Completion, Engine, EngineError, Sampling
from tests.engine_cases import VOCAB, compile_kernels, tiny


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_kernels()


def broken() -> Qwen3ForCausalLM:
    model = tiny(0)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    return model


@dataclass(frozen=True)
class Subject:
    engine: Any
    break_it: Callable[[], None]
    mend_it: Callable[[], None]
    idle: Callable[[], bool]


@asynccontextmanager
async def scripted() -> AsyncIterator[Subject]:
    def policy(ids: Sequence[int], sampling: Sampling) -> list[int]:
        state = sum(ids) * 31 + sampling.seed
        return [(state * (k + 3) // 5) % VOCAB for k in range(200)]

    failing: set[int] = set()
    engine = ScriptedEngine(policy, fail_at=failing, delay=0.001, version=3)
    yield Subject(engine, lambda: failing.update(range(1000)), failing.clear, idle=lambda: engine.pending == 0)


@asynccontextmanager
async def embedded(threads: int = 1) -> AsyncIterator[Subject]:
    async with EmbeddedEngine(tiny(1), version=3, max_len=256, cache_bytes=2 << 20, threads=threads) as engine:
        yield Subject(
            engine,
            lambda: engine.set_weights(broken(), 3),
            lambda: engine.set_weights(tiny(1), 3),
            idle=lambda: engine.stats.active == engine.stats.queue == 0,
        )


ENGINES = [
    pytest.param(scripted, id="scripted"),
    pytest.param(embedded, id="embedded"),
    pytest.param(lambda: embedded(threads=2), id="embedded-2-threads"),
]
every_engine = pytest.mark.parametrize("make", ENGINES)


async def together(engine: Engine, prompts: list[list[int]], sampling: list[Sampling]) -> list[Completion]:
    out: dict[int, Completion] = {}

    async def one(k: int) -> None:
        out[k] = await engine.generate(prompts[k], sampling[k])

    async with trio.open_nursery() as nursery:
        for k in range(len(prompts)):
            nursery.start_soon(one, k)
    return [out[k] for k in range(len(prompts))]


@every_engine
async def test_a_stop_token_ends_a_completion_and_is_part_of_it(make):
    async with make() as s:
        free = await s.engine.generate([1, 2, 3], Sampling(30, seed=5))
        stop = free.ids[4]
        stopped = await s.engine.generate([1, 2, 3], Sampling(30, seed=5, stop=(stop,)))
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]


@every_engine
async def test_max_tokens_ends_a_completion_with_length(make):
    async with make() as s:
        c = await s.engine.generate([1, 2, 3], Sampling(9))
    assert (len(c.ids), c.finish) == (9, "length")


@every_engine
async def test_there_is_one_logprob_an_id(make):
    async with make() as s:
        c = await s.engine.generate([1, 2, 3], Sampling(9))
    assert len(c.logprobs) == len(c.ids)
    assert all(x <= 0 for x in c.logprobs)


@every_engine
async def test_a_seed_gives_the_same_tokens_alone_and_among_others(make):
    prompts = [[k % VOCAB, 3, (k * 5) % VOCAB] * (1 + k % 4) for k in range(12)]
    sampling = [Sampling(5 + k, seed=k) for k in range(12)]
    async with make() as s:
        alone = [await s.engine.generate(p, x) for p, x in zip(prompts, sampling, strict=True)]
    async with make() as s:
        batch = await together(s.engine, prompts, sampling)
    assert [c.ids for c in batch] == [c.ids for c in alone]
    assert [c.logprobs for c in batch] == [pytest.approx(c.logprobs, abs=1e-5) for c in alone]


@every_engine
async def test_a_cancelled_request_leaves_nothing_behind(make):
    async with make() as s:
        expected = await s.engine.generate([1, 2, 3], Sampling(9, seed=1))
        async with trio.open_nursery() as nursery:
            for k in range(5):
                nursery.start_soon(s.engine.generate, [4, k], Sampling(200))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        again = await s.engine.generate([1, 2, 3], Sampling(9, seed=1))
        # Those that were cancelled would have gone on for some 190 tokens more.
        assert s.idle()
    assert again.ids == expected.ids


@every_engine
async def test_the_version_of_the_weights_is_reported(make, tmp_path):
    ref = save(tiny(2), None, tmp_path / "m", version=8)
    async with make() as s:
        before = await s.engine.generate([1, 2], Sampling(2))
        await s.engine.load(ref)
        after = await s.engine.generate([1, 2], Sampling(2))
    assert (before.version, after.version) == (3, 8)


@every_engine
async def test_an_error_reaches_every_waiter_and_the_engine_goes_on(make):
    errors: list[str] = []

    async def one(engine: Engine, k: int) -> None:
        try:
            await engine.generate([k], Sampling(4))
        except EngineError as error:
            errors.append(str(error))

    async with make() as s:
        s.break_it()
        async with trio.open_nursery() as nursery:
            for k in range(6):
                nursery.start_soon(one, s.engine, k)
        s.mend_it()
        assert len(errors) == 6
        assert all(errors)
        assert len((await s.engine.generate([1], Sampling(4))).ids) == 4


@every_engine
async def test_many_requests_at_once_are_all_answered(make):
    prompts = [[k % VOCAB] * (1 + k % 50) for k in range(60)]
    sampling = [Sampling(1 + k % 7, seed=k) for k in range(60)]
    async with make() as s:
        out = await together(s.engine, prompts, sampling)
        assert s.idle()
    assert [len(c.ids) for c in out] == [x.max_tokens for x in sampling]


@every_engine
async def test_what_is_kept_between_turns_changes_nothing(make):
    async with make() as s:
        first = await s.engine.generate([1, 2, 3] * 15, Sampling(30, seed=1))
        grown = [*[1, 2, 3] * 15, *first.ids, 9, 8]
        kept = await s.engine.generate(grown, Sampling(20, seed=2))
    async with make() as s:
        fresh = await s.engine.generate(grown, Sampling(20, seed=2))
    assert kept.ids == fresh.ids
    assert kept.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


@pytest.mark.slow
async def test_loading_a_checkpoint_changes_what_the_embedded_engine_says(tmp_path: Path):
    ref = save(tiny(2), None, tmp_path / "m", version=8)
    async with embedded() as s, EmbeddedEngine(tiny(2), max_len=256, cache_bytes=2 << 20) as other:
        before = await s.engine.generate([1, 2, 3], Sampling(20, seed=1))
        await s.engine.load(ref)
        after = await s.engine.generate([1, 2, 3], Sampling(20, seed=1))
        assert after.ids != before.ids
        assert after.ids == (await other.generate([1, 2, 3], Sampling(20, seed=1))).ids
