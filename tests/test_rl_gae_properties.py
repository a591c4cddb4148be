"""What must hold of advantages for any rollouts, segments, turns, discounts and λ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.rl.advantages import AdvantageConfig, Chain, Form, LamUnit, Time, advantages
from swarm.rl.gae import last_of

pytestmark = pytest.mark.slow

Shape = list[list[list[int]]]
"""Rollouts of segments of turns: the actions of each turn. A segment without turns has no actions."""

shapes: st.SearchStrategy[Shape] = st.lists(
    st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=3), min_size=1, max_size=3
)
seeds = st.integers(0, 2**31)
critic_forms = st.sampled_from(get_args(Form)[:3])


def flat(shape: Shape, seed: int) -> Chain:
    """Actions of that shape with random values, rewards, cuts and steps; some rollouts share a task."""
    g = torch.Generator().manual_seed(seed)
    where = [
        (r, s, turn)
        for r, s, turn, actions in _turns(shape)
        for _ in range(actions)
    ]  # fmt: skip
    at_N3 = torch.tensor(where, dtype=torch.long).reshape(-1, 3)
    rollouts, count = len(shape), len(where)
    steps_T = torch.randint(1, 5, (100,), generator=g)
    return Chain(
        reward_R=torch.randn(rollouts, generator=g, dtype=torch.float64),
        bootstrap_R=torch.randn(rollouts, generator=g, dtype=torch.float64) * (torch.rand(rollouts, generator=g) < 0.5),
        extra_N=torch.randn(count, generator=g, dtype=torch.float64),
        value_N=torch.randn(count, generator=g, dtype=torch.float64),
        rollout_N=at_N3[:, 0],
        segment_N=at_N3[:, 1],
        turn_N=at_N3[:, 2],
        steps_N=steps_T[at_N3[:, 2]],
        group_R=torch.randint(0, 2, (rollouts,), generator=g),
    )


def _turns(shape: Shape) -> list[tuple[int, int, int, int]]:
    """Rollout, segment (through all rollouts), turn (in the rollout) and actions of each turn."""
    found: list[tuple[int, int, int, int]] = []
    segment = 0
    for r, segments in enumerate(shape):
        turn = 0
        for turns in segments:
            for actions in turns:
                found.append((r, segment, turn, actions))
                turn += 1
            segment += 1
    return found


chains = st.builds(flat, shapes, seeds)


@st.composite
def configs(draw: st.DrawFn, forms: Sequence[Form] = get_args(Form)[:3]) -> AdvantageConfig:
    """Any setting of the forms with a critic."""
    time: Time = draw(st.sampled_from(get_args(Time)))
    alpha = draw(st.none() | st.floats(0.05, 2))
    unit: LamUnit = draw(st.sampled_from(get_args(LamUnit)))
    return AdvantageConfig(
        form=draw(st.sampled_from(forms)),
        gamma=draw(st.floats(0, 1) if time == "none" else st.floats(0, 0.99)),
        lam=1.0 if alpha is not None else draw(st.floats(0, 1)),
        lam_critic=draw(st.floats(0, 1)),
        lam_unit=unit,
        lam_alpha=alpha,
        time=time,
    )


def undiscounted(form: Form, lam: float = 1.0) -> AdvantageConfig:
    return AdvantageConfig(form, lam=lam, lam_critic=lam)


def close(got: Tensor, want: Tensor | Sequence[float]) -> None:
    assert got.tolist() == pytest.approx(list(map(float, want)), abs=1e-9)


def part(chain: Chain, rollouts: Sequence[int]) -> tuple[Chain, Tensor]:
    """A chain of those rollouts in that order, and where their actions were."""
    at_n = torch.cat([torch.zeros(0).long(), *((chain.rollout_N == r).nonzero()[:, 0] for r in rollouts)])
    tensors = {f.name: getattr(chain, f.name) for f in fields(chain)}
    cut = {
        name: x[at_n] if name.endswith("_N") else x[torch.tensor(rollouts, dtype=torch.long)]
        for name, x in tensors.items()
    }
    old_n = cut["rollout_N"]
    cut["rollout_N"] = torch.tensor([rollouts.index(int(r)) for r in old_n], dtype=torch.long)
    step_n = torch.ones_like(old_n)
    step_n[1:] = cut["segment_N"].diff() != 0
    return Chain(**{**cut, "segment_N": step_n.cumsum(0)}), at_n


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


# --- the definition, written out ----------------------------------------------------------


def weights(chain: Chain, config: AdvantageConfig, lam: float | None) -> tuple[list[float], list[float]]:
    """Discount and λ of each action; `lam` None is the length-adaptive one."""
    rollout, turn = chain.rollout_N.tolist(), chain.turn_N.tolist()
    assert chain.steps_N is not None
    discounts: list[float] = []
    lams: list[float] = []
    for j, r in enumerate(rollout):
        ends = j + 1 == len(rollout) or (rollout[j + 1], turn[j + 1]) != (r, turn[j])
        tau = {"none": 1, "turn": int(ends), "critical_steps": int(chain.steps_N[j]) * ends}[config.time]
        discounts.append(config.gamma**tau)
        x = lam if lam is not None else max(0.0, 1 - 1 / (config.lam_alpha or 1) / rollout.count(r))
        lams.append(x if ends or config.lam_unit == "token" else 1.0)
    return discounts, lams


def product(xs: Sequence[float]) -> float:
    out = 1.0
    for x in xs:
        out *= x
    return out


def double_sum(chain: Chain, config: AdvantageConfig, lam: float | None, decayed: bool) -> list[float]:
    """A_j = Σ_l (Π_{i<l} d_{j+i} λ_{j+i}) δ_{j+l} over the chain, for each form."""
    d, lams = weights(chain, config, lam)
    assert chain.extra_N is not None
    value, extra, rollout = chain.value_N.tolist(), chain.extra_N.tolist(), chain.rollout_N.tolist()
    run = rollout if config.form == "chained" else chain.segment_N.tolist()
    last_of_run = {run[j]: j for j in range(len(run))}
    last_of_rollout = {rollout[j]: j for j in range(len(run))}
    out: list[float] = []
    for j in range(len(run)):
        end, final = last_of_run[run[j]], last_of_rollout[rollout[j]]
        total = 0.0
        for k in range(j, end + 1):
            outcome = float(chain.reward_R[rollout[j]]) + d[final] * float(chain.bootstrap_R[rollout[j]])
            ahead = outcome if k == end else d[k] * value[k + 1]
            total += product([d[i] * lams[i] for i in range(j, k)]) * (extra[k] + ahead - value[k])
        out.append(total * (product([d[i] * lams[i] for i in range(end, final)]) if decayed else 1.0))
    return out


@given(chains, configs())
def test_advantages_and_targets_are_the_double_sum_of_the_definition(chain: Chain, config: AdvantageConfig) -> None:
    advantage_N, target_N = advantages(chain, config)
    lam = None if config.lam_alpha is not None else config.lam
    close(advantage_N, double_sum(chain, config, lam, config.form == "decayed"))
    close(target_N - chain.value_N, double_sum(chain, config, config.lam_critic, False))


# --- worth ------------------------------------------------------------------------------


@given(chains, critic_forms)
def test_undiscounted_every_action_of_every_segment_gets_the_reward_minus_its_value(chain: Chain, form: Form) -> None:
    chain = replace(chain, extra_N=None, bootstrap_R=torch.zeros_like(chain.reward_R))
    advantage_N, target_N = advantages(chain, undiscounted(form))
    close(advantage_N, chain.reward_R[chain.rollout_N] - chain.value_N)
    close(target_N, chain.reward_R[chain.rollout_N])


@given(chains, critic_forms, st.floats(0, 1))
def test_a_critic_that_knows_the_reward_leaves_no_advantage(chain: Chain, form: Form, lam: float) -> None:
    value_N, zero_R = chain.reward_R[chain.rollout_N], torch.zeros_like(chain.reward_R)
    chain = replace(chain, extra_N=None, value_N=value_N, bootstrap_R=zero_R)
    advantage_N, target_N = advantages(chain, undiscounted(form, lam))
    close(advantage_N, torch.zeros_like(value_N))
    close(target_N, value_N)


@given(chains, critic_forms, st.floats(0, 1), st.floats(-2, 2))
def test_a_constant_critic_leaves_no_advantage_at_an_external_cut(
    chain: Chain, form: Form, lam: float, v: float
) -> None:
    zero_R = torch.zeros_like(chain.reward_R)
    chain = replace(
        chain, reward_R=zero_R, extra_N=None, bootstrap_R=zero_R + v, value_N=torch.full_like(chain.value_N, v)
    )
    close(advantages(chain, undiscounted(form, lam))[0], torch.zeros_like(chain.value_N))


@given(chains, configs(("decayed",)))
def test_decayed_is_chained_where_the_critic_says_nothing(chain: Chain, config: AdvantageConfig) -> None:
    chain = replace(chain, extra_N=None, value_N=torch.zeros_like(chain.value_N))
    close(advantages(chain, config)[0], advantages(chain, replace(config, form="chained"))[0])


# --- what must not matter ---------------------------------------------------------------


@given(chains, configs(("chained",)), seeds)
def test_splitting_a_segment_changes_nothing_when_chained(chain: Chain, config: AdvantageConfig, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    opens_N = torch.rand(len(chain.value_N), generator=g) < 0.5
    opens_N[1:] |= chain.rollout_N.diff() != 0
    elsewhere = replace(chain, segment_N=opens_N.long().cumsum(0))
    for got, want in zip(advantages(elsewhere, config), advantages(chain, config), strict=True):
        assert torch.equal(got, want)


@given(chains, configs(), st.integers(1, 5))
def test_a_segment_without_actions_changes_nothing(chain: Chain, config: AdvantageConfig, gap: int) -> None:
    spread = replace(chain, segment_N=chain.segment_N * (gap + 1) + gap)
    for got, want in zip(advantages(spread, config), advantages(chain, config), strict=True):
        assert torch.equal(got, want)


@given(chains, configs(), seeds)
def test_order_and_shards_of_rollouts_change_nothing(chain: Chain, config: AdvantageConfig, seed: int) -> None:
    order = shuffled(len(chain.reward_R), seed)
    whole = advantages(chain, config)
    for shard in (order, order[::2], order[1::2]):
        some, at_n = part(chain, shard)
        for got, want in zip(advantages(some, config), whole, strict=True):
            assert torch.equal(got, want[at_n])


@given(chains, st.sampled_from(get_args(Form)[3:]), seeds)
def test_order_of_rollouts_and_shards_of_whole_groups_change_nothing_without_a_critic(
    chain: Chain, form: Form, seed: int
) -> None:
    chain = replace(chain, bootstrap_R=torch.zeros_like(chain.reward_R))
    order = shuffled(len(chain.reward_R), seed)
    whole, _ = advantages(chain, AdvantageConfig(form))
    groups = [[r for r in order if int(chain.group_R[r]) == k] for k in (0, 1)]
    for shard in (order, *groups):
        some, at_n = part(chain, shard)
        close(advantages(some, AdvantageConfig(form))[0], whole[at_n])


@given(shapes, seeds, st.sampled_from(get_args(Form)[3:]))
def test_a_reward_counts_once_however_many_segments_a_rollout_has(shape: Shape, seed: int, form: Form) -> None:
    chain = replace(flat(shape, seed), extra_N=None, bootstrap_R=torch.zeros(len(shape), dtype=torch.float64))
    one_each = replace(chain, segment_N=chain.rollout_N)
    assert torch.equal(advantages(chain, AdvantageConfig(form))[0], advantages(one_each, AdvantageConfig(form))[0])


@given(chains, configs(), seeds)
def test_what_stands_on_observations_changes_nothing_not_even_nan(
    chain: Chain, config: AdvantageConfig, seed: int
) -> None:
    # Rows as they come out of a network: actions among observations, whose slots hold anything.
    g = torch.Generator().manual_seed(seed)
    acts_P = torch.zeros(2 * len(chain.value_N), dtype=torch.bool)
    acts_P[torch.randperm(len(acts_P), generator=g)[: len(chain.value_N)]] = True
    want = advantages(chain, config)
    for junk in (torch.nan, torch.inf, 1e30):
        value_P = torch.full((len(acts_P),), junk, dtype=torch.float64)
        extra_P = value_P.clone()
        value_P[acts_P], extra_P[acts_P] = chain.value_N, chain.extra_N  # type: ignore[assignment]
        got = advantages(replace(chain, value_N=value_P[acts_P], extra_N=extra_P[acts_P]), config)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


# --- who sees what ----------------------------------------------------------------------


@given(chains, configs(), seeds)
def test_a_reward_on_a_token_reaches_that_action_and_earlier_ones_of_its_rollout_alone(
    chain: Chain, config: AdvantageConfig, seed: int
) -> None:
    if not len(chain.value_N) or chain.extra_N is None:
        return
    k = seed % len(chain.value_N)
    extra_N = chain.extra_N.clone()
    extra_N[k] += 1000.0
    changed_N = advantages(replace(chain, extra_N=extra_N), config)[1] != advantages(chain, config)[1]
    may_N = (torch.arange(len(extra_N)) <= k) & (chain.rollout_N == chain.rollout_N[k])
    assert changed_N[k]
    assert not bool((changed_N & ~may_N).any())


@given(chains, st.floats(0, 1))
def test_without_lambda_the_last_action_of_a_segment_sees_the_first_value_of_the_next_and_no_other(
    chain: Chain, gamma: float
) -> None:
    config = AdvantageConfig(gamma=gamma, lam=0.0)
    before_N, _ = advantages(chain, config)
    inside_N = last_of(chain.segment_N) & ~last_of(chain.rollout_N)
    for j in inside_N.nonzero()[:, 0].tolist():
        value_N = torch.full_like(chain.value_N, 1e6)
        value_N[j : j + 2] = chain.value_N[j : j + 2]
        after_N, _ = advantages(replace(chain, value_N=value_N), config)
        assert float(after_N[j]) == float(before_N[j])
        value_N[j + 1] += 1.0
        after_N, _ = advantages(replace(chain, value_N=value_N), config)
        assert float(after_N[j]) == pytest.approx(float(before_N[j]) + gamma, abs=1e-9)


@given(chains, configs(), critic_forms)
def test_each_action_has_one_advantage_and_one_target_in_its_place(
    chain: Chain, config: AdvantageConfig, form: Form
) -> None:
    # Each action's own value is in its advantage once, with weight −1 (no decay at γ = λ = 1): nothing moves.
    got = advantages(chain, config)
    assert [len(x) for x in got] == [len(chain.value_N)] * 2
    ids_N = torch.arange(len(chain.value_N), dtype=torch.float64)
    moved_N, _ = advantages(replace(chain, value_N=chain.value_N + ids_N), undiscounted(form))
    close(advantages(chain, undiscounted(form))[0] - moved_N, ids_N)
