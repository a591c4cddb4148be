"""What a PPO update is told, and what it tells: its settings and its measurements.

Not here: the update itself (`swarm.rl.learner`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.rl.schedule import Decay, LrSchedule

OldLogprobs = Literal["rollout", "recompute"]


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """`PPOConfig(lr=2e-4)`. The defaults suit a model of about a million parameters.

    `lr` is the policy's. Both rates rise over `lr_warmup` optimizer steps of their own, and, unless `lr_decay`
    is constant, fall to `lr_floor` of themselves at step `lr_steps`.

    `warmup_updates` first updates train the critic alone, `warmup_critic_epochs` passes each;
    after that it makes `critic_epochs` passes an update and the policy `epochs`. A pass is `minibatches`
    optimizer steps, split by rollout. `micro_tokens` bounds the padded tokens in one forward.
    `old_logprobs`: π_old is what the sampler said, or is computed again before the first step.
    `critic_layers`: how many of the policy's layers the critic takes over, all if None.
    `temperature` is the sampler's. `entropy_coef` and `kl_coef` (k3 to a reference) are off at 0.
    """

    lr: float = 3e-4
    critic_lr: float = 1e-3
    lr_warmup: int = 0
    lr_decay: Decay = "constant"
    lr_steps: int = 0
    lr_floor: float = 0.0
    gamma: float = 1.0
    lam_policy: float = 1.0
    lam_critic: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    value_clip: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    temperature: float = 1.0
    old_logprobs: OldLogprobs = "rollout"
    epochs: int = 1
    minibatches: int = 4
    critic_layers: int | None = 2
    critic_epochs: int = 1
    warmup_updates: int = 2
    warmup_critic_epochs: int = 2
    micro_tokens: int = 4096
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("gamma", "lam_policy", "lam_critic"):
            _want(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("epochs", "minibatches", "critic_epochs", "warmup_critic_epochs", "micro_tokens"):
            _want(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _want("critic_layers", self.critic_layers, self.critic_layers is None or self.critic_layers >= 1,
              "None or at least 1")  # fmt: skip
        for name in ("entropy_coef", "kl_coef", "weight_decay", "warmup_updates"):
            _want(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a finite number of at least 0")
        for name in ("temperature", "max_grad_norm"):
            _want(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "a finite number above 0")
        _want("clip_low", self.clip_low, 0 < self.clip_low < 1, "above 0 and below 1")
        _want("clip_high", self.clip_high, self.clip_low <= self.clip_high < math.inf, f"at least {self.clip_low}")
        _want("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
              "None or above 1 + clip_high")  # fmt: skip
        _want("value_clip", self.value_clip, self.value_clip is None or self.value_clip > 0, "None or above 0")
        _want("old_logprobs", self.old_logprobs, self.old_logprobs in ("rollout", "recompute"),
              "'rollout' or 'recompute'")  # fmt: skip
        for peak in (self.lr, self.critic_lr):
            self.schedule(peak)

    def schedule(self, peak: float) -> LrSchedule:
        """The schedule of a network whose highest rate is `peak`."""
        return LrSchedule(peak, self.lr_warmup, self.lr_steps, self.lr_decay, self.lr_floor)


def _want(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ValueError(f"ppo: {name} = {value!r}, want {wanted}")


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Means over the action tokens of all passes. `approx_kl` is k3 of π_old against π; `clip_fraction` the
    share of tokens whose gradient the clip stops."""

    loss: float
    clip_fraction: float
    approx_kl: float
    ratio_mean: float
    ratio_max: float
    entropy: float
    kl_reference: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """One update. `policy` is None when only the critic was trained.

    `explained_variance` is that of the values which the advantages were made of. `drift_*`: the absolute
    difference, in nats, between the sampler's log-probabilities and the learner's own before its
    first step. `left_out` counts rollouts by kind. `skipped` and the steps are totals since the start.
    """

    tokens: int
    rollouts: int
    left_out: Mapping[str, int]
    reward: float
    value_loss: float
    explained_variance: float
    critic_grad_norm: float
    critic_lr: float
    drift_mean: float
    drift_max: float
    policy_steps: int
    critic_steps: int
    skipped: int
    policy: PolicyMetrics | None
