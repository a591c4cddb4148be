"""A step: its rate, its clip, what is skipped, and that a saved state goes on exactly."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from swarm.rl.critic import ValueHead
from swarm.rl.optim import Kind, OptimizerConfig
from swarm.rl.processes import alone
from swarm.rl.schedule import LrSchedule
from swarm.rl.stepper import Stepper
from swarm.states import load_state, save_state
from tests.rl_cases import tiny

KINDS: tuple[Kind, ...] = ("adamw", "muon")
WARM = LrSchedule(0.01, warmup=4)


def network(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"trunk": nn.Linear(4, 3), "value_head": ValueHead(3)})


def stepper(net: nn.Module, kind: Kind = "adamw", **changes: Any) -> Stepper:
    return Stepper(net, WARM, alone(), replace(OptimizerConfig(kind), **changes))


def learn(step: Stepper, net: nn.ModuleDict, seed: int) -> float:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    step.backward((net["value_head"](net["trunk"](x)) - 1).square().sum())
    return step.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_group_follows_the_schedule(kind: Kind) -> None:
    net = network()
    step = stepper(net, kind)
    for k, rate in enumerate([0.0025, 0.005, 0.0075, 0.01, 0.01]):
        learn(step, net, k)
        assert {group["lr"] for o in step.optimizers for group in o.param_groups} == {rate}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trunk_and_its_value_head_both_move(kind: Kind) -> None:
    net = network()
    step, before = stepper(net, kind), weights(net)
    learn(step, net, 0)  # the head is zero, so that the trunk has no gradient yet
    learn(step, net, 1)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_named_parameters_of_several_networks_step_as_one() -> None:
    net, twin = network(), network()
    listed = [(f"{part}.{name}", p) for part in twin for name, p in twin[part].named_parameters()]
    a, b = stepper(net, "muon"), Stepper(listed, WARM, alone(), OptimizerConfig("muon"))
    for k in range(3):
        assert learn(a, net, k) == learn(b, twin, k)
    assert equal(weights(net), weights(twin))


def test_the_norm_is_that_of_all_parameters_and_clips_them_together() -> None:
    # Gradients 3 and 4: norm 5, clipped to 1: AdamW's first moment is a tenth of 0.6 and 0.8.
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))
    step = Stepper([("a", a), ("b", b)], WARM, alone())
    step.backward(3 * a.sum() + 4 * b.sum())
    assert step.step() == 5.0
    assert [float(step.optimizer.state[p]["exp_avg"]) for p in (a, b)] == pytest.approx([0.06, 0.08], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_but_the_count(bad: float) -> None:
    net = network()
    step, before = stepper(net, "muon"), weights(net)
    step.backward(net["trunk"].weight.sum() + bad)  # the gradient is finite
    assert not math.isfinite(step.step())
    assert (step.steps, step.skipped) == (0, 1)
    assert equal(before, weights(net))
    learn(step, net, 0)
    assert step.steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_gradient_stays_as_it_is_even_under_decay(kind: Kind) -> None:
    net = network()
    step, before = stepper(net, kind, weight_decay=0.5), net["trunk"].weight.detach().clone()
    step.backward(net["value_head"].bias.sum())
    step.step()
    assert torch.equal(before, net["trunk"].weight)
    assert net["value_head"].bias.item() < 0


# --- several processes ------------------------------------------------------------------


@dataclass
class Pair:
    """The accelerator of one of two processes; `other` is what the second one brings to a sum."""

    other: Tensor
    num_processes: int = 2

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return x + self.other


def paired(net: nn.Module, *, failed: bool, has: tuple[float, ...], grads: tuple[float, ...]) -> Stepper:
    other = torch.tensor([float(failed), *has, *grads])
    return Stepper(net, WARM, cast(Accelerator, Pair(other)), OptimizerConfig(max_grad_norm=1e9, weight_decay=0.5))


def test_the_gradient_is_the_sum_of_both_processes() -> None:
    net = ValueHead(1)
    step = paired(net, failed=False, has=(0.0, 1.0), grads=(0.0, 4.0))
    step.backward(3 * net.weight.sum() - net.bias.sum())
    assert step.step() == pytest.approx(math.hypot(3, -1 + 4))


def test_a_parameter_without_gradient_in_both_processes_is_left_alone() -> None:
    net = nn.Linear(1, 1)
    step, before = paired(net, failed=False, has=(0.0, 0.0), grads=(0.0, 0.0)), net.weight.detach().clone()
    step.backward(net.bias.sum())
    step.step()
    assert torch.equal(before, net.weight)


def test_a_failure_of_the_other_process_skips_the_step_here() -> None:
    net = nn.Linear(1, 1)
    step, before = paired(net, failed=True, has=(1.0, 1.0), grads=(1.0, 1.0)), weights(net)
    step.backward(net(torch.ones(1, 1)).sum())
    assert math.isnan(step.step())
    assert (step.steps, step.skipped) == (0, 1)
    assert equal(before, weights(net))


# --- state --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_two_a_save_a_load_and_one_bitwise(kind: Kind, tmp_path: Path) -> None:
    whole, part = network(), network()
    a, b = stepper(whole, kind), stepper(part, kind)
    for k in range(2):
        learn(a, whole, k)
        learn(b, part, k)
    save_state(tmp_path / "step_2", {"net": part.state_dict(), "stepper": b.state_dict()})
    state = load_state(tmp_path / "step_2")
    again = network(seed=1)
    c = stepper(again, kind)
    again.load_state_dict(state["net"])
    c.load_state_dict(state["stepper"])
    assert learn(a, whole, 9) == learn(c, again, 9)
    assert equal(weights(whole), weights(again))
    assert (a.steps, a.lr) == (c.steps, c.lr)


def test_a_bf16_weight_keeps_its_momentum_in_float32_over_a_resume() -> None:
    net = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
    a, b = stepper(net, "muon"), stepper(net, "muon")
    a.backward(net(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    a.step()
    b.load_state_dict(a.state_dict())
    kept, want = (s.optimizer.state[net.weight]["momentum"] for s in (b, a))
    assert kept.dtype == torch.float32
    assert torch.equal(kept, want)


def test_a_loaded_state_shares_no_memory_with_what_it_was_loaded_from() -> None:
    net = network()
    a, b = stepper(net), stepper(network())
    learn(a, net, 0)
    b.load_state_dict(a.state_dict())
    before = b.optimizer.state[b.parameters[0]]["exp_avg"].clone()
    learn(a, net, 1)
    assert torch.equal(before, b.optimizer.state[b.parameters[0]]["exp_avg"])


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_the_moments_makes_the_next_step_a_first_one_at_the_rate_it_had(kind: Kind) -> None:
    net, fresh = network(), network()
    old, new = stepper(net, kind), stepper(fresh, kind)
    for k in range(4):
        learn(old, net, k)
    old.reset_moments()
    fresh.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})
    new.steps = old.steps
    learn(old, net, 9)
    learn(new, fresh, 9)
    assert equal(weights(net), weights(fresh))
    assert old.steps == 5


def changed(state: Mapping[str, Any], case: str) -> dict[str, Any]:
    first = next(iter(state["shapes"]))
    return {
        "a missing field": {k: v for k, v in state.items() if k != "steps"},
        "another kind": {**state, "kind": "muon"},
        "another network": {**state, "shapes": {f"x.{k}": v for k, v in state["shapes"].items()}},
        "a parameter too few": {**state, "shapes": dict(list(state["shapes"].items())[1:])},
        "another shape": {**state, "shapes": {**state["shapes"], first: (9, 9)}},
        "moments of another shape": {**state, "moments": {first: {"exp_avg": torch.zeros(9)}}},
        "moments of nothing": {**state, "moments": {"x": {"exp_avg": torch.zeros(9)}}},
    }[case]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("a missing field", "no field 'steps', want"),
        ("another kind", "kind = 'muon', want 'adamw'"),
        ("another network", r"x\.trunk\.weight \(3, 4\), want no such parameter"),
        ("a parameter too few", r"trunk\.weight missing, want \(3, 4\)"),
        ("another shape", r"trunk\.weight \(9, 9\), want \(3, 4\)"),
        ("moments of another shape", r"exp_avg of trunk\.weight \(9,\), want \(3, 4\)"),
        ("moments of nothing", r"exp_avg of x \(9,\), want no such parameter"),
    ],
)
def test_a_foreign_state_is_refused_in_one_line_and_changes_nothing(case: str, line: str) -> None:
    net = network()
    step = stepper(net)
    learn(step, net, 0)
    before = io.BytesIO()
    torch.save(step.state_dict(), before)
    with pytest.raises(ValueError, match=f"^optimizer state: {line}") as e:
        step.load_state_dict(changed(step.state_dict(), case))
    assert "\n" not in str(e.value)
    after = io.BytesIO()
    torch.save(step.state_dict(), after)
    assert before.getvalue() == after.getvalue()


def test_muon_trains_a_language_model() -> None:
    model = tiny()
    step = Stepper(model, LrSchedule(0.02), alone(), OptimizerConfig("muon"))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    losses: list[float] = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
    assert losses[-1] < 0.5 * losses[0]
