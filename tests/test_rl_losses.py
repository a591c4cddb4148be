"""Losses and whitening, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.rl.losses import Estimator, KLConfig, entropy, explained_variance, k3, kl, mean_over, value_loss, whiten
from swarm.rl.surrogate import clipped, ppo_loss


def ratios(*rho: float) -> Tensor:
    return torch.tensor([math.log(x) for x in rho], dtype=torch.float64)


def test_the_ppo_loss_is_clipped_in_the_direction_of_the_advantage_only() -> None:
    # A = 1: −min(ρ, 1.2); A = −1: max(ρ, .8)
    advantage_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    got = ppo_loss(ratios(1.5, 1.1, 0.5, 0.5, 1.5), torch.zeros(5), advantage_N)
    assert got.tolist() == pytest.approx([-1.2, -1.1, -0.5, 0.8, 1.5])


def test_clip_higher_leaves_more_room_above_than_below() -> None:
    got = ppo_loss(ratios(1.5, 0.5), torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert got.tolist() == pytest.approx([-1.28, 0.8])


def test_the_dual_clip_bounds_the_loss_of_a_bad_action_that_became_likely() -> None:
    # ρ = 10, A = −2: 20 unbounded, 3·2 with c = 3
    args = ratios(10.0), torch.zeros(1), torch.tensor([-2.0])
    assert ppo_loss(*args, dual_clip=None).tolist() == pytest.approx([20.0])
    assert ppo_loss(*args, dual_clip=3.0).tolist() == pytest.approx([6.0])


def test_clipped_says_where_the_gradient_is_zero() -> None:
    logp_N = ratios(1.5, 1.1, 0.5, 0.5, 1.5).requires_grad_()
    advantage_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    ppo_loss(logp_N, torch.zeros(5), advantage_N).sum().backward()
    assert logp_N.grad is not None
    stopped = clipped(logp_N.detach(), torch.zeros(5), advantage_N, 0.2, 0.2)
    assert stopped.tolist() == (logp_N.grad == 0).tolist() == [True, False, False, True, False]


def test_a_huge_log_ratio_stays_finite() -> None:
    loss_N = ppo_loss(torch.zeros(2), torch.tensor([-1e4, 1e4]), torch.tensor([-1.0, 1.0]), dual_clip=None)
    assert bool(loss_N.isfinite().all())


def test_the_value_loss_takes_the_worse_of_moved_and_clipped() -> None:
    # V_old = 0, G = 1. V = .5: ½ max(.25, (.2 − 1)²) = .32; V = .1: ½·.81; V = 2: ½ max(1, .64)
    got = value_loss(torch.tensor([0.5, 0.1, 2.0]), torch.zeros(3), torch.ones(3), clip=0.2)
    assert got.tolist() == pytest.approx([0.32, 0.405, 0.5])
    assert value_loss(torch.tensor([0.5]), torch.zeros(1), torch.ones(1), clip=None).tolist() == [0.125]


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    # x = ln 2: ½ − 1 + ln 2; x = −ln 2: 2 − 1 − ln 2
    got = k3(ratios(1.0, 2.0, 0.5), torch.zeros(3))
    assert got.tolist() == pytest.approx([0.0, math.log(2) - 0.5, 1 - math.log(2)])


# --- kl ---------------------------------------------------------------------------------

P_V, Q_V = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
"""KL(P ‖ Q) = ½·ln 2 − ¼·ln 2 = ¼·ln 2, and KL(Q ‖ P) is the same."""


def test_the_estimators_are_worked_numbers_of_the_log_ratio() -> None:
    # x = ln 2 and −ln 2.
    ln2 = math.log(2)
    assert kl("k1", ratios(2.0, 0.5), torch.zeros(2)).tolist() == pytest.approx([ln2, -ln2])
    assert kl("k2", ratios(2.0, 0.5), torch.zeros(2)).tolist() == pytest.approx([ln2**2 / 2] * 2)
    assert kl("k3", ratios(2.0, 0.5), torch.zeros(2)).tolist() == pytest.approx([ln2 - 0.5, 1 - ln2])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_the_kl_in_expectation(estimator: Estimator) -> None:
    assert float((P_V * kl(estimator, P_V.log(), Q_V.log())).sum()) == pytest.approx(0.25 * math.log(2))


def expected_slope(estimator: Estimator) -> Tensor:
    """What the loss of sampled tokens has as gradient in the logits, every token as often as P has it."""
    logits_V = P_V.log().requires_grad_()
    estimates_V = kl(estimator, logits_V.log_softmax(-1), Q_V.log())
    return torch.autograd.grad((P_V * estimates_V).sum(), logits_V)[0]


def true_slope(forward: bool) -> Tensor:
    logits_V = P_V.log().requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    kl_of = (Q_V * (Q_V.log() - logp_V)).sum() if forward else (logp_V.exp() * (logp_V - Q_V.log())).sum()
    return torch.autograd.grad(kl_of, logits_V)[0]


def test_the_gradient_of_k2_is_that_of_the_kl_in_expectation() -> None:
    # p_v (x_v − KL): ½(ln 2 − ¼ ln 2), ¼(0 − ¼ ln 2), ¼(−ln 2 − ¼ ln 2)
    ln2 = math.log(2)
    assert expected_slope("k2").tolist() == pytest.approx([0.375 * ln2, -0.0625 * ln2, -0.3125 * ln2])
    torch.testing.assert_close(expected_slope("k2"), true_slope(forward=False))


def test_the_gradient_of_k3_is_that_of_the_forward_kl_and_of_k1_nothing() -> None:
    # p − q: ½ − ¼, 0, ¼ − ½
    assert expected_slope("k3").tolist() == pytest.approx([0.25, 0.0, -0.25])
    torch.testing.assert_close(expected_slope("k3"), true_slope(forward=True))
    assert expected_slope("k1").tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_k1_is_refused_in_the_loss_and_taken_in_the_reward() -> None:
    line = "estimator = 'k1', want 'k2' or 'k3' with where = 'loss', where the gradient of k1 has mean zero"
    with pytest.raises(ValueError, match=f"^kl: {line}$"):
        KLConfig(0.1, "k1")
    assert KLConfig(0.1, "k1", "reward").estimator == "k1"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"coef": -0.1}, "coef = -0.1, want a finite number of at least 0"),
        ({"coef": math.nan}, "coef = nan, want a finite number of at least 0"),
        ({"estimator": "k4"}, "estimator = 'k4', want 'k1', 'k2' or 'k3'"),
        ({"where": "both"}, "where = 'both', want 'loss' or 'reward'"),
    ],
)
def test_a_bad_setting_of_the_kl_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^kl: {line}"):
        KLConfig(**changes)


def test_the_entropy_of_a_uniform_choice_is_the_log_of_its_size_and_of_a_sure_one_nothing() -> None:
    logp_NV = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3], [1 - 2e-9, 1e-9, 1e-9]]).log()
    assert entropy(logp_NV).tolist() == pytest.approx([1.5 * math.log(2), math.log(3), 0.0], abs=1e-6)


def test_one_count_divides_the_sum_however_it_is_cut() -> None:
    loss_N = torch.tensor([1.0, 2.0, 6.0])
    assert float(mean_over(loss_N, 3)) == float(mean_over(loss_N[:1], 3) + mean_over(loss_N[1:], 3)) == 3.0


def test_whitening_gives_mean_zero_and_variance_one() -> None:
    # (1, 3): μ = 2, σ = 1
    assert whiten(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0], abs=1e-7)


def test_whitening_keeps_a_small_variance_beside_a_large_mean() -> None:
    x_N = torch.tensor([999.99, 1000.01], dtype=torch.float32)
    assert whiten(x_N).tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_whitening_reduces_over_processes() -> None:
    # This process holds (1, 3), the other one the same: nothing changes. A reduction that doubles stands for it.
    assert whiten(torch.tensor([1.0, 3.0]), lambda x: 2 * x).tolist() == pytest.approx([-1.0, 1.0], abs=1e-7)


def test_equal_advantages_whiten_to_zero_and_none_to_none() -> None:
    assert whiten(torch.full((3,), 0.7)).tolist() == [0.0, 0.0, 0.0]
    assert len(whiten(torch.zeros(0))) == 0


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    target_N = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(target_N, target_N) == 1.0
    assert explained_variance(torch.ones(3), target_N) == 0.0
    assert explained_variance(torch.ones(3), torch.ones(3)) == 0.0
