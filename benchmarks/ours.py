# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Our update and its bounds, measured in a process of their own: `python -m benchmarks.ours ours a fp32 2 3`.

ours    the policy's part of `Learner.update`: log-probabilities computed again, forward and backward with the
        loss and what is measured of it, two AdamW steps. The critic's part is measured beside it.
bare    our trunk alone, read at the same positions: a forward, then forward and backward, no head, no loss
bound   the same of the plain packed forward, operation by operation, at every position

Not here: TRL (`benchmarks.trl_grpo`), the comparison (`benchmarks.update`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.process import Time, lists, measure, now, peak_mb
from benchmarks.workload import model_config, sequences
from swarm.engine.qwen3 import hidden, shape_of, weights_of
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.batch import Batch, collect
from swarm.rl.critic import CriticConfig
from swarm.rl.forward import hidden_states
from swarm.rl.learner import Learner
from swarm.rl.ppo import PPOConfig
from swarm.rl.rows import MicroBatch, micro_batches
from swarm.types import Ledger, Reward, Rollout, Segment, Span, Task, Trace

MICRO_TOKENS = 4096
OPTIMIZER_STEPS = 2


def model_of(name: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(model_config(name)).eval()


def rollouts() -> list[Rollout]:
    made: list[Rollout] = []
    for k, sequence in enumerate(sequences()):
        spans: list[Span] = []
        at = 0
        while at < len(sequence.ids):
            end = at
            while end < len(sequence.ids) and sequence.sampled[end] == sequence.sampled[at]:
                end += 1
            ids = sequence.ids[at:end]
            spans.append(Span("sampled", ids, (-6.9,) * len(ids)) if sequence.sampled[at] else Span("observed", ids))
            at = end
        spans[0] = Span("prompt", spans[0].ids)
        reward = Reward({"perf": k % 5 / 4}, {"perf": 1.0})
        task = Task(f"t{k // 8}", "question", "subject", "airport", ("name",), ())
        made.append(
            Rollout(task, Trace("main", (Segment(tuple(spans), "start"),), "answered"), Ledger(), reward=reward)
        )
    return made


def timed(f: Callable[[], Any]) -> Time:
    began = now()
    f()
    return now() - began


def all_micro_batches(batch: Batch) -> list[MicroBatch]:
    return micro_batches(batch.rows, torch.arange(len(batch.rows)), MICRO_TOKENS)


def ours(model: str, bf16: bool, repeats: int) -> dict[str, Any]:
    """With a group's baseline there is no critic; what one would add is the difference to an update with one."""
    plain = PPOConfig(
        advantage=AdvantageConfig(form="grpo"), truncated="leave_out", old_logprobs="recompute",
        minibatches=OPTIMIZER_STEPS, micro_tokens=MICRO_TOKENS, bf16=bf16,
    )  # fmt: skip
    critical = replace(plain, advantage=AdvantageConfig(), critic=CriticConfig(warmup_updates=0))
    batch = collect(rollouts())
    learner = Learner(model_of(model), plain)
    alone = [timed(lambda: learner.update(batch)) for _ in range(repeats + 1)][1:]
    peak = peak_mb()
    learner = Learner(model_of(model), critical)
    more = [timed(lambda: learner.update(batch)) for _ in range(repeats + 1)][1:]
    # The peak before there was a critic.
    critic = median(t.cpu for t in more) - median(t.cpu for t in alone)
    return {**lists(alone), "critic_cpu_seconds": [critic], "peak_mb": peak}


def trunk(f: Callable[[MicroBatch], torch.Tensor], repeats: int) -> dict[str, list[float]]:
    micros = all_micro_batches(collect(rollouts()))

    def once() -> None:
        with torch.no_grad():
            for m in micros:
                f(m)
        for m in micros:
            f(m).sum().backward()

    return lists([timed(once) for _ in range(repeats + 1)][1:])


def bare(model: str, bf16: bool, repeats: int) -> dict[str, list[float]]:
    policy = model_of(model)
    return trunk(lambda m: hidden_states(policy, m, bf16), repeats)


def bound(model: str, bf16: bool, repeats: int) -> dict[str, list[float]]:
    policy = model_of(model)
    shape, weights = shape_of(policy.config), weights_of(policy)

    def plain(m: MicroBatch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return hidden(weights, shape, m.ids_T, m.lengths)

    return trunk(plain, repeats)


if __name__ == "__main__":
    measure({"ours": ours, "bare": bare, "bound": bound})
