"""The policy's loss a token: four ways to hold a policy near the one that sampled, of which one is chosen.

    ppo         clip (clip-higher, dual-clip) against π_old
    decoupled   the same against a proximal policy, times how far that is from the sampler
    dis         double-sided mask on π/π_rollout, whatever the sign of the advantage
    k2.5        the same mask, and a squared log-ratio that acts on masked tokens too

Not here: what divides the sum (`swarm.rl.losses`), corrections of the engine's numerics (`swarm.rl.mismatch`).
Axes: N action tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from swarm.checks import want
from swarm.rl.losses import log_ratio

_want = partial(want, "surrogate")

Kind = Literal["ppo", "dis", "k2.5", "decoupled"]


@dataclass(frozen=True, slots=True)
class SurrogateConfig:
    """`SurrogateConfig(clip_high=0.28)`, `SurrogateConfig("dis", clip_low=0.8, clip_high=3.0)`.

    The interval of ratios is (1 − clip_low, 1 + clip_high): for ppo and decoupled it is where the gradient
    flows in A's direction, for dis and k2.5 the only place where it flows. SAO's wide bounds for dis (arXiv
    2607.07508) are clip_low = 0.3 and clip_high = 5 for mathematics, ratios from 0.7 to 6, and 0.8 and 3 for code,
    ratios from 0.2 to 4. Kimi K2.5 calls its bounds those of a log-ratio while its
    formula clips the ratio; they are bounds of the ratio here.
    `dual_clip` bounds the loss where A < 0 (ppo, decoupled). `square_coef` is K2.5's τ, `weight_cap` the most
    that a token of decoupled can weigh.
    """

    kind: Kind = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    square_coef: float = 0.0
    weight_cap: float | None = None

    def __post_init__(self) -> None:
        _want("kind", self.kind, self.kind in get_args(Kind), f"one of {', '.join(get_args(Kind))}")
        _want("clip_low", self.clip_low, 0 < self.clip_low < 1, "above 0 and below 1")
        if self.proximal:
            _want("clip_high", self.clip_high, self.clip_low <= self.clip_high < math.inf,
                  f"at least clip_low = {self.clip_low}")  # fmt: skip
            _want("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
                  f"None or above 1 + clip_high = {1 + self.clip_high}")  # fmt: skip
        _want("clip_high", self.clip_high, 0 < self.clip_high < math.inf, "a finite number above 0")
        squared = 0 < self.square_coef < math.inf if self.kind == "k2.5" else self.square_coef == 0
        _want("square_coef", self.square_coef, squared,
              "a finite number above 0" if self.kind == "k2.5" else f"0 with kind = {self.kind!r}")  # fmt: skip
        capped = self.weight_cap is None or (self.kind == "decoupled" and 0 < self.weight_cap < math.inf)
        _want("weight_cap", self.weight_cap, capped,
              "None or above 0" if self.kind == "decoupled" else f"None with kind = {self.kind!r}")  # fmt: skip

    @property
    def proximal(self) -> bool:
        """Whether it clips against π_old, in A's direction."""
        return self.kind in ("ppo", "decoupled")


@dataclass(frozen=True, slots=True)
class Surrogate:
    """`loss_N`, and where the advantage has no gradient: `stopped_N`."""

    loss_N: Tensor
    stopped_N: Tensor


def surrogate(
    config: SurrogateConfig, logp_N: Tensor, logp_old_N: Tensor, advantage_N: Tensor, logp_rollout_N: Tensor
) -> Surrogate:
    """The loss of every token, each [N].

    ppo: `ppo_loss` of ρ = π/π_old. decoupled: w · ppo_loss, w = π_old/π_rollout without gradient, π_old the
    learner's own before its first step (arXiv 2505.24298, eq. 5). dis: −f(ρ)·A·log π with ρ = π/π_rollout without
    gradient, f(ρ) = ρ inside the interval and 0 outside (GLM-5, arXiv 2602.15763, section 4.1.2, eq. 3–5).
    k2.5: −ρ·A inside the interval, and everywhere + τ (log ρ)² (Kimi K2.5, arXiv 2602.02276, eq. 1).
    """
    c = config
    if c.proximal:
        loss_N = ppo_loss(logp_N, logp_old_N, advantage_N, c.clip_low, c.clip_high, c.dual_clip)
        stopped_N = clipped(logp_N, logp_old_N, advantage_N, c.clip_low, c.clip_high, c.dual_clip)
        if c.kind == "decoupled":
            weight_N = log_ratio(logp_old_N, logp_rollout_N).exp().detach()
            loss_N = loss_N * (weight_N if c.weight_cap is None else weight_N.clamp(max=c.weight_cap))
        return Surrogate(loss_N, stopped_N)
    ratio_N = log_ratio(logp_N, logp_rollout_N).detach().exp()
    inside_N = (ratio_N > 1 - c.clip_low) & (ratio_N < 1 + c.clip_high)
    # The gradient of ρ·A is that of sg(ρ)·A·log π. Selected, not multiplied by 0, which −∞ would turn into NaN.
    loss_N = torch.where(inside_N, -ratio_N * advantage_N * logp_N, 0.0)
    if c.kind == "k2.5":
        # Without the bound of `log_ratio`, beyond which nothing would pull a token back.
        loss_N = loss_N + c.square_coef * (logp_N - logp_rollout_N) ** 2
    return Surrogate(loss_N, ~inside_N)


def ppo_loss(
    logp_N: Tensor,
    logp_old_N: Tensor,
    advantage_N: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Clipped surrogate [N]: max(−ρA, −A·clip(ρ, 1−ε_low, 1+ε_high)), ρ = π/π_old.

    Where A < 0 it is bounded by −cA, c = `dual_clip`. Sources: PPO, arXiv 1707.06347, eq. 7;
    dual-clip, arXiv 1912.09729, eq. 5; clip-higher, DAPO, arXiv 2503.14476, eq. 10.
    """
    ratio_N = log_ratio(logp_N, logp_old_N).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(-ratio_N * advantage_N, -clipped_N * advantage_N)
    if dual_clip is None:
        return loss_N
    return torch.where(advantage_N < 0, torch.minimum(loss_N, -dual_clip * advantage_N), loss_N)


def clipped(
    logp_N: Tensor,
    logp_old_N: Tensor,
    advantage_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """True [N] where `ppo_loss` has no gradient: the ratio has left the interval in A's direction, or,
    where A < 0, is above `dual_clip`."""
    ratio_N = log_ratio(logp_N, logp_old_N).exp()
    beyond_N = ratio_N < 1.0 - clip_low
    if dual_clip is not None:
        beyond_N = beyond_N | (ratio_N > dual_clip)
    return torch.where(advantage_N >= 0, ratio_N > 1.0 + clip_high, beyond_N)
