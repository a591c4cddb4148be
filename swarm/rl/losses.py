"""Losses and whitening as pure functions on flat action tokens.

Each loss gives one number a token; `mean_over` divides their sum by ONE count, which the caller takes
over all micro-batches and processes of the optimizer step (never a mean of means: arXiv 2503.14476,
section 3.3). Not here: models, shifts, masks. Axes: N action tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from swarm.checks import want

_want = partial(want, "kl")

_MAX_LOG_RATIO = 20.0  # exp(20) is still finite in float32, with room for a product


def same(x: Tensor) -> Tensor:
    """The reduction over processes when there is one process."""
    return x


def log_ratio(logp_N: Tensor, logp_old_N: Tensor) -> Tensor:
    """log(π/π_old) [N], clamped to ±20."""
    return (logp_N - logp_old_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def value_loss(value_N: Tensor, value_old_N: Tensor, target_N: Tensor, clip: float | None = 0.2) -> Tensor:
    """½ max((V−G)², (V_old + clip(V−V_old, ±ε) − G)²) [N]; without `clip`, ½ (V−G)².

    Source: the reference implementation of PPO (openai/baselines, ppo2).
    """
    loss_N = (value_N - target_N) ** 2
    if clip is not None:
        near_N = value_old_N + (value_N - value_old_N).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, (near_N - target_N) ** 2)
    return 0.5 * loss_N


Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class KLConfig:
    """`KLConfig(coef=0.01)`: a price on leaving a frozen reference, off at 0.

    `where`: "reward" takes coef·k off each token's reward before the advantages, "loss" adds it to the loss.
    In the loss the estimator is differentiated: on policy k2 gives the gradient of the KL, k3 that of the
    forward KL near it, and k1 the score, whose mean is zero whatever the policy, so that it is refused there.
    """

    coef: float = 0.0
    estimator: Estimator = "k2"
    where: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        _want("coef", self.coef, 0 <= self.coef < math.inf, "a finite number of at least 0")
        _want("estimator", self.estimator, self.estimator in get_args(Estimator), "'k1', 'k2' or 'k3'")
        _want("where", self.where, self.where in ("loss", "reward"), "'loss' or 'reward'")
        _want("estimator", self.estimator, self.where == "reward" or self.estimator != "k1",
              "'k2' or 'k3' with where = 'loss', where the gradient of k1 has mean zero")  # fmt: skip


def kl(estimator: Estimator, logp_N: Tensor, logp_other_N: Tensor) -> Tensor:
    """An estimate [N] of KL(π ‖ other) on tokens sampled from π, in nats: k1 = x, k2 = x²/2, k3 = e^{−x} − 1 + x
    with x = log π − log other.

    k1 and k3 are unbiased, k2 and k3 never negative. Source: Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k3":
        return k3(logp_N, logp_other_N)
    x_N = log_ratio(logp_N, logp_other_N)
    return x_N if estimator == "k1" else 0.5 * x_N**2


def k3(logp_N: Tensor, logp_other_N: Tensor) -> Tensor:
    """e^{−x} − 1 + x [N], x = log π − log other: see `kl`."""
    x_N = log_ratio(logp_N, logp_other_N)
    return torch.expm1(-x_N) + x_N


def entropy(logp_NV: Tensor) -> Tensor:
    """−Σ p log p [N] in nats, of log-probabilities [N, V] over a whole vocabulary."""
    return -(logp_NV.exp() * logp_NV).sum(-1)


def mean_over(x_N: Tensor, count: int | Tensor) -> Tensor:
    """Σx / count, where `count` is that of all action tokens of the optimizer step, everywhere."""
    return x_N.sum() / count


def whiten(x_N: Tensor, reduce: Callable[[Tensor], Tensor] = same) -> Tensor:
    """(x − μ) / √(σ² + 1e-8) [N] with μ, σ² over all tokens of all processes; `reduce` sums over processes.

    Two passes: E[x²] − E[x]² loses every digit of a small variance beside a large mean.
    """
    count = reduce(torch.tensor(float(len(x_N)), dtype=torch.float64, device=x_N.device)).clamp(min=1.0)
    centred_N = x_N.double() - reduce(x_N.double().sum()) / count
    variance = reduce((centred_N**2).sum()) / count
    return centred_N / (variance + 1e-8).sqrt()


def explained_variance(value_N: Tensor, target_N: Tensor, reduce: Callable[[Tensor], Tensor] = same) -> float:
    """1 − Var(G − V) / Var(G), over all processes; 0.0 where the targets do not vary."""
    count = reduce(torch.tensor(float(len(value_N)), dtype=torch.float64, device=value_N.device)).clamp(min=1.0)

    def variance(x_N: Tensor) -> float:
        centred_N = x_N - reduce(x_N.sum()) / count
        return float(reduce((centred_N**2).sum()) / count)

    total = variance(target_N.double())
    return 1.0 - variance(target_N.double() - value_N.double()) / total if total > 0 else 0.0
