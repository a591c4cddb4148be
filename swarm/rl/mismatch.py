"""Engine and learner compute the same probabilities differently: corrections for it, and a monitor of it.

    tis             min(ρ, high)
    mis_token       ρ where it is in [low, high], else 0
    mis_sequence    the same with the product of ρ over the sequence
    mis_geometric   the same with the geometric mean of ρ over the sequence
    icepop          ρ where it is in [low, high], else 0, on the clipped loss, as mis_token, but without veto

ρ = π_old / π_rollout, both of the weights that sampled: the first is the learner's own. A sequence is a segment.
A token that gets 0 still counts in the divisor of the loss, or the step would grow with the rejections.
Not here: staleness of weights (`swarm.rl.batch`). Axes: N action tokens, S segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from swarm.checks import want
from swarm.rl.losses import k3, log_ratio
from swarm.rl.surrogate import SurrogateConfig

_want = partial(want, "mismatch")

Kind = Literal["none", "tis", "mis_token", "mis_sequence", "mis_geometric", "icepop"]


@dataclass(frozen=True, slots=True)
class MismatchConfig:
    """`MismatchConfig("icepop", low=0.5, high=2.0)`.

    `veto` (mis kinds): a segment with any ρ below it is rejected as a whole. tis reads `high` alone.
    Defaults are those of slime's MIS and of IcePop (β = 2).
    """

    kind: Kind = "none"
    low: float = 0.5
    high: float = 2.0
    veto: float | None = None

    def __post_init__(self) -> None:
        _want("kind", self.kind, self.kind in get_args(Kind), f"one of {', '.join(get_args(Kind))}")
        _want("low", self.low, 0 <= self.low < 1, "from 0 to below 1")
        _want("high", self.high, 1 < self.high < math.inf, "a finite number above 1")
        mis = self.kind.startswith("mis")
        wanted = "None or between 0 and low" if mis else f"None with kind = {self.kind!r}"
        _want("veto", self.veto, self.veto is None or (mis and 0 < self.veto < self.low), wanted)


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """When the monitor warns: mean and largest |difference| in nats, share of ratios outside [0.9, 1.1]."""

    warn_mean: float = 0.02
    warn_max: float = 1.0
    warn_outside: float = 0.05

    def __post_init__(self) -> None:
        for name, x in (("warn_mean", self.warn_mean), ("warn_max", self.warn_max)):
            _want(f"drift {name}", x, x > 0, "above 0")
        _want("drift warn_outside", self.warn_outside, 0 < self.warn_outside <= 1, "above 0 to 1")


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the learner's log-probabilities are from the sampler's: mean and largest |difference| (nats),
    k3 of the sampler against the learner, share of ratios outside [0.9, 1.1]."""

    mean: float
    max: float
    kl: float
    outside: float


def refuse_double(surrogate: SurrogateConfig, mismatch: MismatchConfig, old_logprobs: str) -> None:
    """Raises ValueError where the same mismatch would be corrected twice, or what a correction needs is not there."""
    kind, correction = surrogate.kind, mismatch.kind
    if kind != "ppo" and correction != "none":
        raise ValueError(
            f"mismatch: kind = {correction!r} with surrogate kind = {kind!r}, want 'none': "
            f"{kind} corrects the same mismatch itself"
        )
    wanted = {"dis": "rollout", "k2.5": "rollout", "decoupled": "recompute"}.get(kind)
    if wanted and old_logprobs != wanted:
        raise ValueError(f"ppo: old_logprobs = {old_logprobs!r} with surrogate kind = {kind!r}, want {wanted!r}")
    if correction != "none" and old_logprobs != "recompute":
        raise ValueError(
            f"ppo: old_logprobs = {old_logprobs!r} with mismatch kind = {correction!r}, want 'recompute': "
            "the ratio to the rollout's log-probabilities holds the mismatch already"
        )


def weights_of(config: MismatchConfig, logp_old_N: Tensor, logp_rollout_N: Tensor, segment_N: Tensor) -> Tensor:
    """What multiplies each token's loss [N], without gradient; 1 for kind "none".

    Sources: TIS, "Your efficient RL framework secretly brings you off-policy RL training" (2025), C = 2; MIS, slime
    and TRL; IcePop, Ring-1T and GLM-5 (arXiv 2602.15763, eq. 1).
    """
    if config.kind == "none":
        return torch.ones_like(logp_old_N)
    log_N = log_ratio(logp_old_N, logp_rollout_N).detach()
    ratio_N = log_N.exp()
    if config.kind == "tis":
        return ratio_N.clamp(max=config.high)
    count_S = torch.bincount(segment_N, minlength=1).to(log_N.dtype)
    sum_S = torch.zeros_like(count_S).index_add_(0, segment_N, log_N)
    if config.kind == "mis_sequence":
        ratio_N = log_ratio(sum_S, torch.zeros_like(sum_S)).exp()[segment_N]
    elif config.kind == "mis_geometric":
        ratio_N = (sum_S / count_S.clamp(min=1)).exp()[segment_N]
    kept_N = (ratio_N >= config.low) & (ratio_N <= config.high)
    if config.veto is not None:
        vetoed_S = torch.zeros_like(count_S).index_add_(0, segment_N, (log_N.exp() < config.veto).to(log_N.dtype)) > 0
        kept_N = kept_N & ~vetoed_S[segment_N]
    return torch.where(kept_N, ratio_N, 0.0)


def drift(logp_learner_N: Tensor, logp_rollout_N: Tensor) -> Drift:
    """The drift of some tokens of the same weights; all zero where there are none."""
    if len(logp_learner_N) == 0:
        return Drift(0.0, 0.0, 0.0, 0.0)
    gap_N = (logp_learner_N - logp_rollout_N).double()
    outside_N = (gap_N.exp() - 1).abs() > 0.1
    kl = float(k3(logp_rollout_N.double(), logp_learner_N.double()).mean())
    return Drift(float(gap_N.abs().mean()), float(gap_N.abs().max()), kl, float(outside_N.double().mean()))


def warning(seen: Drift, config: DriftConfig, staleness: int = 0) -> str:
    """One line with the numbers where the drift is above a bound, else "".

    Of tokens that earlier weights sampled the drift has the updates since in it: the line says how many.
    """
    if seen.mean <= config.warn_mean and seen.max <= config.warn_max and seen.outside <= config.warn_outside:
        return ""
    return (
        f"drift between engine and learner: mean {seen.mean:.4f} nats (bound {config.warn_mean:g}), "
        f"max {seen.max:.3f} ({config.warn_max:g}), "
        f"{seen.outside:.1%} of ratios outside [0.9, 1.1] ({config.warn_outside:.0%})"
        + (f", the oldest tokens {staleness} updates behind" if staleness else "")
    )
