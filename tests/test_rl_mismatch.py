"""Corrections of what engine and learner compute differently, their refusals, and the monitor that is always on."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.rl.losses import mean_over
from swarm.rl.mismatch import (
    Drift,
    DriftConfig,
    Kind,
    MismatchConfig,
    drift,
    refuse_double,
    warning,
    weights_of,
)
from swarm.rl.ppo import PPOConfig
from swarm.rl.surrogate import Kind as SurrogateKind
from swarm.rl.surrogate import SurrogateConfig

ONE_SEGMENT = (0, 0, 0, 0)


def weights(config: MismatchConfig, ratios: tuple[float, ...], segments: tuple[int, ...] = ONE_SEGMENT) -> list[float]:
    """The weights of tokens whose learner is so many times as sure as their sampler."""
    rollout_N = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    logp_N = rollout_N + torch.tensor([math.log(x) for x in ratios], dtype=torch.float64)
    return weights_of(config, logp_N, rollout_N, torch.tensor(segments)).tolist()


# --- weights ----------------------------------------------------------------------------


def test_without_a_correction_every_token_weighs_one() -> None:
    assert weights(MismatchConfig(), (0.1, 1.0, 9.0, 1e9)) == [1.0] * 4


def test_tis_bounds_the_ratio_from_above_and_not_from_below() -> None:
    assert weights(MismatchConfig("tis"), (0.1, 1.0, 1.5, 9.0)) == pytest.approx([0.1, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("kind", ["mis_token", "icepop"])
def test_a_token_outside_the_interval_gets_nothing_and_one_inside_its_ratio(kind: Kind) -> None:
    config = MismatchConfig(kind, low=0.5, high=2.0)
    assert weights(config, (0.4, 0.6, 1.9, 2.1)) == pytest.approx([0.0, 0.6, 1.9, 0.0])


def test_a_ratio_on_the_bound_is_inside() -> None:
    # Ratios of 1/2 and 2 in numbers that have no rounding: log-probabilities 0 and log 2.
    log2 = torch.tensor([math.log(2.0)], dtype=torch.float64)
    for a, b in ((log2, 0 * log2), (0 * log2, log2)):
        assert weights_of(MismatchConfig("icepop"), a, b, torch.zeros(1).long()).item() > 0


def test_a_sequence_weighs_by_the_product_of_its_ratios() -> None:
    # Segment 0: 1.2·1.5 = 1.8; segment 1: 1.5·1.5 = 2.25 > 2.
    got = weights(MismatchConfig("mis_sequence"), (1.2, 1.5, 1.5, 1.5), (0, 0, 1, 1))
    assert got == pytest.approx([1.8, 1.8, 0.0, 0.0])


def test_a_product_that_overflows_is_rejected_and_stays_finite() -> None:
    # 60 tokens of ratio e: e^60, clamped to e^20, still far above 2.
    got = weights(MismatchConfig("mis_sequence"), (math.e,) * 60, (0,) * 60)
    assert got == [0.0] * 60


def test_a_geometric_mean_decides_for_the_segment_and_weighs_each_of_its_tokens() -> None:
    # √(4·.5) = 1.41 is inside, though 4 is not; √(4·2) = 2.83 is outside, though 2 is on the bound.
    got = weights(MismatchConfig("mis_geometric"), (4.0, 0.5, 4.0, 2.0), (0, 0, 1, 1))
    assert got == pytest.approx([2**0.5, 2**0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["mis_token", "mis_sequence", "mis_geometric"])
def test_one_token_under_the_veto_rejects_its_segment_and_no_other(kind: Kind) -> None:
    config = MismatchConfig(kind, low=0.5, high=2.0, veto=0.01)
    # Segment 0 has .001; its product and mean may be inside: .001·1000 = 1.
    got = weights(config, (0.001, 1000.0, 1.1, 1.2), (0, 0, 1, 1))
    assert got[:2] == [0.0, 0.0]
    assert all(x > 0 for x in got[2:])


def test_without_a_veto_a_product_of_one_is_kept_whatever_it_is_made_of() -> None:
    got = weights(MismatchConfig("mis_sequence"), (0.001, 1000.0, 1.1, 1.2), (0, 0, 1, 1))
    assert got == pytest.approx([1.0, 1.0, 1.32, 1.32])


def test_a_segment_without_tokens_changes_nothing() -> None:
    got = weights(MismatchConfig("mis_geometric"), (1.5, 1.5, 1.1, 1.1), (0, 0, 3, 3))
    assert got == pytest.approx([1.5, 1.5, 1.1, 1.1])


@settings(max_examples=50)
@given(st.sampled_from(get_args(Kind)), st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.integers(0, 99))
def test_weights_are_finite_never_negative_and_one_where_nothing_differs(
    kind: Kind, gaps: list[float], seed: int
) -> None:
    n = len(gaps)
    segment_N = torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed)).sort().values
    rollout_N, gap_N = torch.linspace(-2, 0, n), torch.tensor(gaps)
    got_N = weights_of(MismatchConfig(kind), rollout_N + gap_N, rollout_N, segment_N)
    assert bool(got_N.isfinite().all())
    assert bool((got_N >= 0).all())
    assert weights_of(MismatchConfig(kind), rollout_N, rollout_N, segment_N).tolist() == [1.0] * n


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_weight_has_no_gradient(kind: Kind) -> None:
    logp_N = torch.tensor([-1.0, -0.9], requires_grad=True)
    assert not weights_of(MismatchConfig(kind), logp_N, torch.full((2,), -1.0), torch.zeros(2).long()).requires_grad


def test_no_tokens_have_no_weights() -> None:
    none_N = torch.zeros(0)
    for kind in get_args(Kind):
        assert len(weights_of(MismatchConfig(kind), none_N, none_N, none_N.long())) == 0


def test_a_rejected_token_still_counts_in_the_divisor() -> None:
    # Losses 1, 1, 1, 1, of which two are rejected: ½, as it would be with their losses at 0, and not 1.
    weight_N = torch.tensor(weights(MismatchConfig("icepop"), (1.0, 1.0, 9.0, 9.0)))
    assert float(mean_over(weight_N * torch.ones(4), 4)) == pytest.approx(0.5)


# --- what is refused ----------------------------------------------------------------------

SURROGATES = {
    kind: SurrogateConfig(kind, square_coef=0.1 if kind == "k2.5" else 0.0) for kind in get_args(SurrogateKind)
}
OLD = {"ppo": ("rollout", "recompute"), "dis": ("rollout",), "k2.5": ("rollout",), "decoupled": ("recompute",)}
CORRECTIONS = get_args(Kind)[1:]


@pytest.mark.parametrize("surrogate", ["dis", "k2.5", "decoupled"])
@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_two_corrections_of_one_mismatch_are_refused(surrogate: SurrogateKind, kind: Kind, old: str) -> None:
    line = (
        f"mismatch: kind = {kind!r} with surrogate kind = {surrogate!r}, want 'none': "
        f"{surrogate} corrects the same mismatch itself"
    )
    with pytest.raises(ValueError, match="mismatch: kind") as e:
        refuse_double(SURROGATES[surrogate], MismatchConfig(kind), old)
    assert str(e.value) == line


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_of_a_ratio_that_holds_the_mismatch_already_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"old_logprobs = 'rollout' with mismatch kind = '{kind}', want 'recompute'"):
        PPOConfig(mismatch=MismatchConfig(kind))
    assert PPOConfig(mismatch=MismatchConfig(kind), old_logprobs="recompute").mismatch.kind == kind


@pytest.mark.parametrize("surrogate", list(OLD))
@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_a_loss_that_needs_one_old_policy_refuses_the_other(surrogate: SurrogateKind, old: Any) -> None:
    if old in OLD[surrogate]:
        refuse_double(SURROGATES[surrogate], MismatchConfig(), old)
        return
    with pytest.raises(ValueError, match=f"old_logprobs = '{old}' with surrogate kind = .*want '{OLD[surrogate][0]}'"):
        PPOConfig(surrogate=SURROGATES[surrogate], old_logprobs=old)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "clip"}, "kind = 'clip', want one of none, tis"),
        ({"low": 1.0}, "low = 1.0, want from 0 to below 1"),
        ({"low": 3.0, "high": 2.0}, "low = 3.0, want from 0 to below 1"),
        ({"high": 1.0}, "high = 1.0, want a finite number above 1"),
        ({"high": math.inf}, "high = inf, want a finite number above 1"),
        ({"kind": "tis", "veto": 1e-4}, "veto = 0.0001, want None with kind = 'tis'"),
        ({"kind": "icepop", "veto": 1e-4}, "veto = 0.0001, want None with kind = 'icepop'"),
        ({"kind": "mis_token", "veto": 0.5}, "veto = 0.5, want None or between 0 and low"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^mismatch: {line}"):
        MismatchConfig(**changes)


@pytest.mark.parametrize("name", ["warn_mean", "warn_max", "warn_outside"])
def test_a_monitor_that_would_always_warn_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"drift {name} = 0.0, want above 0"):
        DriftConfig(**{name: 0.0})


# --- the monitor --------------------------------------------------------------------------


def far(*ratios: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([math.log(x) for x in ratios]), torch.zeros(len(ratios))


def test_the_drift_is_measured_in_nats_and_in_ratios() -> None:
    # Ratios 1, 1.05, .5, 2: |log| 0, .0488, .6931, .6931; k3 of the sampler, ρ − 1 − log ρ: 0, .00121, .1931, .3069.
    seen = drift(*far(1.0, 1.05, 0.5, 2.0))
    assert seen.mean == pytest.approx((math.log(1.05) + 2 * math.log(2)) / 4)
    assert seen.max == pytest.approx(math.log(2))
    assert seen.kl == pytest.approx((0.05 - math.log(1.05) + 0.5) / 4, rel=1e-5)
    assert seen.outside == 0.5


def test_no_tokens_have_no_drift() -> None:
    assert drift(*far()) == Drift(0.0, 0.0, 0.0, 0.0)


def test_a_drift_within_its_bounds_says_nothing() -> None:
    assert warning(Drift(0.02, 1.0, 0.0, 0.05), DriftConfig()) == ""


@pytest.mark.parametrize("seen", [Drift(0.03, 0.5, 0, 0), Drift(0.01, 1.5, 0, 0), Drift(0.01, 0.5, 0, 0.06)])
def test_a_drift_beyond_any_bound_warns_with_all_numbers_and_bounds(seen: Drift) -> None:
    assert warning(seen, DriftConfig()) == (
        f"drift between engine and learner: mean {seen.mean:.4f} nats (bound 0.02), max {seen.max:.3f} (1), "
        f"{100 * seen.outside:.1f}% of ratios outside [0.9, 1.1] (5%)"
    )
