"""Supervised steps: the loss, its weights, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.rl.batch import collect
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import SFTConfig, examples, sft_loss, sft_step, sft_stepper
from swarm.types import Trace
from tests.rl_cases import logprobs, prompt, rollout, said, seen, some_rollouts, tiny

CONFIG = SFTConfig(LrSchedule(1e-2), micro_tokens=64)


def test_the_loss_is_the_mean_negative_logprob_of_the_sampled_tokens() -> None:
    rollouts, model = some_rollouts(4), tiny()
    want = -float(logprobs(model, collect(rollouts)).mean())
    data = examples([r.trace for r in rollouts])
    metrics = sft_step(model, sft_stepper(model, CONFIG), CONFIG, data, torch.arange(len(data.rows)))
    assert metrics.loss == pytest.approx(want, abs=1e-5)
    assert metrics.actions == len(data.weight_N)
    assert metrics.tokens == len(data.rows.ids_L)


def test_a_turn_of_weight_zero_is_shown_but_not_imitated() -> None:
    def later(trace: Trace, turn: int) -> float:
        return float(turn > 0)

    one = rollout([prompt(1), said(2, 3), seen(4), said(5)], [prompt(6), said(7)])
    data = examples([one.trace], later)
    assert data.weight_N.tolist() == [0.0, 0.0, 1.0, 1.0]
    model = tiny()
    want = -float(logprobs(model, collect([one]))[2:].mean())
    assert sft_loss(model, CONFIG, data) == pytest.approx(want, abs=1e-5)


def test_the_weights_divide_by_their_sum() -> None:
    model, one = tiny(), rollout([prompt(1), said(2), seen(4), said(5)])
    a, b = (-logprobs(model, collect([one]))).tolist()
    data = examples([one.trace], lambda trace, turn: (1.0, 3.0)[turn])
    assert sft_loss(model, CONFIG, data) == pytest.approx((a + 3 * b) / 4, abs=1e-5)


def test_a_step_without_weights_changes_nothing() -> None:
    model = tiny()
    before = model.lm_head.weight.clone()
    data = examples([rollout([prompt(1), said(2)]).trace], lambda trace, turn: 0.0)
    stepper = sft_stepper(model, CONFIG)
    assert sft_step(model, stepper, CONFIG, data, torch.arange(1)).loss == 0.0
    assert torch.equal(before, model.lm_head.weight)
    assert stepper.steps == 0


def test_a_few_steps_learn_a_demonstration() -> None:
    model = tiny()
    data = examples([rollout([prompt(1, 2), said(3, 4, 5)]).trace])
    stepper = sft_stepper(model, CONFIG)
    losses = [sft_step(model, stepper, CONFIG, data, torch.arange(1)).loss for _ in range(12)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_steps_follow_the_schedule() -> None:
    model, config = tiny(), replace(CONFIG, lr=LrSchedule(1e-2, warmup=2))
    data, stepper = examples([rollout([prompt(1, 2), said(3)]).trace]), sft_stepper(model, config)
    rates = [sft_step(model, stepper, config, data, torch.arange(1)).lr for _ in range(3)]
    assert rates == [0.005, 0.01, 0.01]
    assert [g["lr"] for g in stepper.optimizer.param_groups] == [0.01, 0.01]


def test_a_bad_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_tokens = 0, want at least 1"):
        SFTConfig(micro_tokens=0)
