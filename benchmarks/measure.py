# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""One system's update, measured in a process of its own: `python -m benchmarks.measure ours a fp32 2 3`.

Prints one line of JSON: seconds of each repeat after one that warms up, and the peak of resident memory.

ours    the policy's part of `Learner.update`: log-probabilities computed again, forward and backward with the
        loss, two AdamW steps. The critic's part is measured beside it.
bare    our trunk alone, read at the same positions: a forward, then forward and backward, no head, no loss
bound   the same of the plain packed forward, operation by operation, at every position
trl     TRL's GRPOTrainer on injected rollouts, log-probabilities computed again, two AdamW steps

Not here: the comparison (`benchmarks.update`).
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.workload import model_config, sequences
from swarm.engine.qwen3 import hidden, shape_of, weights_of
from swarm.rl.batch import Batch, collect
from swarm.rl.forward import hidden_states, log_chosen
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
    task = Task("t", "question", "subject", "airport", ("name",), ())
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
        made.append(
            Rollout(task, Trace("main", (Segment(tuple(spans), "start"),), "answered"), Ledger(), reward=reward)
        )
    return made


def timed(f: Callable[[], Any]) -> float:
    began = perf_counter()
    f()
    return perf_counter() - began


def all_micro_batches(batch: Batch) -> list[MicroBatch]:
    return micro_batches(batch.rows, torch.arange(len(batch.rows)), MICRO_TOKENS)


def ours(model: str, bf16: bool, repeats: int) -> dict[str, list[float]]:
    """`update` is recompute + values + critic + policy; an update that only warms the critic is all but the last."""
    config = PPOConfig(
        old_logprobs="recompute", minibatches=OPTIMIZER_STEPS, micro_tokens=MICRO_TOKENS, bf16=bf16,
        warmup_updates=0, warmup_critic_epochs=1, epochs=1, critic_epochs=1,
    )  # fmt: skip
    warming = replace(config, warmup_updates=10**6)
    batch = collect(rollouts())
    whole, critic = Learner(model_of(model), config), Learner(model_of(model), warming)

    @torch.no_grad()
    def recompute() -> None:
        for m in all_micro_batches(batch):
            log_chosen(whole.policy, hidden_states(whole.policy, m, bf16), m.target_n)

    seconds: list[float] = []
    share: list[float] = []
    for _ in range(repeats + 1):
        update, warm, again = (timed(f) for f in (lambda: whole.update(batch), lambda: critic.update(batch), recompute))
        seconds.append(update - warm + again)
        share.append(warm - again)
    return {"seconds": seconds[1:], "critic_seconds": share[1:]}


def trunk(f: Callable[[MicroBatch], torch.Tensor], repeats: int) -> dict[str, list[float]]:
    micros = all_micro_batches(collect(rollouts()))

    def once() -> None:
        with torch.no_grad():
            for m in micros:
                f(m)
        for m in micros:
            f(m).sum().backward()

    return {"seconds": [timed(once) for _ in range(repeats + 1)][1:]}


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


def main(system: str, model: str, dtype: str, threads: str, repeats: str) -> None:
    torch.set_num_threads(int(threads))
    if system == "trl":
        from benchmarks.trl_grpo import trl as measured  # the only one that needs the extra
    else:
        measured = {"ours": ours, "bare": bare, "bound": bound}[system]
    found: dict[str, Any] = dict(measured(model, dtype == "bf16", int(repeats)))
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
