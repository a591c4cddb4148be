"""From rollouts to the flat action tokens that PPO learns from.

Only sampled spans of the root agent's segments are trainable: subagents are part of the environment.
Whatever cannot be learnt from is left out, and counted by kind. Not here: models and advantages.
Axes: R rollouts kept, S rows (segments), N action tokens in the order of rollouts, segments and ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from swarm.rl.rows import Rows, rows_of
from swarm.types import Rollout, Segment, Span

Truncated = Literal["bootstrap", "leave_out"]
"""What is done with a rollout that was cut from outside. bootstrap: its reward is ignored, what would have
followed is estimated by the critic on the context at the cut; leave_out: it is not learnt from."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Action tokens of R rollouts and the rows that hold them.

    `logp_old_N` are the sampler's log-probabilities (nats), `turn_N` counts a rollout's turns from 0.
    `reward_R` arrives on a rollout's last action token. `cut_row_R` is the row at whose end a truncated
    rollout is bootstrapped, -1 for one that terminated.
    """

    rows: Rows
    logp_old_N: Tensor
    version_N: Tensor
    rollout_N: Tensor
    segment_N: Tensor
    turn_N: Tensor
    rollout_S: Tensor
    reward_R: Tensor
    cut_row_R: Tensor
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.logp_old_N)

    def to(self, device: torch.device) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rows", "left_out")}
        return replace(self, rows=self.rows.to(device), **{name: x.to(device) for name, x in tensors.items()})


def collect(rollouts: Sequence[Rollout], truncated: Truncated = "bootstrap") -> Batch:
    """The trainable action tokens of the rollouts, float32 and int64 on the CPU.

    Left out and counted: `failed` (infrastructure, anywhere in the tree), `running`, `truncated` (when so
    asked), `unrewarded`, `no_action`. Raises ValueError on a reward or a log-probability that is not finite.
    """
    kinds = [_left_out(r, truncated) for r in rollouts]
    kept = [r for r, kind in zip(rollouts, kinds, strict=True) if not kind]
    segments = [s for r in kept for s in r.trace.segments]
    rows = rows_of(segments)
    per_R = torch.tensor([len(r.trace.segments) for r in kept], dtype=torch.long)
    rollout_S = torch.arange(len(kept)).repeat_interleave(per_R)
    cut_R = torch.tensor([r.trace.status == "truncated" for r in kept], dtype=torch.bool)
    batch = Batch(
        rows=rows,
        logp_old_N=torch.tensor([x for s in _sampled(segments) for x in s.logprobs], dtype=torch.float32),
        version_N=torch.tensor([s.version for s in _sampled(segments) for _ in s.ids], dtype=torch.long),
        rollout_N=rollout_S.repeat_interleave(rows.actions_S),
        segment_N=torch.arange(len(segments)).repeat_interleave(rows.actions_S),
        turn_N=torch.tensor([t for r in kept for t in turns_of(r.trace.segments)], dtype=torch.long),
        rollout_S=rollout_S,
        reward_R=torch.tensor([_reward(r) for r in kept], dtype=torch.float32),
        cut_row_R=torch.where(cut_R, per_R.cumsum(0) - 1, -1),
        left_out=dict(Counter(kind for kind in kinds if kind)),
    )
    if not bool(batch.logp_old_N.isfinite().all()):
        raise ValueError("a sampled token has a log-probability that is not finite, want the sampler's own")
    return batch


def turns_of(segments: Sequence[Segment]) -> list[int]:
    """The turn, from 0 through all segments, of each action token. Sampled spans that touch are one turn."""
    turns: list[int] = []
    turn = -1
    for segment in segments:
        before = ""
        for span in segment.spans:
            if span.kind == "sampled":
                turn += before != "sampled"
                turns.extend([turn] * len(span.ids))
            before = span.kind
    return turns


def _sampled(segments: Sequence[Segment]) -> Iterator[Span]:
    return (span for segment in segments for span in segment.spans if span.kind == "sampled")


def _left_out(rollout: Rollout, truncated: Truncated) -> str:
    status = rollout.trace.status
    if rollout.failed:
        return "failed"
    if status == "running" or (status == "truncated" and truncated == "leave_out"):
        return status
    if rollout.reward is None and status != "truncated":
        return "unrewarded"
    return "" if any(s.ids for s in _sampled(rollout.trace.segments)) else "no_action"


def _reward(rollout: Rollout) -> float:
    # The end at which a reward is given was not reached; the bootstrapped value stands for it.
    if rollout.reward is None or rollout.trace.status == "truncated":
        return 0.0
    if not math.isfinite(rollout.reward.total):
        raise ValueError(f"task {rollout.task.id}: reward = {rollout.reward.total}, want a finite number")
    return rollout.reward.total
