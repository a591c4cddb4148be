"""A policy that is trained through the gateway: what PPO learns from is what was sampled, where it was sampled.

Invariants 1 and 2 of the design, over rollouts of a client that goes on, repeats itself, and edits its history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
import trio
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.dialogue import Dialogues
from swarm.engine.embedded import EmbeddedEngine
from swarm.gateway import Gateway, serving
from swarm.gateway_guest import Guest
from swarm.rl.batch import collect
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.types import Budget, Completion, Engine, Reward, Rollout, Sampling
from tests.gateway_cases import SYSTEM, USER
from tests.swarm_cases import TASK, chat

AND = {"role": "user", "content": "And?"}


def model() -> Qwen3ForCausalLM:
    """Two layers that speak the tests' language, with weights large enough for uneven distributions."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=len(chat().tokenizer),
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen3ForCausalLM(config).eval()


class Listening:
    """Remembers what an engine was asked and said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard: list[tuple[tuple[int, ...], Completion]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self.engine.generate(ids, sampling)
        self.heard.append((tuple(ids), completion))
        return completion

    async def load(self, ref: Any) -> None:
        raise NotImplementedError


async def rolled(engine: Engine, gateway: Gateway, seed: int) -> Rollout:
    """One rollout: two turns, the second one again, one on an edited history, and one after that."""
    sampling = Sampling(9, stop=chat().stop)
    recorder = Dialogues(
        engine, chat(), task=TASK, seed=seed, budget=Budget(30, 400), sampling=sampling, note=seed % 2 > 0
    )
    guest = Guest(recorder, (), seed)
    with gateway.opened(guest) as url:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:

            async def said(*messages: dict[str, Any]) -> dict[str, Any]:
                body = {"model": "policy", "messages": [SYSTEM, USER, *messages]}
                reply = (await http.post(f"{url}/v1/chat/completions", json=body)).json()["choices"][0]["message"]
                return {"role": "assistant", "content": reply["content"] or ""}

            first = await said()
            for _ in range(2):
                await said(first, AND)
            edited = {"role": "assistant", "content": "Edited."}
            await said(edited, AND, await said(edited, AND), AND)
    return replace(guest.rollout("", "answered"), reward=Reward({"perf": seed / 7}, {"perf": 1.0}))


async def rollouts(engine: Engine) -> list[Rollout]:
    made: dict[int, Rollout] = {}

    async def one(gateway: Gateway, seed: int) -> None:
        made[seed] = await rolled(engine, gateway, seed)

    async with serving(Gateway()) as gateway, trio.open_nursery() as nursery:
        for seed in range(6):
            nursery.start_soon(one, gateway, seed)
    return [made[seed] for seed in sorted(made)]


@pytest.mark.slow
def test_an_update_on_rollouts_of_the_gateway_begins_with_ratio_one_and_no_kl_and_trains_what_was_sampled() -> None:
    policy = model()

    async def heard() -> tuple[list[Rollout], list[tuple[tuple[int, ...], Completion]]]:
        async with EmbeddedEngine(policy, max_len=512, cache_bytes=1 << 22) as engine:
            listening = Listening(engine)
            return await rollouts(listening), listening.heard

    made, told = trio.run(heard)
    assert [[s.opened_by for s in r.trace.segments] for r in made] == [["start", "fork", "compaction"]] * 6
    asked = {c.ids + c.logprobs: ids for ids, c in told}
    for r in made:
        for segment in r.trace.segments:
            before: tuple[int, ...] = ()
            for span in segment.spans:
                if span.kind == "sampled":
                    assert asked.pop(span.ids + span.logprobs) == before
                before += span.ids
    assert not asked
    still = PPOConfig(
        lr=1e-12,
        critic_lr=1e-12,
        critic=CriticConfig(warmup_updates=0),
        optimizer=OptimizerConfig(max_grad_norm=1e9),
        minibatches=1,
    )
    batch = collect(made)
    assert len(batch) == sum(len(c.ids) for _, c in told)
    metrics = Learner(policy, still).update(batch)
    assert metrics.policy is not None
    assert metrics.drift_max < 1e-5
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics.policy.approx_kl) < 1e-5
