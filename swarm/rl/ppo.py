"""What a PPO update is told, and what it tells: its settings and its measurements.

Each part's settings stand with the part; here is what holds them together, and which go together.
Not here: the update itself (`swarm.rl.learner`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from swarm.checks import want
from swarm.rl.adapt import AdaptConfig
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.critic import CriticConfig
from swarm.rl.distill import DistillConfig
from swarm.rl.losses import KLConfig
from swarm.rl.mismatch import DriftConfig, MismatchConfig, refuse_double
from swarm.rl.optim import OptimizerConfig
from swarm.rl.schedule import Decay, LrSchedule
from swarm.rl.surrogate import SurrogateConfig

_want = partial(want, "ppo")

OldLogprobs = Literal["rollout", "recompute"]

Truncated = Literal["bootstrap", "leave_out"]
"""What is done with a rollout that was cut from outside. bootstrap: its reward is ignored, what would have
followed is estimated by the critic on the context at the cut; leave_out: it is not learnt from."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """`PPOConfig(lr=2e-4)`. The defaults suit a model of about a million parameters.

    `lr` is the policy's. Both rates rise over `lr_warmup` optimizer steps of their own, and, unless `lr_decay`
    is constant, fall to `lr_floor` of themselves at step `lr_steps`.

    After `critic.warmup_updates` updates of the critic alone, each makes `critic.epochs` passes of the critic
    and `epochs` of the policy. A pass is `minibatches` optimizer steps, split by rollout. `micro_tokens`
    bounds the tokens in one forward. `temperature` is the sampler's.
    `old_logprobs`: π_old is what the sampler said, or is computed again before the first step.
    `adapt`: what of the policy is trained; a critic of its own is trained as a whole whatever it is.
    `max_staleness`: how many updates the oldest token of a rollout may be behind; 0 collects and learns in turns.
    """

    lr: float = 3e-4
    critic_lr: float = 1e-3
    lr_warmup: int = 0
    lr_decay: Decay = "constant"
    lr_steps: int = 0
    lr_floor: float = 0.0
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    surrogate: SurrogateConfig = field(default_factory=SurrogateConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    entropy_coef: float = 0.0
    temperature: float = 1.0
    old_logprobs: OldLogprobs = "rollout"
    truncated: Truncated = "bootstrap"
    max_staleness: int = 0
    epochs: int = 1
    minibatches: int = 4
    micro_tokens: int = 4096
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "micro_tokens"):
            _want(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("entropy_coef", "max_staleness"):
            _want(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a finite number of at least 0")
        _want("temperature", self.temperature, 0 < self.temperature < math.inf, "a finite number above 0")
        _want("old_logprobs", self.old_logprobs, self.old_logprobs in ("rollout", "recompute"),
              "'rollout' or 'recompute'")  # fmt: skip
        _want("truncated", self.truncated, self.truncated in ("bootstrap", "leave_out"), "'bootstrap' or 'leave_out'")
        if not self.advantage.critic:
            # What would have followed a cut is what a critic estimates, and a baseline of a group does not.
            _want(f"truncated (with advantage.form = {self.advantage.form!r})", self.truncated,
                  self.truncated == "leave_out", "'leave_out'")  # fmt: skip
        refuse_double(self.surrogate, self.mismatch, self.old_logprobs)
        for peak in (self.lr, self.critic_lr):
            self.schedule(peak)

    def schedule(self, peak: float) -> LrSchedule:
        """The schedule of a network whose highest rate is `peak`."""
        return LrSchedule(peak, self.lr_warmup, self.lr_steps, self.lr_decay, self.lr_floor)


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Means over the action tokens of all passes. `approx_kl` is k3 of π_old against π; `stopped_fraction` the
    share of tokens whose gradient the clip or the mask stops; `kl_teacher` the KL to the teachers."""

    loss: float
    stopped_fraction: float
    approx_kl: float
    ratio_mean: float
    ratio_max: float
    entropy: float
    kl_reference: float
    kl_teacher: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """One update. `policy` is None when only the critic was trained.

    `explained_variance` is that of the values which the advantages were made of. `drift_*`: how far, in nats,
    the learner's own log-probabilities before its first step are from the sampler's, over the tokens of the first
    minibatch at least; `drift_outside` is the share of tokens whose ratio leaves [0.9, 1.1]. `staleness`: updates
    that the oldest token is behind. `left_out` counts rollouts by kind, `groups_of_one` tasks with one rollout where
    a baseline wants more, `rejected` the share of tokens that the mismatch correction leaves out.
    `skipped` and the steps are totals since the start; `alarms` are lines for whoever watches.
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
    drift_kl: float
    drift_outside: float
    rejected: float
    staleness: int
    groups_of_one: int
    policy_steps: int
    critic_steps: int
    skipped: int
    policy: PolicyMetrics | None
    alarms: tuple[str, ...] = ()
