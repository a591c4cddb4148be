"""Numbers of published implementations, where they define the same thing as ours.

verl: `verl/trainer/ppo/core_algos.py` at 012be9d (compute_policy_loss_vanilla, compute_value_loss, kl_penalty).
slime: `vanilla_tis_function` and `icepop_function` of `backends/megatron_utils/loss.py`, and the weights of
`examples/train_infer_mismatch_helper/mis.py`. Their functions were run in float64 on the vectors below.
DIS: `compute_dis_policy_loss` of slime-kernel-agent, a fork of slime, at 98df4f8, with the vectors of its own tests.
GLM-5 (arXiv 2602.15763) gives formulas without code; its rows are those formulas, written out.
GAE stands against rlax, verl and TRL in test_rl_gae and test_rl_advantages.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm.rl.losses import Estimator, kl, mean_over, value_loss
from swarm.rl.mismatch import MismatchConfig, weights_of
from swarm.rl.surrogate import SurrogateConfig, ppo_loss, surrogate


def doubles(*xs: float) -> Tensor:
    return torch.tensor(xs, dtype=torch.float64)


LOGP_N = doubles(-1.0, -0.4, -2.3, -0.9, -1.7, -0.2, -3.0, -1.2)
OLD_N = doubles(-1.1, -1.0, -1.9, -1.3, -0.6, -1.6, -1.0, -1.2)
ADVANTAGE_N = doubles(0.5, 1.5, -0.7, -1.2, 0.8, -2.0, -0.3, 0.9)


@pytest.mark.parametrize(("clip_high", "second", "mean"), [(0.2, -1.8, 0.63391341), (0.28, -1.92, 0.61891341)])
def test_the_ppo_loss_with_dual_clip_is_that_of_verl(clip_high: float, second: float, mean: float) -> None:
    loss_N = ppo_loss(LOGP_N, OLD_N, ADVANTAGE_N, 0.2, clip_high, 3.0)
    want = [-0.552585, second, 0.56, 1.79019, -0.266297, 6.0, 0.24, -0.9]
    assert loss_N.tolist() == pytest.approx(want, abs=1e-6)
    # verl's token-mean over one batch.
    assert float(mean_over(loss_N, 8)) == pytest.approx(mean, abs=1e-8)


def test_what_is_stopped_is_what_verl_counts_as_clipped_above_and_by_the_dual_clip() -> None:
    # pg_clipfrac = 3/8, pg_clipfrac_lower = 1/8
    stopped_N = surrogate(SurrogateConfig(), LOGP_N, OLD_N, ADVANTAGE_N, OLD_N).stopped_N
    assert float(stopped_N.double().mean()) == 0.375 + 0.125


def test_the_clipped_value_loss_is_that_of_verl_and_trl() -> None:
    loss_N = value_loss(doubles(0.5, 0.1, -0.3, 0.9), torch.full((4,), 0.2), doubles(1.0, 0.0, 0.0, 0.5), clip=0.2)
    assert float(mean_over(loss_N, 4)) == pytest.approx(0.0775, abs=1e-7)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        ("k1", [0.2, 0.5, 0.0, 0.2]),
        ("k2", [0.02, 0.125, 0.0, 0.02]),
        ("k3", [0.018730753078, 0.106530659713, 0.0, 0.018730753078]),
    ],
)
def test_the_kl_estimators_are_those_of_verl_and_trl(estimator: Estimator, want: list[float]) -> None:
    got_N = kl(estimator, doubles(-1.0, -0.4, -2.3, -0.9), doubles(-1.2, -0.9, -2.3, -1.1))
    assert got_N.tolist() == pytest.approx(want, abs=1e-12)


# --- engine and learner -------------------------------------------------------------------

TRAIN_N = doubles(-1.0, -0.5, -2.0, -1.5, -0.7)
ROLLOUT_N = doubles(-1.1, -1.4, -0.9, -1.5, -1.2)
LOSS_N = doubles(0.3, -0.4, 0.5, -0.6, 0.7)


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (MismatchConfig("tis", high=2.0), [0.331551275423, -0.8, 0.166435541849, -0.6, 1.15410488949]),
        (MismatchConfig("icepop"), [0.331551275423, 0.0, 0.0, -0.6, 1.15410488949]),
        (MismatchConfig("icepop", low=0.5, high=5.0), [0.331551275423, -0.983841244463, 0.0, -0.6, 1.15410488949]),
    ],
    ids=["tis", "icepop_glm5", "icepop_ring"],
)
def test_token_corrections_are_those_of_slime(config: MismatchConfig, want: list[float]) -> None:
    weight_N = weights_of(config, TRAIN_N, ROLLOUT_N, torch.zeros(5).long())
    assert (weight_N * LOSS_N).tolist() == pytest.approx(want, abs=1e-12)


def test_sequence_and_geometric_ratios_are_those_of_slime() -> None:
    # Sequences of three and two tokens: products .904837 and 1.648721, geometric means .967216 and 1.284025.
    segment_N = torch.tensor([0, 0, 0, 1, 1])
    product_N = weights_of(MismatchConfig("mis_sequence"), TRAIN_N, ROLLOUT_N, segment_N)
    assert product_N.tolist() == pytest.approx([0.904837418036] * 3 + [1.6487212707] * 2, abs=1e-10)
    for low, high, kept in ((0.967, 1.285, (1, 1)), (0.968, 1.285, (0, 1)), (0.967, 1.284, (1, 0))):
        got_N = weights_of(MismatchConfig("mis_geometric", low, high), TRAIN_N, ROLLOUT_N, segment_N)
        want = [0.967216100486 * kept[0]] * 3 + [1.28402541669 * kept[1]] * 2
        assert got_N.tolist() == pytest.approx(want, abs=1e-10)


def test_icepop_is_equation_1_of_glm5_on_the_clipped_objective() -> None:
    # pop(ρ_mis, 1/2, 2)·min(rA, clip(r, .8, 1.28)A). ρ_mis = 1.5, r = 1.5, A = 1: 1.5·1.28; ρ_mis = 2.5: 0;
    # ρ_mis = .6, r = .5, A = −1: .6·(−.8).
    rollout_N = torch.zeros(3, dtype=torch.float64)
    old_N = doubles(1.5, 2.5, 0.6).log()
    logp_N, advantage_N = old_N + doubles(1.5, 1.1, 0.5).log(), doubles(1, 1, -1)
    weight_N = weights_of(MismatchConfig("icepop"), old_N, rollout_N, torch.zeros(3).long())
    loss_N = surrogate(SurrogateConfig(clip_high=0.28, dual_clip=None), logp_N, old_N, advantage_N, rollout_N).loss_N
    assert (-weight_N * loss_N).tolist() == pytest.approx([1.92, 0.0, -0.48])


def test_dis_is_that_of_the_fork_of_slime_with_the_bounds_of_sao_for_code() -> None:
    # π_rollout = .1, ratios kept between .2 and 4: −ρ·A·log π = .21·ln .021, −ln .1, 3.99·ln .399.
    ratio_N, rollout_N = doubles(0.19, 0.21, 1.0, 3.99, 4.01, 5.0), doubles(*[0.1] * 6).log()
    config, advantage_N = SurrogateConfig("dis", clip_low=0.8, clip_high=3.0), doubles(1, -1, 1, -1, 1, -1)
    got = surrogate(config, rollout_N + ratio_N.log(), rollout_N, advantage_N, rollout_N)
    assert got.stopped_N.tolist() == [True, False, False, False, True, True]
    want = [0, 0.21 * math.log(0.021), -math.log(0.1), 3.99 * math.log(0.399), 0, 0]
    assert got.loss_N.tolist() == pytest.approx(want)


def test_the_slope_of_dis_is_that_of_the_fork_of_slime() -> None:
    # π = .4, π_rollout = .2, A = 1.5: −2·1.5
    logp_N, rollout_N = doubles(0.4).log().requires_grad_(), doubles(0.2).log()
    config = SurrogateConfig("dis", clip_low=0.8, clip_high=3.0)
    surrogate(config, logp_N, rollout_N, doubles(1.5), rollout_N).loss_N.sum().backward()
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == pytest.approx([-3.0])


def test_dis_is_equations_3_to_5_of_glm5() -> None:
    # f(r)·A·log π with r = exp(log π − log π_rollout), f(x) = x on (1 − .2, 1 + .28) and 0 elsewhere.
    logp_N, rollout_N = doubles(-1.0, -1.0, -1.0, -1.0), doubles(-1.1, -0.9, -1.4, -0.7)
    config = SurrogateConfig("dis", clip_low=0.2, clip_high=0.28)
    loss_N = surrogate(config, logp_N, logp_N, doubles(2, -1, 2, -1), rollout_N).loss_N
    # e^.1 = 1.105 and e^−.1 = .905 are inside, e^.4 = 1.49 and e^−.3 = .741 outside.
    assert loss_N.tolist() == pytest.approx([2 * math.exp(0.1), -math.exp(-0.1), 0.0, 0.0])
