"""The PPO update: what must hold before, at and after a step."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.rl.advantages import AdvantageConfig
from swarm.rl.batch import Batch, collect
from swarm.rl.critic import Critic, CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.losses import KLConfig
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.rows import micro_batches
from swarm.rl.signals import Frozen
from swarm.rl.surrogate import SurrogateConfig
from swarm.types import Rollout, Segment, Span
from tests.rl_cases import logprobs, on_policy, prompt, rollout, said, seen, some_rollouts, tiny

CONFIG = PPOConfig(critic=CriticConfig(warmup_updates=0), minibatches=2, micro_tokens=64)
UNCLIPPED = replace(CONFIG, minibatches=1, optimizer=OptimizerConfig(max_grad_norm=1e9))


def still(**changes: Any) -> Learner:
    """A learner whose steps are too small to move anything, so that every pass sees the first policy."""
    config = replace(CONFIG, lr=1e-12, critic_lr=1e-12, **changes)
    return Learner(tiny(), config)


def gradients(learner: Learner, batch: Batch) -> list[torch.Tensor]:
    """What the policy's optimizer is given in one update of one minibatch."""
    kept: list[torch.Tensor] = []
    step = learner.policy_stepper.optimizers[0].step
    learner.policy_stepper.optimizers[0].step = lambda: (  # type: ignore[method-assign]
        kept.extend(p.grad.clone() for p in learner.policy_stepper.parameters if p.grad is not None),
        step(),
    )[1]
    learner.update(batch)
    return kept


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    both = {**learner.policy.state_dict(), **{f"critic.{k}": v for k, v in learner.critic.state_dict().items()}}
    return {k: v.clone() for k, v in both.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_ratio_is_one_and_the_kl_zero_before_the_first_step() -> None:
    batch = collect(some_rollouts(6))
    learner = still()
    metrics = learner.update(on_policy(learner.policy, batch))
    assert metrics.policy is not None
    assert metrics.drift_max < 1e-5
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert metrics.policy.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics.policy.approx_kl) < 1e-5
    assert metrics.policy.stopped_fraction == 0.0


def test_logprobs_are_those_of_the_transformers_model_at_the_sampling_temperature() -> None:
    model, batch = tiny(), collect([rollout([prompt(1, 2, 3), said(4, 5), seen(6), said(7)])])
    with torch.no_grad():
        logits_TV = model(input_ids=batch.rows.ids_L[None]).logits[0]
    want = (logits_TV[[2, 3, 5]] / 0.7).log_softmax(-1)[range(3), [4, 5, 7]]
    assert logprobs(model, batch, temperature=0.7).tolist() == pytest.approx(want.tolist(), abs=1e-5)


def test_bf16_logprobs_stay_near_those_of_fp32_and_learn_without_a_warning() -> None:
    learner = Learner(tiny(), replace(CONFIG, bf16=True))
    metrics = learner.update(on_policy(learner.policy, collect(some_rollouts(4))))
    assert 0.0 < metrics.drift_mean < 0.05
    assert metrics.policy_steps == 2


def test_drift_is_measured_against_the_sampler_in_every_mode() -> None:
    batch = collect(some_rollouts(4))
    for changes in ({"critic": CriticConfig(warmup_updates=1)}, {"old_logprobs": "recompute"}, {}):
        learner = still(**changes, minibatches=1)
        shifted = on_policy(learner.policy, batch)
        shifted = replace(shifted, logp_rollout_N=shifted.logp_rollout_N - 0.25)
        metrics = learner.update(shifted)
        assert metrics.drift_mean == pytest.approx(0.25, abs=1e-5), changes
        assert metrics.drift_max == pytest.approx(0.25, abs=1e-5), changes


def test_recomputed_old_logprobs_make_the_first_ratio_one_whatever_the_sampler_said() -> None:
    metrics = still(old_logprobs="recompute").update(collect(some_rollouts(4)))
    assert metrics.policy is not None
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert metrics.drift_max > 0.1


def test_a_value_is_zero_at_first_and_does_not_see_its_own_token() -> None:
    critic = Critic(tiny())
    torch.nn.init.normal_(critic.head.weight)
    a, b = (collect([rollout([prompt(1, 2), said(3, x), seen(5), said(6)])]).rows for x in (4, 9))
    (micro_a,), (micro_b,) = (micro_batches(rows, torch.arange(1), 99) for rows in (a, b))
    value_a, value_b = critic.values(micro_a), critic.values(micro_b)
    assert (value_a == value_b).tolist() == [True, True, False]
    assert Critic(tiny()).values(micro_a).tolist() == [0.0, 0.0, 0.0]


def test_a_critic_may_be_shallower_than_the_policy_which_keeps_its_layers():
    policy = tiny()
    critic = Critic(policy, layers=1)
    assert len(critic.trunk.model.layers) == critic.trunk.config.num_hidden_layers == 1
    assert len(policy.model.layers) == policy.config.num_hidden_layers > 1


def test_the_first_updates_train_the_critic_alone() -> None:
    learner = Learner(tiny(), replace(CONFIG, critic=CriticConfig(warmup_updates=1, warmup_epochs=3)))
    before = weights(learner)
    metrics = learner.update(collect(some_rollouts(4)))
    after = weights(learner)
    assert all(
        torch.equal(before[k], after[k]) == (not k.startswith("critic.head")) for k in before if "trunk" not in k
    )
    assert (metrics.policy, metrics.policy_steps, metrics.critic_steps) == (None, 0, 6)
    assert learner.update(collect(some_rollouts(4))).policy_steps == 2


def test_every_turn_of_a_rollout_gets_the_same_return() -> None:
    # A spawning turn, a turn of search and the answer, then a second rollout; the critic starts at V = 0.
    spawned = rollout([prompt(1), said(2, 3), seen(4), said(5), seen(6), said(7)], reward=0.6)
    learner = still()
    signals = learner.signals(collect([spawned, rollout([prompt(1), said(2)], reward=0.2)]))
    assert signals.target_N.tolist() == pytest.approx([0.6, 0.6, 0.6, 0.6, 0.2])
    # Whitened over (.6 ×4, .2): μ = .52, σ² = (4·.0064 + .1024)/5 = .0256
    assert signals.advantage_N.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, -2.0], abs=1e-5)


def test_a_truncated_rollout_is_bootstrapped_with_the_value_after_its_last_observation() -> None:
    cut = rollout([prompt(1), said(2), seen(3)], reward=9.0, status="truncated")
    learner = still()
    learner.critic.head.bias.data.fill_(0.4)
    signals = learner.signals(collect([cut, rollout([prompt(1), said(2)], reward=0.6)]))
    # V ≡ .4: nothing is known at the cut, and .6 − .4 is the other advantage.
    assert signals.target_N.tolist() == pytest.approx([0.4, 0.6])


def test_a_failed_rollout_changes_nothing() -> None:
    some = some_rollouts(4)
    broken = rollout([prompt(1), said(2, 3)], reward=-100.0, status="error")
    a, b = Learner(tiny(), CONFIG), Learner(tiny(), CONFIG)
    a.update(collect(some))
    assert b.update(collect([*some, broken])).left_out == {"failed": 1}
    assert equal(weights(a), weights(b))


def test_an_empty_batch_changes_nothing() -> None:
    learner = Learner(tiny(), CONFIG)
    before = weights(learner)
    metrics = learner.update(collect([]))
    assert equal(before, weights(learner))
    assert (metrics.tokens, metrics.policy_steps, metrics.skipped) == (0, 0, 0)


def test_the_gradient_does_not_depend_on_the_micro_batches() -> None:
    batch = collect(some_rollouts(8))
    whole = gradients(Learner(tiny(), replace(UNCLIPPED, micro_tokens=10**6)), batch)
    single = gradients(Learner(tiny(), replace(UNCLIPPED, micro_tokens=1)), batch)
    assert len(whole) == len(single) > 0
    for a, b in zip(whole, single, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_the_gradient_does_not_depend_on_the_order_of_the_rollouts() -> None:
    some = some_rollouts(6)
    there = gradients(Learner(tiny(), UNCLIPPED), collect(some))
    back = gradients(Learner(tiny(), UNCLIPPED), collect(some[::-1]))
    for a, b in zip(there, back, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@settings(max_examples=6, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_splitting_a_trace_where_the_context_stays_leaves_signals_and_loss(gamma: float, lam: float, seed: int) -> None:
    whole = some_rollouts(3, seed)
    learner = Learner(tiny(), replace(CONFIG, advantage=AdvantageConfig(gamma=gamma, lam=lam, lam_critic=lam)))
    torch.nn.init.normal_(learner.critic.head.weight)
    a, b = learner.signals(collect(whole)), learner.signals(collect([split(r) for r in whole]))
    torch.testing.assert_close(a.value_N, b.value_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.target_N, b.target_N, atol=1e-4, rtol=0)
    torch.testing.assert_close(a.advantage_N, b.advantage_N, atol=1e-3, rtol=0)


def test_splitting_a_trace_leaves_the_gradient_of_the_policy() -> None:
    whole = some_rollouts(3)
    config = replace(UNCLIPPED, advantage=AdvantageConfig(lam=0.9))
    one = gradients(Learner(tiny(), config), collect(whole))
    many = gradients(Learner(tiny(), config), collect([split(r) for r in whole]))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def split(r: Rollout) -> Rollout:
    """Each turn in a segment of its own, opened by the same visible context."""
    segments: list[Segment] = []
    for segment in r.trace.segments:
        context: tuple[int, ...] = ()
        for span in segment.spans:
            if span.kind == "sampled":
                segments.append(Segment((Span("prompt", context), span), "compaction"))
            context += span.ids
    return replace(r, trace=replace(r.trace, segments=tuple(segments)))


def test_nothing_on_an_observation_slot_is_read() -> None:
    # The ids that follow the last action of a row are seen by nothing.
    short = [rollout([prompt(1), said(2, 3)], reward=0.3), rollout([prompt(1), said(5)], reward=0.9)]
    long = [
        rollout([prompt(1), said(2, 3), seen(7, 8)], reward=0.3),
        rollout([prompt(1), said(5), seen(9)], reward=0.9),
    ]
    a, b = Learner(tiny(), CONFIG), Learner(tiny(), CONFIG)
    a.update(collect(short))
    b.update(collect(long))
    for name, x in weights(a).items():
        torch.testing.assert_close(x, weights(b)[name], atol=1e-5, rtol=0)


def poisoned(learner: Learner) -> None:
    learner.critic.head.bias.data.fill_(math.nan)


def endless(learner: Learner) -> None:
    learner.policy.model.norm.weight.data.fill_(math.inf)


@pytest.mark.parametrize("poison", [poisoned, endless])
def test_a_step_that_is_not_finite_is_skipped_and_counted(poison: Callable[[Learner], None]) -> None:
    learner = Learner(tiny(), CONFIG)
    poison(learner)
    before = weights(learner)
    metrics = learner.update(collect(some_rollouts(4)))
    after = weights(learner)
    assert all(torch.equal(before[k], after[k]) for k in before if "critic." not in k and "inf" not in k)
    assert metrics.policy_steps == 0
    assert metrics.skipped >= 2


def test_a_good_action_becomes_likelier_and_a_bad_one_less_likely() -> None:
    batch = collect([rollout([prompt(1), said(2)], reward=1.0), rollout([prompt(1), said(3)], reward=0.0)])
    learner = Learner(tiny(), replace(CONFIG, minibatches=1))
    before = logprobs(learner.policy, batch)
    learner.update(replace(batch, logp_rollout_N=before))
    assert (logprobs(learner.policy, batch) > before).tolist() == [True, False]


def test_a_reference_holds_the_policy_back_and_is_wanted_exactly_with_its_coefficient() -> None:
    with pytest.raises(ValueError, match=r"kl.coef = 0\.1 .*want both or neither"):
        Learner(tiny(), replace(CONFIG, kl=KLConfig(0.1)))
    learner = Learner(tiny(), replace(CONFIG, kl=KLConfig(0.1)), frozen=Frozen(reference=tiny(seed=1)))
    metrics = learner.update(on_policy(learner.policy, collect(some_rollouts(4))))
    assert metrics.policy is not None
    assert metrics.policy.kl_reference > 0.0


def test_two_updates_are_one_update_a_save_a_load_and_one_update_bitwise() -> None:
    config = replace(CONFIG, lr=1e-3, lr_warmup=3)
    batches = [collect(some_rollouts(5, seed=k)) for k in range(2)]
    through = Learner(tiny(), config)
    through.update(batches[0])
    saved = io.BytesIO()
    torch.save(through.state_dict(), saved)
    through.update(batches[1])
    resumed = Learner(tiny(seed=5), config)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    resumed.update(batches[1])
    assert equal(weights(through), weights(resumed))
    assert resumed.step == through.step == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"truncated": "guess"}, "truncated = 'guess', want 'bootstrap' or 'leave_out'"),
        ({"advantage": AdvantageConfig("mean")}, "truncated .* = 'bootstrap', want 'leave_out'"),
        ({"surrogate": SurrogateConfig("dis"), "old_logprobs": "recompute"}, "old_logprobs = 'recompute' .*'rollout'"),
        ({"max_staleness": -1}, "max_staleness = -1, want a finite number of at least 0"),
        ({"minibatches": 0}, "minibatches = 0, want at least 1"),
        ({"old_logprobs": "guess"}, "old_logprobs = 'guess', want 'rollout' or 'recompute'"),
        ({"temperature": 0.0}, "temperature = 0.0, want a finite number above 0"),
    ],
)
def test_a_bad_setting_is_refused_with_the_value_seen_and_the_one_wanted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)
