"""What goes wrong, without a word, when a running vLLM gets new weights; and what is done about each of these.

Each remedy is taken away once, to see that the check would tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
import trio.testing
from transformers import Qwen3ForCausalLM

from swarm.checkpoint import save
from swarm.engine.probe import log_probabilities, verify
from swarm.engine.serving import Serving
from swarm.engine.thread import Thread
from swarm.engine.vllm import serving, vllm_engine
from swarm.engine.vllm_core import Core, VLLMConfig
from swarm.engine.vllm_worker import Worker
from swarm.types import Completion, EngineError, Sampling
from tests.engine_cases import VOCAB, started_vllm, tiny

pytestmark = pytest.mark.slow
PROMPT = [k * 7 % VOCAB for k in range(70)]


def model(seed: int, *, tied: bool = True) -> Qwen3ForCausalLM:
    return tiny(seed, head_dim=32, tied=tied)


def off(of: Qwen3ForCausalLM, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> float:
    """The largest difference in nats."""
    return max(abs(a - b) for a, b in zip(log_probabilities(of, prompt, ids), logprobs, strict=True))


@asynccontextmanager
async def engine() -> AsyncIterator[Serving]:
    """vLLM with the weights of `model(1)`, version 1."""
    core, thread = await started_vllm()
    async with serving(core, thread) as e:
        await e.update(model(1).state_dict(), 1)
        yield e


async def cached_probe() -> tuple[Core, Thread]:
    """A core with the weights of `model(1)`, of which the probe's prompt has been asked, as in a run."""
    core, thread = await started_vllm()
    async with serving(core, thread) as e:
        await e.update(model(1).state_dict(), 1)
        assert await verify(e, model(1), VOCAB, 1, bound=1e-4) < 1e-4
    return core, thread


class _Without(Core):
    """A core whose replacement of weights leaves a remedy out."""

    def __init__(self, core: Core, without: str) -> None:
        self.__dict__ |= core.__dict__
        self._client = _Client(core._client, without)


class _Client:
    def __init__(self, client: Any, without: str) -> None:
        self._inner, self._without = client, without

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def collective_rpc(self, method: str, **more: Any) -> Any:
        return [0] if method == self._without else self._inner.collective_rpc(method, **more)

    def reset_prefix_cache(self) -> bool:
        return True if self._without == "reset" else self._inner.reset_prefix_cache()


async def test_after_an_update_the_engine_says_what_the_new_model_would():
    async with engine() as e:
        for seed in (2, 3):
            await e.update(model(seed).state_dict(), seed)
            c = await e.generate(PROMPT, Sampling(20, seed=5))
            assert c.version == seed
            assert off(model(seed), PROMPT, c.ids, c.logprobs) < 1e-4


@pytest.mark.parametrize("without", ["swarm_pack", "reset"])
async def test_a_stale_head_or_stale_keys_are_noticed_after_the_update_and_named(without: str):
    core, thread = await cached_probe()
    if without == "swarm_pack" and not packs(core):
        pytest.skip("vLLM packs no matrices on this processor")
    async with serving(_Without(core, without), thread) as e:
        await e.update(as_on_disk(model(2)), 2)
        with pytest.raises(EngineError, match=r"update to version 2: .* nats from the learner's, want at most 0.01"):
            await verify(e, model(2), VOCAB, 2, bound=0.01)
    core, thread = await cached_probe()
    async with serving(core, thread) as e:
        await e.update(as_on_disk(model(2)), 2)
        assert await verify(e, model(2), VOCAB, 2, bound=1e-4) < 1e-4


def as_on_disk(of: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The weights without the name of a tied head, as files have them."""
    return {name: w for name, w in of.state_dict().items() if name != "lm_head.weight"}


def packs(core: Core) -> bool:
    """Whether the head is served from a packed copy, so that its parameter can be changed without effect."""

    def answers(worker: Any) -> bool:
        before = worker.swarm_served()
        worker.model_runner.get_model().lm_head.weight.data.neg_()  # the update that follows puts it right
        after = worker.swarm_served()
        return all(before[name] == after[name] for name in before if name.endswith("()"))

    return core._client.collective_rpc(answers)[0]


def test_what_a_backend_has_packed_is_packed_again_and_told_by_what_it_answers():
    worker = Worker()
    head, hidden = Packing(torch.ones(3, 4), keep=True), Packing(torch.ones(2, 4), keep=False)
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.ModuleDict({"head": head, "hidden": hidden}))
    before = worker.swarm_served()
    assert before.keys() == {"head.weight", "head()", "hidden()"}
    with torch.no_grad():
        head.weight.fill_(2.0)  # what a reload does to a head that is the embedding
    stale = worker.swarm_served()
    assert stale["head.weight"] != before["head.weight"]
    assert stale["head()"] == before["head()"]
    assert worker.swarm_pack() == 1
    assert worker.swarm_served()["head()"] != before["head()"]
    hidden.pack(torch.ones(2, 4) * 3)
    assert worker.swarm_served()["hidden()"] != before["hidden()"]


class Packing(torch.nn.Module):
    """A linear layer as vLLM's CPU backend makes them: it answers from a copy, and may have dropped its parameter."""

    def __init__(self, weight: torch.Tensor, keep: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight if keep else torch.empty(0), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda m: m.pack(m.weight))
        self.pack(weight)

    def pack(self, weight: torch.Tensor) -> None:
        packed = weight.clone()
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


async def test_a_prefix_cache_that_is_not_reset_fails_the_update_and_every_request_after_it():
    core, thread = await started_vllm()
    refusing = _Without(core, "")
    refusing._client.reset_prefix_cache = lambda: False  # pyright: ignore[reportAttributeAccessIssue]
    async with serving(refusing, thread) as e:
        with pytest.raises(EngineError, match="the prefix cache was not reset"):
            await e.update(model(2).state_dict(), 2)
        with pytest.raises(EngineError, match="the update to version 2 failed"):
            await e.generate([1], Sampling(2))


@pytest.mark.parametrize("least", [1, 8])
async def test_requests_under_way_go_on_across_an_update_and_each_token_knows_its_version(least: int):
    found: list[Completion] = []
    # Made before anything runs: vLLM's thread draws from the generator that the weights are drawn from.
    new = model(2)
    async with engine() as e:

        async def one(k: int) -> None:
            found.append(await e.generate([*PROMPT, k], Sampling(80, seed=k)))

        async with trio.open_nursery() as nursery:
            for k in range(6):
                nursery.start_soon(one, k)
            while e.running < 6 or _said(e) < least:
                await trio.lowlevel.checkpoint()
            await e.update(new.state_dict(), 2)
    for c in found:
        k = next(k for k in range(6) if off(model(1), [*PROMPT, k], c.ids[:1], c.logprobs[:1]) < 1e-4)
        ((version, n),) = c.earlier
        assert (version, c.version, len(c.ids)) == (1, 2, 80)
        assert 0 < n < 80
        assert off(model(1), [*PROMPT, k], c.ids[:n], c.logprobs[:n]) < 1e-4
        # What follows was computed anew from the first token on, by the new weights alone.
        assert off(new, [*PROMPT, k, *c.ids[:n]], c.ids[n:], c.logprobs[n:]) < 1e-4
        assert [(s.version, len(s.ids)) for s in c.spans] == [(1, n), (2, 80 - n)]


def _said(e: Serving) -> int:
    """The fewest tokens that a request under way has by now; 0 as long as not all of them are under way."""
    active = e.backend._active.values()  # pyright: ignore[reportAttributeAccessIssue]
    return min((len(r.ids) for r in active), default=0) if len(active) == e.running else 0


async def test_weights_are_copied_before_they_are_used():
    weights = {name: w.clone() for name, w in model(2).state_dict().items()}
    async with engine() as e:
        await e.update(weights, 2)
        for w in weights.values():
            w.fill_(float("nan"))
        c = await e.generate(PROMPT, Sampling(20, seed=5))
        assert off(model(2), PROMPT, c.ids, c.logprobs) < 1e-4


async def test_seeded_prompts_that_do_not_fit_one_step_are_all_answered():
    async with engine() as e, trio.open_nursery() as nursery:
        for k in range(40):  # 40 prompts of 200 tokens are four steps' worth
            nursery.start_soon(e.generate, [k % VOCAB] * 200, Sampling(3, seed=k))


async def test_the_checksum_tells_every_single_weight_that_is_served():
    async with engine() as e:
        before = await e.checksum()
        assert await e.checksum() == before
        weights = model(1).state_dict()
        for name in weights:
            changed: Mapping[str, torch.Tensor] = {n: w.clone() for n, w in weights.items()}
            changed[name].view(-1)[0] += 0.5
            if name in ("lm_head.weight", "model.embed_tokens.weight"):  # one matrix under two names
                for tied in ("lm_head.weight", "model.embed_tokens.weight"):
                    changed[tied].copy_(changed[name])
            await e.update(changed, 2)
            assert await e.checksum() != before, name
        await e.update(weights, 3)
        assert await e.checksum() == before


async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from():
    async with engine() as e:
        c = await e.generate(PROMPT, Sampling(20, temperature=0.7, seed=5))
        with torch.no_grad():
            logits_TV = model(1)(torch.tensor([[*PROMPT, *c.ids]])).logits[0, len(PROMPT) - 1 : -1] / 0.7
        expected = logits_TV.log_softmax(-1).gather(-1, torch.tensor(c.ids)[:, None])[:, 0]
        assert list(c.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_a_turn_that_goes_on_computes_only_what_is_new():
    async with engine() as e:
        first = await e.generate(PROMPT, Sampling(30, seed=1))
        grown = [*PROMPT, *first.ids, 3, 4, 5]
        assert first.cached == 0
        assert (await e.generate(grown, Sampling(3, seed=2))).cached == len(grown) // 32 * 32


async def test_a_step_that_never_ends_fails_every_waiter_and_every_later_request():
    core, _ = await started_vllm()
    thread, stuck = Thread("vllm", 120.0), _Without(core, "")
    release = threading.Event()

    async def one(e: Serving) -> None:
        with pytest.raises(EngineError, match=r"vllm: no answer within 0.2 s"):
            await e.generate([1, 2], Sampling(4))

    def hang(new: Sequence[Any], dropped: Sequence[str]) -> list[Any]:
        release.wait()
        return []

    stuck.step, stuck.brief, stuck.config = hang, False, replace(core.config, seconds=0.2)
    async with serving(stuck, thread) as e, trio.open_nursery() as nursery:
        nursery.start_soon(one, e)
        nursery.start_soon(one, e)
    async with serving(stuck, thread) as e:
        await one(e)
    release.set()


async def test_one_that_is_opened_and_closed_while_another_serves_leaves_it_as_it_was(tmp_path: Path):
    other = tiny(7, head_dim=32)
    save(other, None, tmp_path / "m", 0)

    async def talk(e: Serving, of: Qwen3ForCausalLM) -> None:
        for k in range(5):
            prompt = [k, *PROMPT[k:]]
            c = await e.generate(prompt, Sampling(20, seed=k))
            assert off(of, prompt, c.ids, c.logprobs) < 1e-4

    async with engine() as first:
        async with vllm_engine(tmp_path / "m", VLLMConfig(max_len=256, cache_bytes=16 << 20)) as late:
            for brief in (True, False):
                for serves in (first, late):
                    serves.backend._core.brief = brief  # pyright: ignore[reportAttributeAccessIssue]
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(talk, first, model(1))
                        nursery.start_soon(talk, late, other)
        await talk(first, model(1))


async def test_the_same_is_sampled_in_trios_thread_and_in_one_of_its_own():
    core, thread = await started_vllm()
    said: list[tuple[int, ...]] = []
    where: list[int] = []

    def step(new: Sequence[Any], dropped: Sequence[str]) -> list[Any]:
        where.append(threading.get_ident())
        return core.step(new, dropped)

    for brief in (True, False):
        other = _Without(core, "")
        other.step, other.brief = step, brief
        where.clear()
        async with serving(other, thread) as e:
            await e.update(model(1).state_dict(), 1)
            said.append((await e.generate(PROMPT, Sampling(10, seed=3))).ids)
            assert set(where) == {threading.get_ident()} if brief else threading.get_ident() not in where
    assert said[0] == said[1]


def test_lora_adapters_are_frozen_checkpoints_served_in_one_batch_on_one_engine(tmp_path: Path):
    # In a process of its own: where one vLLM of a process ends, so do the others.
    command = [sys.executable, "-m", "tests.lora_case", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["before"])) == 3
    assert found["after"] == found["before"]
    for k in range(3):  # each engine's completion against the base and the two merged models
        assert [off < 1e-4 for off in found["off"][k]] == [j == k for j in range(3)]
    assert found["update"] == "new weights for LoRA adapter 1, which is frozen"
    assert found["missing"].endswith("no adapter_config.json, want a LoRA adapter as PEFT writes it")
