"""The policy's loss a token, kind by kind: worked numbers, and gradients against their closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.rl.surrogate import SurrogateConfig, surrogate

PPO = SurrogateConfig()
DIS = SurrogateConfig("dis", clip_low=0.5, clip_high=1.0)
K25 = SurrogateConfig("k2.5", clip_low=0.5, clip_high=1.0, square_coef=0.1)
DECOUPLED = SurrogateConfig("decoupled")

log_ratios = st.lists(st.floats(-3, 3), min_size=1, max_size=6)
configs = st.sampled_from([PPO, SurrogateConfig(clip_high=0.28, dual_clip=None), DIS, K25, DECOUPLED])


def logs(*ratios: float) -> Tensor:
    """log π where π_old or π_rollout is 1."""
    return torch.tensor([math.log(x) for x in ratios], dtype=torch.float64)


def doubles(*xs: float) -> Tensor:
    return torch.tensor(xs, dtype=torch.float64)


def loss(config: SurrogateConfig, logp_N: Tensor, advantage_N: Tensor, **others: Tensor) -> Tensor:
    """The losses where whatever is not said is 1 with certainty."""
    zero_N = torch.zeros_like(logp_N)
    old_N, rollout_N = others.get("old_N", zero_N), others.get("rollout_N", zero_N)
    return surrogate(config, logp_N, old_N, advantage_N, rollout_N).loss_N


def slope(config: SurrogateConfig, logp_N: Tensor, advantage_N: Tensor, **others: Tensor) -> Tensor:
    """d loss / d log π of every token."""
    logp_N = logp_N.detach().clone().requires_grad_()
    (grad_N,) = torch.autograd.grad(loss(config, logp_N, advantage_N, **others).sum(), logp_N)
    return grad_N


def close(got: Tensor, want: Sequence[float]) -> None:
    assert got.tolist() == pytest.approx(list(want), abs=1e-12)


# --- ppo --------------------------------------------------------------------------------


def test_ppo_is_clipped_in_the_direction_of_the_advantage_and_bounded_by_the_dual_clip() -> None:
    # A = 2: −2·min(ρ, 1.2). A = −2: 2·max(ρ, .8), at most 2·3.
    close(loss(PPO, logs(1.5, 1.1, 0.5), doubles(2, 2, 2)), (-2.4, -2.2, -1.0))
    close(loss(PPO, logs(0.5, 1.5, 10.0), doubles(-2, -2, -2)), (1.6, 3.0, 6.0))


def test_the_ratio_of_ppo_is_to_the_old_policy_and_not_to_the_rollouts() -> None:
    # ρ = .3 / .25 = 1.2 exactly at the bound, whatever the sampler said.
    got = loss(PPO, logs(0.3), doubles(1.0), old_N=logs(0.25), rollout_N=logs(0.9))
    close(got, (-1.2,))


def test_the_slope_of_ppo_is_minus_ratio_times_advantage_where_it_is_not_stopped_and_zero_elsewhere() -> None:
    ratios, advantage_N = (1.5, 1.1, 0.5, 0.5, 1.5, 3.5), doubles(2, 2, 2, -2, -2, -2)
    close(slope(PPO, logs(*ratios), advantage_N), (0, -2.2, -1.0, 0, 3.0, 0))


@settings(max_examples=30)
@given(log_ratios, configs, st.integers(0, 99))
def test_what_is_said_to_be_stopped_has_no_gradient_in_the_advantage(
    log_N: list[float], config: SurrogateConfig, seed: int
) -> None:
    logp_N = torch.tensor(log_N, dtype=torch.float64)
    advantage_N = torch.randn(len(log_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zero_N = torch.zeros_like(logp_N)
    stopped_N = surrogate(config, logp_N, zero_N, advantage_N, zero_N).stopped_N
    # What the advantage adds to the slope: all of it but K2.5's square.
    part_N = slope(config, logp_N, advantage_N) - slope(config, logp_N, zero_N)
    assert (part_N == 0).tolist() == stopped_N.tolist()


@settings(max_examples=30)
@given(configs, st.integers(0, 99))
def test_on_policy_every_kind_has_the_plain_policy_gradient(config: SurrogateConfig, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logp_N, advantage_N = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    close(slope(config, logp_N, advantage_N, old_N=logp_N, rollout_N=logp_N), (-advantage_N).tolist())


# --- dis --------------------------------------------------------------------------------


def test_dis_is_a_masked_ratio_times_advantage_and_log_probability() -> None:
    # −f(ρ)·A·log π with log π = log ρ: ρ = ½ and 2 are on the bounds, which are not inside.
    config = SurrogateConfig("dis", clip_low=0.5, clip_high=1.0)
    got = loss(config, logs(0.8, 1.6, 0.5, 2.0, 4.0), doubles(3, -1, 3, 3, 3))
    close(got, (-0.8 * 3 * math.log(0.8), 1.6 * math.log(1.6), 0, 0, 0))


@settings(max_examples=30)
@given(log_ratios, st.integers(0, 99))
def test_the_gradient_of_dis_is_minus_mask_times_ratio_times_advantage(log_N: list[float], seed: int) -> None:
    rollout_N = torch.randn(len(log_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logp_N, advantage_N = rollout_N + torch.tensor(log_N, dtype=torch.float64), rollout_N.cos()
    ratio_N = (logp_N - rollout_N).exp()
    mask_N = (ratio_N > 0.5) & (ratio_N < 2.0)
    got = slope(DIS, logp_N, advantage_N, rollout_N=rollout_N)
    close(got, (-ratio_N * mask_N * advantage_N).tolist())


def test_the_mask_of_dis_does_not_look_at_the_sign_of_the_advantage() -> None:
    # Where ppo would still pull back: A < 0 far above the interval, A > 0 far below it.
    far_N, advantage_N = logs(2.5, 0.4), doubles(-1, 1)
    assert slope(DIS, far_N, advantage_N).tolist() == [0.0, 0.0]
    assert (slope(PPO, far_N, advantage_N) != 0).tolist() == [True, True]


def test_a_masked_token_of_no_probability_leaves_the_others_alone() -> None:
    logp_N, advantage_N, rollout_N = doubles(-math.inf, -1), doubles(1, 2), doubles(-1, -1)
    close(loss(DIS, logp_N, advantage_N, rollout_N=rollout_N), (0.0, 2.0))
    close(slope(DIS, logp_N, advantage_N, rollout_N=rollout_N), (0.0, -2.0))


def test_dis_does_not_read_the_old_policy() -> None:
    logp_N, advantage_N = logs(0.8, 1.6), doubles(1, 2)
    close(loss(DIS, logp_N, advantage_N, old_N=logs(9, 9)), loss(DIS, logp_N, advantage_N).tolist())


# --- k2.5 -------------------------------------------------------------------------------


def test_the_square_of_k25_acts_inside_and_outside_the_interval() -> None:
    # Inside, ρ = 1.5: as dis, + .1·ln² 1.5; outside, ρ = 4: .1·ln² 4 alone.
    got = loss(K25, logs(1.5, 4.0), doubles(2, 2))
    close(got, (-1.5 * 2 * math.log(1.5) + 0.1 * math.log(1.5) ** 2, 0.1 * math.log(4) ** 2))


def test_the_gradient_of_k25_is_that_of_dis_and_twice_tau_times_the_log_ratio_on_masked_tokens_too() -> None:
    # d τ x² = 2τx: at ρ = 4 it is .2·ln 4, and nothing else pulls there.
    close(slope(K25, logs(1.5, 4.0), doubles(2, -2)), (-1.5 * 2 + 0.2 * math.log(1.5), 0.2 * math.log(4)))


def test_the_square_of_k25_pulls_a_token_back_to_the_rollouts_policy_from_both_sides() -> None:
    got = slope(K25, logs(0.2, 5.0), doubles(0, 0))
    assert (got > 0).tolist() == [False, True]


def test_the_square_of_k25_goes_on_pulling_however_far_a_token_has_gone() -> None:
    # 2τx: .2·30 and .2·(−30)
    close(slope(K25, doubles(-1, -31), doubles(0, 0), rollout_N=doubles(-31, -1)), (6.0, -6.0))


# --- decoupled ----------------------------------------------------------------------------


def test_decoupled_clips_against_the_proximal_policy_and_weighs_by_its_distance_to_the_sampler() -> None:
    # w = .5/.25 = 2. ρ = .75/.5 = 1.5: −2·1.2·A = −2.4; ρ = .55/.5 = 1.1: −2·1.1 = −2.2.
    got = loss(DECOUPLED, logs(0.75, 0.55), doubles(1, 1), old_N=logs(0.5, 0.5), rollout_N=logs(0.25, 0.25))
    close(got, (-2.4, -2.2))


def test_the_weight_of_decoupled_can_be_capped_and_has_no_gradient() -> None:
    config = SurrogateConfig("decoupled", weight_cap=1.5)
    old_N, rollout_N = logs(0.5, 0.5), logs(0.25, 0.4).requires_grad_()
    # w = 2 and 1.25, capped at 1.5: slopes −1.5·ρ and −1.25·ρ at ρ = 1.1.
    close(slope(config, logs(0.55, 0.55), doubles(1, 1), old_N=old_N, rollout_N=rollout_N), (-1.65, -1.375))
    loss(config, logs(0.55, 0.55).requires_grad_(), doubles(1, 1), old_N=old_N, rollout_N=rollout_N).sum().backward()
    assert rollout_N.grad is None


def test_decoupled_is_ppo_where_the_sampler_is_the_proximal_policy() -> None:
    logp_N, advantage_N, old_N = logs(0.9, 0.2, 0.5), doubles(1, -1, 2), logs(0.5, 0.5, 0.5)
    got = loss(DECOUPLED, logp_N, advantage_N, old_N=old_N, rollout_N=old_N)
    close(got, loss(PPO, logp_N, advantage_N, old_N=old_N).tolist())


# --- far away, and settings ---------------------------------------------------------------


@pytest.mark.parametrize("config", [PPO, SurrogateConfig(dual_clip=None), DIS, K25, DECOUPLED])
def test_a_policy_that_is_far_away_gives_finite_losses_and_gradients(config: SurrogateConfig) -> None:
    logp_N, advantage_N = doubles(0, -1e4, 0, -1e4), doubles(1, 1, -1, -1)
    others = {"old_N": doubles(-1e4, 0, -1e4, 0), "rollout_N": doubles(-1e4, 0, -1e4, 0)}
    assert bool(loss(config, logp_N, advantage_N, **others).isfinite().all())
    assert bool(slope(config, logp_N, advantage_N, **others).isfinite().all())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "reinforce"}, "kind = 'reinforce', want one of ppo, dis, k2.5, decoupled"),
        ({"clip_low": 1.0}, "clip_low = 1.0, want above 0 and below 1"),
        ({"clip_low": 0.0}, "clip_low = 0.0, want above 0 and below 1"),
        ({"clip_low": 0.3, "clip_high": 0.2}, "clip_high = 0.2, want at least clip_low = 0.3"),
        ({"clip_high": math.inf}, "clip_high = inf, want at least clip_low = 0.2"),
        ({"clip_high": math.nan}, "clip_high = nan, want at least clip_low = 0.2"),
        ({"kind": "dis", "clip_high": 0.0}, "clip_high = 0.0, want a finite number above 0"),
        ({"dual_clip": 1.2}, "dual_clip = 1.2, want None or above 1 + clip_high = 1.2"),
        ({"square_coef": 0.1}, "square_coef = 0.1, want 0 with kind = 'ppo'"),
        ({"kind": "k2.5"}, "square_coef = 0.0, want a finite number above 0"),
        ({"weight_cap": 2.0}, "weight_cap = 2.0, want None with kind = 'ppo'"),
        ({"kind": "decoupled", "weight_cap": 0.0}, "weight_cap = 0.0, want None or above 0"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^surrogate: {line}".replace("+", r"\+")) as e:
        SurrogateConfig(**changes)
    assert "\n" not in str(e.value)


def test_the_wide_bounds_of_a_mask_may_lie_apart() -> None:
    # SAO: ratios from .7 to 6, and .2 to 4; and a mask may be narrower above than below.
    assert SurrogateConfig("dis", clip_low=0.3, clip_high=5.0).clip_high == 5.0
    assert SurrogateConfig("dis", clip_low=0.8, clip_high=3.0).clip_high == 3.0
    assert SurrogateConfig("dis", clip_low=0.5, clip_high=0.2).clip_low == 0.5
