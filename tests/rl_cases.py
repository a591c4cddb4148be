"""Small rollouts and a tiny model for the tests of `swarm.rl`. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.rl.batch import Batch
from swarm.rl.forward import chosen, hidden_states, log_policy
from swarm.rl.rows import micro_batches
from swarm.types import Ledger, Reward, Rollout, Segment, Span, Status, Task, Trace

VOCAB = 40
TASK = Task("t", "question", "subject", "airport", ("name",), ())


def tiny(seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 of two layers in fp32, with weights large enough for uneven distributions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config)


def prompt(*ids: int) -> Span:
    return Span("prompt", ids)


def seen(*ids: int) -> Span:
    return Span("observed", ids)


def said(*ids: int, logprob: float = -1.0, version: int = 0) -> Span:
    return Span("sampled", ids, (logprob,) * len(ids), version)


def rollout(*segments: Sequence[Span], reward: float | None = 1.0, status: Status = "answered") -> Rollout:
    opened = ["start"] + ["compaction"] * (len(segments) - 1)
    made = tuple(Segment(tuple(s), o) for s, o in zip(segments, opened, strict=True))  # type: ignore[arg-type]
    value = None if reward is None else Reward({"perf": reward}, {"perf": 1.0})
    return Rollout(TASK, Trace("main", made, status), Ledger(), reward=value)


def some_rollouts(count: int, seed: int = 0) -> list[Rollout]:
    """Rollouts of uneven lengths, of one to three turns and one or two segments, with random ids and rewards."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=g))
        return torch.randint(0, VOCAB, (n,), generator=g).tolist()

    def segment() -> list[Span]:
        spans = [prompt(*ids(2, 6))]
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            spans += [said(*ids(1, 5)), seen(*ids(1, 7))]
        return spans

    return [
        rollout(*[segment() for _ in range(1 + k % 2)], reward=float(torch.rand(1, generator=g))) for k in range(count)
    ]


def logprobs(model: Qwen3ForCausalLM, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """What the model itself says of every action token [N], one row at a time."""
    out_N = torch.zeros(len(batch))
    with torch.no_grad():
        for micro in micro_batches(batch.rows, torch.arange(len(batch.rows)), 1):
            h_nd = hidden_states(model, micro)
            out_N[micro.index_n] = chosen(log_policy(model, h_nd, temperature), micro.target_n)
    return out_N


def on_policy(model: Qwen3ForCausalLM, batch: Batch) -> Batch:
    """The batch as if the model had sampled it."""
    return replace(batch, logp_rollout_N=logprobs(model, batch))
