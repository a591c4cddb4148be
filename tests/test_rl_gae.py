"""Chained GAE: worked numbers, the brute-force sum, and what must not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.rl.gae import chained_gae, discounted_suffix_sums, last_of_rollout

unit = st.floats(0, 1)
values = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=9), min_size=1, max_size=4)


def flat(per_rollout: list[list[float]]) -> tuple[Tensor, Tensor]:
    value_N = torch.tensor([v for vs in per_rollout for v in vs], dtype=torch.float64)
    rollout_N = torch.tensor([r for r, vs in enumerate(per_rollout) for _ in vs])
    return value_N, rollout_N


def at_the_end(rollout_N: Tensor, reward_R: Tensor) -> Tensor:
    return torch.where(last_of_rollout(rollout_N), reward_R[rollout_N], 0.0)


def double_sum(reward: list[float], value: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """A_j = Σ_l (γλ)^l δ_{j+l}, written out for one rollout."""
    n = len(value)
    delta = [reward[j] + gamma * [*value, after][j + 1] - value[j] for j in range(n)]
    return [sum((gamma * lam) ** k * delta[j + k] for k in range(n - j)) for j in range(n)]


def test_three_tokens_worked_out_by_hand() -> None:
    # γ = .5, λ = .5: δ = (.5·.4 − .2, .5·.6 − .4, 1 − .6) = (0, −.1, .4); A₃ = .4, A₂ = −.1 + .25·.4, A₁ = 0 + .25·0
    got = chained_gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6]), torch.zeros(1), torch.zeros(3).long(), 0.5, 0.5
    )
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.4], abs=1e-7)


def test_a_truncated_rollout_looks_at_the_value_after_the_cut_and_a_terminated_one_at_nothing() -> None:
    # One token each, V = .5: terminated δ = 0 − .5; cut with V(after) = .8 and γ = .5: δ = .4 − .5
    got = chained_gae(
        torch.zeros(2), torch.tensor([0.5, 0.5]), torch.tensor([0.0, 0.8]), torch.tensor([0, 1]), 0.5, 0.9
    )
    assert got.tolist() == pytest.approx([-0.5, -0.1], abs=1e-7)


@given(values, unit, unit, st.floats(-1, 1))
def test_gae_is_the_double_sum_of_the_definition(vs: list[list[float]], gamma: float, lam: float, after: float) -> None:
    value_N, rollout_N = flat(vs)
    reward_N = torch.linspace(-1, 1, len(value_N), dtype=torch.float64)
    bootstrap_R = torch.full((len(vs),), after, dtype=torch.float64)
    got = chained_gae(reward_N, value_N, bootstrap_R, rollout_N, gamma, lam)
    want: list[float] = []
    for r, v in enumerate(vs):
        want += double_sum(reward_N[rollout_N == r].tolist(), v, after, gamma, lam)
    assert got.tolist() == pytest.approx(want, abs=1e-12)


@given(values, st.floats(-3, 3))
def test_undiscounted_advantages_are_the_return_minus_the_value_on_every_action(
    vs: list[list[float]], r: float
) -> None:
    value_N, rollout_N = flat(vs)
    reward_R = r + torch.arange(len(vs), dtype=torch.float64)
    got = chained_gae(at_the_end(rollout_N, reward_R), value_N, torch.zeros(len(vs)), rollout_N, 1.0, 1.0)
    assert got.tolist() == pytest.approx((reward_R[rollout_N] - value_N).tolist(), abs=1e-12)


@given(st.integers(1, 40), unit, st.floats(-2, 2))
def test_a_critic_that_knows_the_return_leaves_no_advantage(n: int, lam: float, r: float) -> None:
    value_N, rollout_N = torch.full((n,), r, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    reward_N = at_the_end(rollout_N, torch.tensor([r], dtype=torch.float64))
    assert float(chained_gae(reward_N, value_N, torch.zeros(1), rollout_N, 1.0, lam).abs().max()) < 1e-12


@given(st.integers(1, 40), unit, st.floats(-2, 2))
def test_a_constant_critic_leaves_no_advantage_at_an_external_cut(n: int, lam: float, v: float) -> None:
    value_N, rollout_N = torch.full((n,), v, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    bootstrap_R = torch.tensor([v], dtype=torch.float64)
    assert float(chained_gae(torch.zeros(n), value_N, bootstrap_R, rollout_N, 1.0, lam).abs().max()) < 1e-12


@given(values, unit, unit)
def test_a_rollout_has_the_advantages_that_it_has_alone(vs: list[list[float]], gamma: float, lam: float) -> None:
    value_N, rollout_N = flat(vs)
    reward_R = torch.ones(len(vs), dtype=torch.float64)
    together = chained_gae(at_the_end(rollout_N, reward_R), value_N, torch.zeros(len(vs)), rollout_N, gamma, lam)
    alone: list[float] = []
    for v in vs:
        v_N, r_N = flat([v])
        alone += chained_gae(at_the_end(r_N, reward_R[:1]), v_N, torch.zeros(1), r_N, gamma, lam).tolist()
    assert together.tolist() == pytest.approx(alone, abs=1e-12)


def test_without_lambda_an_action_sees_only_the_next_value() -> None:
    value_N = torch.tensor([0.1, 0.2, 0.3, 0.4])
    reward_N, rollout_N = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4).long()
    before = chained_gae(reward_N, value_N, torch.zeros(1), rollout_N, 1.0, 0.0)
    value_N[2] = 9.0
    after = chained_gae(reward_N, value_N, torch.zeros(1), rollout_N, 1.0, 0.0)
    assert (before == after).tolist() == [True, False, False, True]


def test_suffix_sums_take_a_decay_for_each_token() -> None:
    got = discounted_suffix_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.0, 2.0, 0.0]))
    assert got.tolist() == [2.0, 2.0, 11.0, 4.0]


def test_no_tokens_give_no_advantages() -> None:
    none = torch.zeros(0)
    assert len(chained_gae(none, none, none, none.long(), 1.0, 1.0)) == 0


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="want one shape"):
        chained_gae(torch.zeros(2), torch.zeros(3), torch.zeros(1), torch.zeros(3).long(), 1.0, 1.0)
