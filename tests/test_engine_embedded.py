"""What only the embedded engine does: exact log-probabilities, the cache, weights pushed while it runs."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
import trio
import trio.testing
from transformers import Qwen3ForCausalLM

from swarm.engine import embedded
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.qwen3 import hidden, logits, shape_of, weights_of
from swarm.types import Completion, EngineError, Sampling
from tests.engine_cases import compile_kernels, tiny

SMALL = 1 << 20


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_kernels()


def training_logprobs(model: Qwen3ForCausalLM, ids: list[int], temperature: float) -> list[float]:
    w = weights_of(model)
    with torch.no_grad():
        h = hidden(w, shape_of(model.config), torch.tensor(ids), [len(ids)])
        logp = (logits(w, h) / temperature).log_softmax(-1)
    return [0.0, *(logp[t - 1, i].item() for t, i in enumerate(ids) if t)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_over_turns_are_those_of_the_training_forward(temperature: float):
    model, ids, reported = tiny(), [1, 2, 3] * 13, dict[int, float]()
    async with EmbeddedEngine(model, max_len=256, cache_bytes=SMALL) as engine:
        for turn in range(4):
            c = await engine.generate(ids, Sampling(15, temperature=temperature, seed=turn))
            reported.update(enumerate(c.logprobs, start=len(ids)))
            ids = [*ids, *c.ids, 5, 6, 7, turn]
    want = training_logprobs(model, ids, temperature)
    assert reported == pytest.approx({t: want[t] for t in reported}, abs=1e-5)


async def test_greedy_takes_the_best_token():
    model = tiny()
    async with EmbeddedEngine(model, max_len=256, cache_bytes=SMALL) as engine:
        c = await engine.generate([1, 2, 3], Sampling(1, temperature=0))
    with torch.no_grad():
        best = model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax().item()
    assert c.ids == (best,)


async def test_a_later_turn_computes_only_what_is_new():
    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:
        c = await engine.generate([1] * 50, Sampling(10))
        later = await engine.generate([*[1] * 50, *c.ids, 2, 3], Sampling(1))
        stats = engine.stats
    # The last sampled token has not been fed yet.
    assert later.cached == 59
    assert (stats.prefilled, stats.cached, stats.sampled) == (50 + 3, 59, 11)


async def test_a_prompt_that_many_share_is_computed_once():
    shared = [3] * 64
    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine, trio.open_nursery() as nursery:
        for k in range(8):
            nursery.start_soon(engine.generate, [*shared, k, k], Sampling(2))
    assert engine.stats.prefilled == 64 + 8 * 2


async def test_a_context_that_is_full_ends_with_length():
    async with EmbeddedEngine(tiny(), max_len=20, cache_bytes=SMALL) as engine:
        c = await engine.generate([1] * 15, Sampling(100))
    assert (len(c.ids), c.finish) == (5, "length")


@pytest.mark.parametrize(
    ("ids", "sampling", "line"),
    [
        ([1] * 20, Sampling(1), "prompt of 20 tokens, want 1 to 19"),
        ([], Sampling(1), "prompt of 0 tokens"),
        ([1, 40], Sampling(1), "prompt ids span 1 to 40, want 0 to 39"),
        ([1], Sampling(0), "want max_tokens >= 1"),
        ([1], Sampling(1, top_p=0.0), "0 < top_p <= 1"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_numbers(ids: list[int], sampling: Sampling, line: str):
    async with EmbeddedEngine(tiny(), max_len=20, cache_bytes=SMALL) as engine:
        with pytest.raises(ValueError, match=line):
            await engine.generate(ids, sampling)


async def test_one_that_is_refused_keeps_nobody_waiting_who_begins_alike():
    async def ask(engine: EmbeddedEngine, last: int) -> None:
        with pytest.raises(ValueError, match="want 0 to 39"):
            await engine.generate([*[1] * 40, last], Sampling(3))

    with trio.fail_after(5):
        async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine, trio.open_nursery() as nursery:
            for last in (40, -1, 99):
                nursery.start_soon(ask, engine, last)


async def test_weights_pushed_while_requests_run_are_used_by_the_next_ones_only():
    out: list[Completion] = []
    async with EmbeddedEngine(tiny(0), version=1, max_len=256, cache_bytes=SMALL) as engine:

        async def one() -> None:
            out.append(await engine.generate([1, 2], Sampling(40, seed=4)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not engine.stats.sampled:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(engine.update, tiny(1).state_dict(), 2)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(one)
    async with EmbeddedEngine(tiny(0), max_len=256, cache_bytes=SMALL) as old:
        before = await old.generate([1, 2], Sampling(40, seed=4))
    async with EmbeddedEngine(tiny(1), max_len=256, cache_bytes=SMALL) as new:
        after = await new.generate([1, 2], Sampling(40, seed=4))
    assert [(c.version, c.ids) for c in out] == [(1, before.ids), (2, after.ids)]


async def test_of_weights_pushed_at_once_the_last_are_served_and_nobody_waits_for_the_others():
    async with EmbeddedEngine(tiny(0), max_len=256, cache_bytes=SMALL) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, [1, 2], Sampling(40))
        while not engine.stats.sampled:
            await trio.lowlevel.checkpoint()
        for version in (1, 2, 3):
            async with trio.open_nursery() as pushing:
                pushing.start_soon(engine.update, tiny(version).state_dict(), version)
                await trio.lowlevel.checkpoint()
                pushing.start_soon(engine.update, tiny(version + 10).state_dict(), version + 10)
            assert engine.version == version + 10
    async with EmbeddedEngine(tiny(13), max_len=256, cache_bytes=SMALL) as alone:
        assert await alone.checksum() == await engine.checksum()


async def test_who_is_done_goes_on_while_others_are_served():
    async with EmbeddedEngine(tiny(), max_len=4096, cache_bytes=64 << 20) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.generate, [1], Sampling(2000, seed=1))
        for k in range(3):
            await engine.generate([2, k], Sampling(4))
            assert engine.stats.active == 1
        nursery.cancel_scope.cancel()


async def test_who_goes_on_at_once_is_in_the_very_next_step():
    async def agent(engine: EmbeddedEngine, k: int) -> None:
        ids = [k]
        for _ in range(5):
            ids += (await engine.generate(ids, Sampling(4))).ids
            for _ in range(k):  # some take longer to act on what they are told
                await trio.lowlevel.checkpoint()

    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:
        async with trio.open_nursery() as nursery:
            for k in range(8):
                nursery.start_soon(agent, engine, k)
        assert engine.stats.steps == 5 * 4


async def test_a_task_that_is_never_idle_holds_up_no_step():
    async def busy() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(busy)
        assert len((await engine.generate([1], Sampling(5))).ids) == 5
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("most", "in_trio"), [(embedded._BRIEF, True), (0, False)])
async def test_only_a_step_that_takes_long_goes_to_another_thread(
    most: int, in_trio: bool, monkeypatch: pytest.MonkeyPatch
):
    threads: set[int] = set()

    def compute(engine: EmbeddedEngine, *given: Any) -> Any:
        threads.add(threading.get_ident())
        return stepped(engine, *given)

    stepped = EmbeddedEngine._compute
    monkeypatch.setattr(EmbeddedEngine, "_compute", compute)
    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:
        brief = await engine.generate([1, 2], Sampling(10, seed=3))
        threads.clear()
        monkeypatch.setattr(embedded, "_BRIEF", most)
        again = await engine.generate([1, 2], Sampling(10, seed=3))
    assert (threading.get_ident() in threads) == in_trio
    assert (again.ids, len(threads)) == (brief.ids, 1)


def test_an_interrupt_ends_the_program_between_two_steps(monkeypatch: pytest.MonkeyPatch):
    begun: list[int] = []
    ended: list[int] = []

    def compute(engine: EmbeddedEngine, *given: Any) -> Any:
        if not begun:
            signal.raise_signal(signal.SIGINT)
        begun.append(engine.stats.steps)
        return stepped(engine, *given)

    async def main() -> None:
        async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:
            try:
                await engine.generate([1], Sampling(50))
            finally:
                ended.append(engine.stats.steps)

    stepped = EmbeddedEngine._compute
    monkeypatch.setattr(EmbeddedEngine, "_compute", compute)
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert 1 <= len(begun) < 50
    assert ended == [len(begun)]


async def test_weights_are_copied_when_they_are_pushed():
    model = tiny(1)
    async with EmbeddedEngine(tiny(0), max_len=256, cache_bytes=SMALL) as engine:
        await engine.update(model.state_dict(), 1)
        expected = await engine.generate([1, 2], Sampling(20))
        with torch.no_grad():
            model.model.embed_tokens.weight.zero_()
        assert (await engine.generate([1, 2], Sampling(20))).ids == expected.ids


async def test_weights_of_another_shape_are_refused():
    async with EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:
        with pytest.raises(ValueError, match="new weights: .* want"):
            await engine.update(tiny(heads=2).state_dict(), 1)


async def test_requests_wait_for_room_and_are_all_served_when_memory_is_short():
    done: list[int] = []
    # Two layers, two key heads of 16: a block of 32 tokens takes 16 KB, so 6 blocks.
    async with EmbeddedEngine(tiny(), max_len=192, cache_bytes=96 << 10) as engine:

        async def one(k: int) -> None:
            for turn in range(3):
                await engine.generate([k] * (40 + 40 * turn), Sampling(10))
            done.append(k)

        async with trio.open_nursery() as nursery:
            for k in range(7):
                nursery.start_soon(one, k)
    assert sorted(done) == list(range(7))


async def test_one_request_may_take_all_the_room_that_others_left_behind():
    async with EmbeddedEngine(tiny(), max_len=192, cache_bytes=96 << 10) as engine:
        await engine.generate([1] * 20, Sampling(10))
        c = await engine.generate([*[1] * 10, *[2] * 100], Sampling(200))
    assert len(c.ids) == 192 - 110


async def test_outside_its_context_the_engine_says_that_it_is_not_running():
    engine = EmbeddedEngine(tiny(), max_len=64, cache_bytes=SMALL)
    with pytest.raises(EngineError, match="not running"):
        await engine.generate([1], Sampling(1))


async def test_closing_the_engine_wakes_those_who_wait():
    errors: list[str] = []
    async with trio.open_nursery() as nursery, EmbeddedEngine(tiny(), max_len=256, cache_bytes=SMALL) as engine:

        async def one() -> None:
            try:
                await engine.generate([1], Sampling(250))
            except EngineError as error:
                errors.append(str(error))

        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
    assert errors == ["the engine was closed"]


async def test_an_error_inside_the_context_comes_out_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        async with EmbeddedEngine(tiny(), max_len=64, cache_bytes=SMALL):
            raise KeyError("mine")


async def test_torchs_own_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    async with EmbeddedEngine(tiny(), max_len=64, cache_bytes=SMALL, threads=2) as engine:
        await engine.generate([1], Sampling(3))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("field", ["max_len", "chunk", "threads"])
def test_a_size_of_zero_is_refused(field: str):
    with pytest.raises(ValueError, match=f"{field} = 0, want at least 1"):
        EmbeddedEngine(tiny(), **{field: 0})


def test_a_head_width_that_the_kernels_cannot_take_is_refused():
    with pytest.raises(ValueError, match="head_dim = 8, want a multiple of 16"):
        EmbeddedEngine(tiny(head_dim=8))
