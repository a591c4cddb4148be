# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What an update measured, as means over the action tokens of all processes, and the lines that warn.

Not here: what the numbers mean (`swarm.rl.ppo`). Axes: N action tokens, M those of all passes, K quantities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from swarm.rl.advantages import groups_of_one
from swarm.rl.batch import Batch
from swarm.rl.losses import explained_variance
from swarm.rl.mismatch import Drift, drift, warning
from swarm.rl.ppo import Metrics, PolicyMetrics
from swarm.rl.processes import largest, total
from swarm.rl.signals import Signals

if TYPE_CHECKING:
    from swarm.rl.learner import Learner

POLICY_TERMS = ("stopped", "approx_kl", "ratio", "entropy", "kl_reference", "kl_teacher", "value_loss")
"""What a policy pass measures of every token, after its loss."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What some passes measured: `x_KM`, K quantities on M action tokens (a token counts once a pass),
    and the mean gradient norm of the steps."""

    x_KM: Tensor
    grad_norm: float


def metrics_of(
    learner: Learner, batch: Batch, signals: Signals, first_N: Tensor, critic: Tally | None, policy: Tally | None
) -> Metrics:
    """The measurements of an update that has just made its passes, before it is counted."""
    at, config = learner.accelerator, learner.config
    known_N = ~first_N.isnan()
    drifted = _drift(at, first_N[known_N], batch.logp_rollout_N[known_N])
    lonely = 0 if config.advantage.critic else int(total(at, torch.tensor(groups_of_one(batch.group_R))))
    count = total(at, torch.tensor([len(batch), len(batch.reward_R)], device=first_N.device)).tolist()
    oldest = float(batch.version_N.min()) if len(batch) else float(learner.updates)
    staleness = int(largest(at, torch.tensor(learner.updates - oldest, device=first_N.device)))
    return Metrics(
        tokens=count[0],
        rollouts=count[1],
        left_out=batch.left_out,
        reward=_mean(at, batch.reward_R[None])[0],
        value_loss=_mean(at, critic.x_KM)[0] if critic else 0.0,
        explained_variance=explained_variance(signals.value_N, signals.target_N, lambda x: total(at, x)),
        critic_grad_norm=critic.grad_norm if critic else 0.0,
        critic_lr=learner.critic_stepper.lr,
        drift_mean=drifted.mean,
        drift_max=drifted.max,
        drift_kl=drifted.kl,
        drift_outside=drifted.outside,
        rejected=_mean(at, (signals.weight_N == 0).float()[None])[0],
        staleness=staleness,
        groups_of_one=lonely,
        policy_steps=learner.policy_stepper.steps,
        critic_steps=learner.critic_stepper.steps,
        skipped=learner.policy_stepper.skipped + learner.critic_stepper.skipped,
        policy=None if policy is None else _policy(learner, policy),
        alarms=tuple(line for line in (warning(drifted, config.drift, staleness), _lonely(lonely)) if line),
    )


def _policy(learner: Learner, tally: Tally) -> PolicyMetrics:
    at = learner.accelerator
    loss, stopped, approx_kl, ratio, entropy, kl_reference, kl_teacher, _ = _mean(at, tally.x_KM)
    return PolicyMetrics(
        loss=loss,
        stopped_fraction=stopped,
        approx_kl=approx_kl,
        ratio_mean=ratio,
        ratio_max=_max(at, tally.x_KM[3]),
        entropy=entropy,
        kl_reference=kl_reference,
        kl_teacher=kl_teacher,
        grad_norm=tally.grad_norm,
        lr=learner.policy_stepper.lr,
    )


def _drift(at: Accelerator, learner_N: Tensor, rollout_N: Tensor) -> Drift:
    """The drift over the tokens of all processes."""
    here = drift(learner_N, rollout_N)
    count = float(len(learner_N))
    sums = torch.tensor([count, count * here.mean, count * here.kl, count * here.outside], dtype=torch.float64)
    n, mean, kl, outside = total(at, sums.to(learner_N.device)).tolist()
    n = max(n, 1.0)
    return Drift(mean / n, float(largest(at, torch.tensor(here.max, device=learner_N.device))), kl / n, outside / n)


def _lonely(groups: int) -> str:
    return f"{groups} tasks have one rollout: their baseline is the rollout itself, nothing is learnt" if groups else ""


def _max(at: Accelerator, x_N: Tensor) -> float:
    return float(largest(at, x_N.max() if len(x_N) else torch.zeros((), device=x_N.device)))


def _mean(at: Accelerator, x_KN: Tensor) -> list[float]:
    """The means over the last axis, over all processes."""
    count = total(at, torch.tensor(float(x_KN.shape[-1]), device=x_KN.device))
    return (total(at, x_KN.double().sum(-1)) / count.clamp(min=1)).flatten().tolist()
