"""Losses and whitening as pure functions on flat action tokens.

Each loss gives one number a token; `mean_over` divides their sum by ONE count, which the caller takes
over all micro-batches and processes of the optimizer step (never a mean of means: arXiv 2503.14476,
section 3.3). Not here: models, shifts, masks. Axes: N action tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # exp(20) is still finite in float32, with room for a product


def same(x: Tensor) -> Tensor:
    """The reduction over processes when there is one process."""
    return x


def log_ratio(logp_N: Tensor, logp_old_N: Tensor) -> Tensor:
    """log(π/π_old) [N], clamped to ±20."""
    return (logp_N - logp_old_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


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


def clipped(logp_N: Tensor, logp_old_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True [N] where the clip stops the gradient: the ratio has left the interval in A's direction."""
    ratio_N = log_ratio(logp_N, logp_old_N).exp()
    return torch.where(advantage_N >= 0, ratio_N > 1.0 + clip_high, ratio_N < 1.0 - clip_low)


def value_loss(value_N: Tensor, value_old_N: Tensor, target_N: Tensor, clip: float | None = 0.2) -> Tensor:
    """½ max((V−G)², (V_old + clip(V−V_old, ±ε) − G)²) [N]; without `clip`, ½ (V−G)².

    Source: the reference implementation of PPO (openai/baselines, ppo2).
    """
    loss_N = (value_N - target_N) ** 2
    if clip is not None:
        near_N = value_old_N + (value_N - value_old_N).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, (near_N - target_N) ** 2)
    return 0.5 * loss_N


def k3(logp_N: Tensor, logp_other_N: Tensor) -> Tensor:
    """An estimate [N] of KL(π ‖ other), at least 0: e^{−x} − 1 + x, x = log π − log other.

    Unbiased in value when the tokens were sampled from π. Source: Schulman, "Approximating KL
    divergence", 2020.
    """
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
