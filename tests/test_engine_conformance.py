"""What every engine does. An engine under test comes with a way to make it fail and a checkpoint to load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from transformers import Qwen3ForCausalLM

from swarm.checkpoint import save
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.http import Place, connected
from swarm.engine.scripted import ScriptedEngine
from swarm.engine.serving import Limits
from swarm.engine.vllm import serving
from swarm.types import Completion, Engine, EngineError, Sampling
from tests.engine_cases import VOCAB, compile_kernels, started_server, started_vllm, tiny


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_kernels()


def model(seed: int) -> Qwen3ForCausalLM:
    """Heads as wide as every engine can."""
    return tiny(seed, head_dim=32)


def broken() -> Qwen3ForCausalLM:
    model_ = model(0)
    with torch.no_grad():
        model_.model.norm.weight.fill_(float("nan"))
    return model_


@dataclass(frozen=True)
class Subject:
    engine: Any
    break_it: Callable[[], Awaitable[None]]
    mend_it: Callable[[], Awaitable[None]]
    idle: Callable[[], bool]


@asynccontextmanager
async def scripted() -> AsyncIterator[Subject]:
    def policy(ids: Sequence[int], sampling: Sampling) -> list[int]:
        state = sum(ids) * 31 + sampling.seed
        return [(state * (k + 3) // 5) % VOCAB for k in range(200)]

    failing: set[int] = set()
    engine = ScriptedEngine(policy, fail_at=failing, delay=0.001, version=3)

    async def fail() -> None:
        failing.update(range(1000))

    async def mend() -> None:
        failing.clear()

    yield Subject(engine, fail, mend, idle=lambda: engine.pending == 0)


@asynccontextmanager
async def embedded(threads: int = 1) -> AsyncIterator[Subject]:
    async with EmbeddedEngine(model(1), version=3, max_len=256, cache_bytes=4 << 20, threads=threads) as engine:
        yield Subject(
            engine,
            partial(engine.update, broken().state_dict(), 3),
            partial(engine.update, model(1).state_dict(), 3),
            idle=lambda: engine.stats.active == engine.stats.queue == 0,
        )


@asynccontextmanager
async def vllm() -> AsyncIterator[Subject]:
    core, thread = await started_vllm()
    async with serving(core, thread) as engine:
        await engine.update(model(1).state_dict(), 3)
        yield Subject(
            engine,
            partial(engine.update, broken().state_dict(), 3),
            partial(engine.update, model(1).state_dict(), 3),
            idle=lambda: engine.running == 0,
        )


@asynccontextmanager
async def vllm_server() -> AsyncIterator[Subject]:
    # In a thread: it takes a minute to start.
    process = await trio.to_thread.run_sync(started_server)
    async with connected(Place(process.address, process.folders), Limits(256, VOCAB)) as engine:
        await engine.update(model(1).state_dict(), 3)
        yield Subject(
            engine,
            partial(engine.update, broken().state_dict(), 3),
            partial(engine.update, model(1).state_dict(), 3),
            idle=lambda: engine.running == 0,
        )


ENGINES = [
    pytest.param(scripted, id="scripted"),
    pytest.param(embedded, id="embedded"),
    pytest.param(lambda: embedded(threads=2), id="embedded-2-threads"),
    pytest.param(vllm, id="vllm", marks=pytest.mark.slow),
    pytest.param(vllm_server, id="vllm-server", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]
every_engine = pytest.mark.parametrize("make", ENGINES)


def log_policy(of: Qwen3ForCausalLM, prompt: list[int], said: Sequence[int]) -> list[float]:
    """What the model itself gives the tokens."""
    with torch.no_grad():
        logp = of(torch.tensor([[*prompt, *said]])).logits[0].log_softmax(-1)
    return [logp[len(prompt) - 1 + k, i].item() for k, i in enumerate(said)]


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
    ref = save(model(2), None, tmp_path / "m", version=8)
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
        await s.break_it()
        async with trio.open_nursery() as nursery:
            for k in range(6):
                nursery.start_soon(one, s.engine, k)
        await s.mend_it()
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
@pytest.mark.parametrize("make", ENGINES[1:])
async def test_loading_a_checkpoint_changes_what_an_engine_says(make, tmp_path: Path):
    ref = save(model(2), None, tmp_path / "m", version=8)
    async with make() as s, EmbeddedEngine(model(2), max_len=256, cache_bytes=2 << 20) as other:
        before = await s.engine.generate([1, 2, 3], Sampling(20, seed=1))
        await s.engine.load(ref)
        after = await s.engine.generate([1, 2, 3], Sampling(20, seed=1))
        assert after.ids != before.ids
        if isinstance(s.engine, EmbeddedEngine):  # seeds are an engine's own
            assert after.ids == (await other.generate([1, 2, 3], Sampling(20, seed=1))).ids
        assert after.logprobs == pytest.approx(log_policy(model(2), [1, 2, 3], after.ids), abs=1e-4)
