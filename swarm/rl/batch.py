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

import torch
from torch import Tensor

from swarm.rl.ppo import Truncated
from swarm.rl.rows import Rows, rows_of
from swarm.types import Rollout, Segment, Span


@dataclass(frozen=True, slots=True)
class Batch:
    """Action tokens of R rollouts and the rows that hold them.

    `logp_rollout_N` are the sampler's log-probabilities (nats), `version_N` the weights that it had. `turn_N`
    counts a rollout's turns from 0, `steps_N` has the critical steps of the token's turn (None where a ledger
    has not one stage a turn). `reward_R` arrives on a rollout's last action token. `cut_row_R` is the row at whose
    end a truncated rollout is bootstrapped, -1 for one that terminated. Rollouts of one task share a `group_R`;
    `domains` are their tasks'. `kept_R` are their places among all rollouts, left out ones included.
    """

    rows: Rows
    logp_rollout_N: Tensor
    version_N: Tensor
    rollout_N: Tensor
    segment_N: Tensor
    turn_N: Tensor
    steps_N: Tensor | None
    rollout_S: Tensor
    reward_R: Tensor
    cut_row_R: Tensor
    group_R: Tensor
    kept_R: Tensor
    domains: tuple[str, ...]
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.logp_rollout_N)

    def to(self, device: torch.device) -> Batch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, rows=self.rows.to(device), **tensors)


def collect(rollouts: Sequence[Rollout], truncated: Truncated = "bootstrap", oldest: int | None = None) -> Batch:
    """The trainable action tokens of the rollouts, float32 and int64 on the CPU.

    Left out and counted: `failed` (infrastructure, anywhere in the tree), `running`, `truncated` (when so
    asked), `unrewarded`, `no_action`, `stale` (a token of a version before `oldest`; GLM-5, arXiv 2602.15763,
    drops whole rollouts). Raises ValueError on a reward or a log-probability that is not finite.
    """
    kinds = [_left_out(r, truncated, oldest) for r in rollouts]
    kept = [r for r, kind in zip(rollouts, kinds, strict=True) if not kind]
    segments = [s for r in kept for s in r.trace.segments]
    rows = rows_of(segments)
    per_R = torch.tensor([len(r.trace.segments) for r in kept], dtype=torch.long)
    rollout_S = torch.arange(len(kept)).repeat_interleave(per_R)
    cut_R = torch.tensor([r.trace.status == "truncated" for r in kept], dtype=torch.bool)
    batch = Batch(
        rows=rows,
        logp_rollout_N=torch.tensor([x for s in _sampled(segments) for x in s.logprobs], dtype=torch.float32),
        version_N=torch.tensor([s.version for s in _sampled(segments) for _ in s.ids], dtype=torch.long),
        rollout_N=rollout_S.repeat_interleave(rows.actions_S),
        segment_N=torch.arange(len(segments)).repeat_interleave(rows.actions_S),
        turn_N=torch.tensor([t for r in kept for t in turns_of(r.trace.segments)], dtype=torch.long),
        steps_N=_steps(kept),
        rollout_S=rollout_S,
        reward_R=torch.tensor([_reward(r) for r in kept], dtype=torch.float32),
        cut_row_R=torch.where(cut_R, per_R.cumsum(0) - 1, -1),
        group_R=_groups([r.task.id for r in kept]),
        kept_R=torch.tensor([k for k, kind in enumerate(kinds) if not kind], dtype=torch.long),
        domains=tuple(r.task.domain for r in kept),
        left_out=dict(Counter(kind for kind in kinds if kind)),
    )
    if not bool(batch.logp_rollout_N.isfinite().all()):
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


def _steps(rollouts: Sequence[Rollout]) -> Tensor | None:
    """The critical steps of every action token's turn, float32, or None."""
    steps: list[int] = []
    for r in rollouts:
        turns, stages = turns_of(r.trace.segments), r.ledger.stages
        if turns and turns[-1] + 1 != len(stages):
            return None
        steps.extend(stages[t].critical_steps for t in turns)
    return torch.tensor(steps, dtype=torch.float32)


def _groups(task_ids: Sequence[str]) -> Tensor:
    index = {task: g for g, task in enumerate(dict.fromkeys(task_ids))}
    return torch.tensor([index[task] for task in task_ids], dtype=torch.long)


def _left_out(rollout: Rollout, truncated: Truncated, oldest: int | None) -> str:
    status = rollout.trace.status
    if rollout.failed:
        return "failed"
    if status == "running" or (status == "truncated" and truncated == "leave_out"):
        return status
    if rollout.reward is None and status != "truncated":
        return "unrewarded"
    versions = [s.version for s in _sampled(rollout.trace.segments) if s.ids]
    if not versions:
        return "no_action"
    return "stale" if oldest is not None and min(versions) < oldest else ""


def _reward(rollout: Rollout) -> float:
    # The end at which a reward is given was not reached; the bootstrapped value stands for it.
    if rollout.reward is None or rollout.trace.status == "truncated":
        return 0.0
    if not math.isfinite(rollout.reward.total):
        raise ValueError(f"task {rollout.task.id}: reward = {rollout.reward.total}, want a finite number")
    return rollout.reward.total
