"""What the losses are given, and whole updates of every variant: KL, teachers, groups, trunks, optimizers, resumes."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from swarm.rl.advantages import AdvantageConfig, Form
from swarm.rl.batch import Batch, collect
from swarm.rl.critic import CriticConfig
from swarm.rl.distill import DistillConfig, Teacher
from swarm.rl.learner import Learner
from swarm.rl.losses import Estimator, KLConfig, kl, log_ratio, whiten
from swarm.rl.mismatch import Kind, MismatchConfig
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.signals import Frozen
from swarm.rl.surrogate import SurrogateConfig, surrogate
from swarm.types import Reward, Rollout
from tests.rl_cases import TASK, logprobs, on_policy, prompt, rollout, said, seen, some_rollouts, tiny
from tests.test_rl_learner import CONFIG, UNCLIPPED, equal, gradients, weights

P = Path("teacher")
SHARED = CriticConfig(trunk="shared", layers=None, warmup_updates=0)
GROUPS = {"truncated": "leave_out"}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    Learner(tiny(), CONFIG).update(collect(some_rollouts(2)))


def still(learner_config: PPOConfig, **frozen: Any) -> Learner:
    """A learner whose steps are too small to move anything."""
    return Learner(tiny(), replace(learner_config, lr=1e-12, critic_lr=1e-12), frozen=Frozen(**frozen))


def of_domains(*domains: str, seed: int = 0) -> list[Rollout]:
    rollouts = some_rollouts(len(domains), seed)
    return [replace(r, task=replace(TASK, domain=d)) for r, d in zip(rollouts, domains, strict=True)]


def of_tasks(*ids: str) -> list[Rollout]:
    return [replace(r, task=replace(TASK, id=i)) for r, i in zip(some_rollouts(len(ids)), ids, strict=True)]


def paid(rollouts: Sequence[Rollout], factor: float) -> list[Rollout]:
    """The same with every reward so many times as large."""
    return [replace(r, reward=Reward(r.reward.parts, {"perf": factor})) for r in rollouts if r.reward is not None]


def near(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), atol=atol, rtol=0)


# --- kl -----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_a_kl_in_the_reward_lowers_advantages_by_beta_times_it_before_whitening(estimator: Estimator) -> None:
    # λ = 0 and V = 0: A_j = −β·k_j, and the reward on the last action of a rollout.
    config = replace(CONFIG, kl=KLConfig(0.3, estimator, "reward"), advantage=AdvantageConfig(lam=0.0))
    learner, reference = still(config, reference=tiny(seed=1)), tiny(seed=1)
    batch = on_policy(learner.policy, collect(some_rollouts(4)))
    raw_N = -0.3 * kl(estimator, batch.logp_rollout_N, logprobs(reference, batch))
    last_N = torch.cat([batch.rollout_N.diff() != 0, torch.tensor([True])])
    raw_N[last_N] += batch.reward_R
    near(learner.signals(batch).advantage_N, whiten(raw_N))


def test_a_kl_in_the_reward_is_summed_over_the_rest_of_the_rollout_and_reaches_the_critic() -> None:
    config = replace(CONFIG, kl=KLConfig(0.3, "k1", "reward"))
    learner = still(config, reference=tiny(seed=1))
    batch = on_policy(learner.policy, collect([rollout([prompt(1), said(2), seen(3)], [prompt(4), said(5)])]))
    k1 = (batch.logp_rollout_N - logprobs(tiny(seed=1), batch)).tolist()
    near(learner.signals(batch).target_N, torch.tensor([1 - 0.3 * (k1[0] + k1[1]), 1 - 0.3 * k1[1]]))


def test_a_kl_in_the_loss_leaves_the_advantages_and_one_in_the_reward_the_loss_terms() -> None:
    batch = on_policy(tiny(), collect(some_rollouts(4)))
    plain = Learner(tiny(), UNCLIPPED).signals(batch).advantage_N
    inside = Learner(tiny(), replace(UNCLIPPED, kl=KLConfig(0.3)), frozen=Frozen(tiny(1)))
    assert torch.equal(inside.signals(batch).advantage_N, plain)
    # Of two rewards that are all the same nothing is learnt, so that the loss has the KL alone, or nothing.
    same = on_policy(tiny(), collect(paid(some_rollouts(4), 0.0)))
    learner = Learner(tiny(), replace(UNCLIPPED, kl=KLConfig(0.3, "k2", "loss")), frozen=Frozen(tiny(1)))
    metrics = learner.update(same)
    assert metrics.policy is not None
    assert metrics.policy.loss == pytest.approx(0.3 * metrics.policy.kl_reference, abs=1e-6)


# --- teachers -------------------------------------------------------------------------------


def taught(form: Any = "advantage", *teachers: Teacher, coef: float = 0.5, **changes: Any) -> PPOConfig:
    return replace(UNCLIPPED, distill=DistillConfig(teachers or (Teacher(P),), form, coef), **changes)


def test_the_term_of_a_teacher_is_added_to_the_whitened_advantage_at_its_own_scale() -> None:
    batch = on_policy(tiny(), collect(some_rollouts(4)))
    plain_N = Learner(tiny(), UNCLIPPED).signals(batch).advantage_N
    got_N = still(taught(), teachers=(tiny(seed=3),)).signals(batch).advantage_N
    near(got_N - plain_N, 0.5 * (logprobs(tiny(seed=3), batch) - batch.logp_rollout_N))


def test_rewards_a_thousand_times_as_large_leave_the_term_of_a_teacher_as_it_is() -> None:
    some = some_rollouts(4)
    small, large = (on_policy(tiny(), collect(paid(some, factor))) for factor in (1.0, 1000.0))
    learner, plain = still(taught(), teachers=(tiny(seed=3),)), Learner(tiny(), UNCLIPPED)
    terms = [learner.signals(b).advantage_N - plain.signals(b).advantage_N for b in (small, large)]
    assert float(terms[0].abs().max()) > 0.1
    near(terms[1], terms[0])


def test_a_teacher_teaches_where_there_is_no_reward_to_learn_from() -> None:
    # Equal rewards whiten to zero: what is left is the term alone.
    batch = on_policy(tiny(), collect(paid(some_rollouts(3), 0.0)))
    term_N = still(taught(), teachers=(tiny(seed=3),)).signals(batch).advantage_N
    near(term_N, 0.5 * (logprobs(tiny(seed=3), batch) - batch.logp_rollout_N))


def test_a_teacher_is_heard_on_the_rollouts_of_its_domain_alone() -> None:
    batch = on_policy(tiny(), collect(of_domains("a", "b", "a")))
    config = taught("advantage", Teacher(P, 1.0, ("b",)))
    term_N = still(config, teachers=(tiny(3),)).signals(batch).advantage_N
    term_N = term_N - Learner(tiny(), UNCLIPPED).signals(batch).advantage_N
    assert (term_N != 0).tolist() == (batch.rollout_N == 1).tolist()


def distilled(batch: Batch, *pairs: tuple[Teacher, int], coef: float = 1.0) -> Tensor:
    """The gradient of an update from whole-vocabulary teachers, given with the seeds of their weights."""
    models = tuple(tiny(seed) for _, seed in pairs)
    config = taught("full", *(t for t, _ in pairs), coef=coef)
    learner = Learner(tiny(), config, frozen=Frozen(teachers=models))
    return torch.cat([g.flatten() for g in gradients(learner, batch)])


@pytest.mark.slow
def test_the_gradient_of_teachers_by_domain_is_the_mixture_of_the_gradients_of_each() -> None:
    # Rewards are equal: all gradient is the teachers'. Domain a: the first alone; b: ¼ and ¾; c: nobody.
    batch = on_policy(tiny(), collect(paid(of_domains("a", "b", "c", "b"), 0.0)))
    both = distilled(batch, (Teacher(P, 1.0, ("a", "b")), 3), (Teacher(P, 3.0, ("b",)), 4))
    first_a, first_b = (distilled(batch, (Teacher(P, 1.0, (d,)), 3)) for d in ("a", "b"))
    second_b = distilled(batch, (Teacher(P, 1.0, ("b",)), 4))
    assert float(both.abs().max()) > 1e-3
    near(both, first_a + 0.25 * first_b + 0.75 * second_b)


def test_one_whole_vocabulary_teacher_is_scaled_by_its_coefficient_and_by_nothing_else() -> None:
    batch = on_policy(tiny(), collect(paid(some_rollouts(3), 0.0)))
    near(distilled(batch, (Teacher(P, 7.0), 3), coef=2.0), 2 * distilled(batch, (Teacher(P, 1.0), 3)), 1e-4)


@pytest.mark.slow
def test_the_kl_to_the_teachers_is_measured_and_falls() -> None:
    config = replace(taught("full", coef=1.0), lr=0.01, minibatches=2, epochs=4)
    learner = Learner(tiny(), config, frozen=Frozen(teachers=(tiny(seed=3),)))
    batch = on_policy(learner.policy, collect(paid(some_rollouts(4), 0.0)))
    first, second = (learner.update(batch).policy for _ in range(2))
    assert first is not None
    assert second is not None
    assert 0 < second.kl_teacher < first.kl_teacher


def test_as_many_teachers_are_wanted_as_are_configured() -> None:
    with pytest.raises(ValueError, match=r"distill.teachers names 1, 0 given, want as many models"):
        Learner(tiny(), taught())


# --- without a critic -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mean", "rloo", "grpo"])
def test_without_a_critic_no_critic_step_is_made(form: Form) -> None:
    learner = Learner(tiny(), replace(CONFIG, advantage=AdvantageConfig(form), **GROUPS))
    before = weights(learner)
    metrics = learner.update(collect(of_tasks("s", "s", "t", "t")))
    after = weights(learner)
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("critic."))
    assert (metrics.critic_steps, metrics.value_loss, metrics.policy_steps) == (0, 0.0, 2)
    assert not any("one rollout" in line for line in metrics.alarms)


def test_without_a_critic_there_is_nothing_to_warm_up() -> None:
    config = replace(CONFIG, advantage=AdvantageConfig("mean"), critic=CriticConfig(warmup_updates=3), **GROUPS)
    assert Learner(tiny(), config).update(collect(of_tasks("s", "s"))).policy_steps == 2


def test_a_task_with_one_rollout_sets_off_an_alarm_and_teaches_nothing() -> None:
    learner = Learner(tiny(), replace(CONFIG, advantage=AdvantageConfig("rloo"), **GROUPS))
    batch = collect(of_tasks("s", "t", "u"))
    metrics = learner.update(batch)
    assert metrics.groups_of_one == 3
    assert "3 tasks have one rollout: their baseline is the rollout itself, nothing is learnt" in metrics.alarms
    assert learner.signals(batch).advantage_N.tolist() == [0.0] * len(batch)


def test_the_rollouts_of_a_task_are_compared_with_each_other_once_each() -> None:
    # Task s: .2 and .6 with one and two segments; t: 1.0 twice. r − mean: −.2, .2, 0, 0.
    batch = collect([
        rollout([prompt(1), said(2)], reward=0.2),
        rollout([prompt(1), said(2)], [prompt(3), said(4)], reward=0.6),
        *(replace(rollout([prompt(1), said(5)]), task=replace(TASK, id="other")) for _ in range(2)),
    ])  # fmt: skip
    learner = Learner(tiny(), replace(CONFIG, advantage=AdvantageConfig("mean"), **GROUPS))
    near(learner.signals(batch).advantage_N, whiten(torch.tensor([-0.2, 0.2, 0.2, 0.0, 0.0])))


# --- a shared trunk -----------------------------------------------------------------------------


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[bool, bool]:
    """Whether the head and whether the trunk have changed."""
    changed = {k: not torch.equal(before[k], after[k]) for k in before}
    head = any(x for k, x in changed.items() if k.startswith("critic."))
    return head, any(x for k, x in changed.items() if not k.startswith("critic."))


def test_warming_up_on_a_shared_trunk_moves_the_head_alone_and_later_updates_both() -> None:
    learner = Learner(tiny(), replace(CONFIG, critic=replace(SHARED, warmup_updates=1)))
    start = weights(learner)
    warmed = learner.update(collect(some_rollouts(4, 0)))
    between = weights(learner)
    learnt = learner.update(collect(some_rollouts(4, 1)))
    assert moved(start, between) == (True, False)
    assert moved(between, weights(learner)) == (True, True)
    assert (warmed.policy, warmed.critic_steps, warmed.policy_steps) == (None, 4, 0)
    assert (learnt.critic_steps, learnt.policy_steps) == (4, 2)


def test_on_a_shared_trunk_the_first_ratio_is_one_after_a_warm_up_too() -> None:
    learner = Learner(tiny(), replace(CONFIG, lr=1e-12, critic=replace(SHARED, warmup_updates=1)))
    batch = on_policy(learner.policy, collect(some_rollouts(4)))
    learner.update(batch)
    metrics = learner.update(batch)
    assert metrics.policy is not None
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert metrics.drift_max < 1e-5


def test_the_value_loss_of_a_shared_trunk_is_added_times_its_coefficient() -> None:
    # Equal rewards of .5 and V = 0: no advantage, and the value loss is ½·.25 on every token.
    equal_rewards = [replace(r, reward=Reward({"perf": 0.5}, {"perf": 1.0})) for r in some_rollouts(4)]
    learner = still(replace(CONFIG, critic=replace(SHARED, coef=0.1)))
    metrics = learner.update(on_policy(learner.policy, collect(equal_rewards)))
    assert metrics.policy is not None
    assert metrics.value_loss == pytest.approx(0.125, abs=1e-6)
    assert metrics.policy.loss == pytest.approx(0.0125, abs=1e-6)


# --- optimizers -----------------------------------------------------------------------------------


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    learner = Learner(tiny(), replace(CONFIG, optimizer=OptimizerConfig("muon"), lr=1e-3, critic_lr=1e-3))
    before = weights(learner)
    metrics = learner.update(on_policy(learner.policy, collect(some_rollouts(4))))
    after = weights(learner)
    # The first step of the critic reaches its head alone, which starts at zero.
    assert all(not torch.equal(before[k], after[k]) for k in before if not k.startswith("critic."))
    assert all(bool(x.isfinite().all()) for x in after.values())
    assert (metrics.policy_steps, metrics.skipped) == (2, 0)
    assert len(learner.policy_stepper.optimizers) == 2


@pytest.mark.parametrize(("reset", "steps"), [(True, 2), (False, 4)])
def test_moments_are_forgotten_with_each_update_where_that_is_asked_for(reset: bool, steps: int) -> None:
    learner = Learner(tiny(), replace(CONFIG, optimizer=OptimizerConfig(reset_moments=reset)))
    for k in range(2):
        learner.update(collect(some_rollouts(4, k)))
    for stepper in (learner.policy_stepper, learner.critic_stepper):
        counted = {int(s["step"]) for s in stepper.optimizer.state.values()}
        assert max(counted) == steps
        assert stepper.steps == 4


# --- corrections of the mismatch --------------------------------------------------------------------


def shifted(batch: Batch) -> Batch:
    """The sampler was twice as sure of every third token, and four times less of every fifth."""
    at_N = torch.arange(len(batch))
    gap_N = math.log(2.0) * (at_N % 3 == 0) - math.log(4.0) * (at_N % 5 == 0)
    return replace(batch, logp_rollout_N=batch.logp_rollout_N + gap_N)


VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dis": {"surrogate": SurrogateConfig("dis")},
    "k2.5": {"surrogate": SurrogateConfig("k2.5", square_coef=0.1)},
    "decoupled": {"surrogate": SurrogateConfig("decoupled", weight_cap=2.0), "old_logprobs": "recompute"},
    **{k: {"mismatch": MismatchConfig(k), "old_logprobs": "recompute"} for k in get_args(Kind)[1:]},
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_each_surrogate_and_correction_learns_with_the_loss_of_its_formula(name: str) -> None:
    learner = still(replace(CONFIG, minibatches=1, **VARIANTS[name]))
    batch = shifted(on_policy(learner.policy, collect(some_rollouts(4))))
    s, own_N = learner.signals(batch), logprobs(learner.policy, batch)
    loss_N = surrogate(learner.config.surrogate, own_N, s.logp_old_N, s.advantage_N, batch.logp_rollout_N).loss_N
    metrics = learner.update(batch)
    assert metrics.policy is not None
    # One count of all tokens divides, also of those that got a weight of 0.
    assert metrics.policy.loss == pytest.approx(float((s.weight_N * loss_N).sum() / len(batch)), abs=1e-5)
    assert metrics.rejected == pytest.approx(float((s.weight_N == 0).double().mean()))
    assert (metrics.rejected > 0) == (name in ("mis_token", "mis_sequence", "icepop"))
    assert math.isfinite(metrics.policy.grad_norm)
    assert (metrics.policy_steps, metrics.skipped) == (1, 0)
    assert metrics.drift_max == pytest.approx(math.log(4.0), abs=1e-4)


@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_the_ratio_that_is_clipped_is_to_the_old_policy_that_was_asked_for(old: Any) -> None:
    learner = still(replace(CONFIG, minibatches=1, old_logprobs=old))
    batch = shifted(on_policy(learner.policy, collect(some_rollouts(4))))
    want_N = logprobs(learner.policy, batch) if old == "recompute" else batch.logp_rollout_N
    near(learner.signals(batch).logp_old_N, want_N)
    metrics = learner.update(batch)
    assert metrics.policy is not None
    ratio_N = log_ratio(logprobs(learner.policy, batch), want_N).exp()
    assert metrics.policy.ratio_mean == pytest.approx(float(ratio_N.mean()), abs=1e-4)


def test_a_drift_between_sampler_and_learner_is_an_alarm_with_numbers() -> None:
    learner = still(replace(CONFIG, minibatches=1))
    own = on_policy(learner.policy, collect(some_rollouts(4)))
    assert learner.update(own).alarms == ()
    off = replace(own, logp_rollout_N=own.logp_rollout_N - 0.25)
    # e^.25 = 1.28: every ratio is outside.
    (line,) = learner.update(off).alarms
    assert line.startswith("drift between engine and learner: mean 0.2500 nats (bound 0.02), max 0.250 (1), 100.0% of")


# --- resumes ------------------------------------------------------------------------------------------

RESUMES: dict[str, dict[str, Any]] = {
    "shared": {"critic": replace(SHARED, warmup_updates=1)},
    "muon": {"optimizer": OptimizerConfig("muon", newton_schulz="two_phase")},
    "reset": {"optimizer": OptimizerConfig(reset_moments=True)},
    "groups": {"advantage": AdvantageConfig("grpo"), **GROUPS},
    "kl": {"kl": KLConfig(0.1, "k1", "reward")},
    "distilled": {"distill": DistillConfig((Teacher(P),), "full")},
    "decoupled": VARIANTS["decoupled"],
    "cosine": {"lr_decay": "cosine", "lr_steps": 6, "critic": CriticConfig(value_clip=0.2, warmup_updates=1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RESUMES))
def test_a_learner_goes_on_bitwise_from_its_saved_state(name: str) -> None:
    config = replace(CONFIG, lr=1e-3, **RESUMES[name])
    frozen = Frozen(tiny(7) if config.kl.coef else None, tuple(tiny(8) for _ in config.distill.teachers))
    batches = [collect(some_rollouts(4, seed=k)) for k in range(3)]
    through = Learner(tiny(), config, frozen=frozen)
    for batch in batches[:2]:
        through.update(batch)
    saved = io.BytesIO()
    torch.save(through.state_dict(), saved)
    resumed = Learner(tiny(seed=5), config, frozen=frozen)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert through.update(batches[2]) == resumed.update(batches[2])
    assert equal(weights(through), weights(resumed))
