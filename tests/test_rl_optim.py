"""Which optimizer moves what, and Muon's step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swarm.rl.critic import Critic, ValueHead
from swarm.rl.optim import Muon, NewtonSchulz, OptimizerConfig, build, for_muon, orthogonal, trainable
from tests.rl_cases import tiny


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(rows: int, columns: int, smallest: float) -> torch.Tensor:
    """A matrix whose singular values fall evenly in their logarithm from 1 to `smallest`."""
    k = min(rows, columns)
    u, v = torch.linalg.qr(random(rows, k))[0], torch.linalg.qr(random(columns, k, seed=1))[0]
    return u @ torch.diag(torch.logspace(0, math.log10(smallest), k)) @ v.T


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(random(*shape).to(dtype))


def step(optimizer: torch.optim.Optimizer, p: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """How far one step with this gradient moves the weight."""
    before = p.detach().clone()
    p.grad = grad.to(p.dtype)
    optimizer.step()
    return p.detach() - before


# --- Newton–Schulz ------------------------------------------------------------------------


def test_jordans_five_steps_bring_the_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonal(spread(256, 64, 0.02)))
    assert values.min() >= 0.1
    assert values.max() <= 1.3


def test_two_phases_bring_the_singular_values_of_an_ill_conditioned_matrix_to_one() -> None:
    values = torch.linalg.svdvals(orthogonal(spread(256, 64, 1e-3), "two_phase"))
    assert (values - 1).abs().max() < 1e-2


def test_five_steps_on_one_by_one_are_the_polynomial_five_times() -> None:
    # x = 2 is scaled to 1; then x ← 3.4445x − 4.7750x³ + 2.0315x⁵: 1 → .7010, and so on.
    x = 1.0
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert orthogonal(torch.tensor([[2.0]]))[0, 0].item() == pytest.approx(x, abs=1e-5)


def test_the_last_two_steps_of_two_phases_leave_one_at_one() -> None:
    # 2 − 1.5 + 0.5 = 1, and the slope there is 2 − 4.5 + 2.5 = 0: what is near 1 comes nearer squared.
    assert orthogonal(torch.eye(1), "two_phase")[0, 0].item() == pytest.approx(1.0, abs=1e-2)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_two_phases_give_the_polar_factor_of_any_matrix(rows: int, columns: int, seed: int) -> None:
    x = random(rows, columns, seed=seed)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    if s.min() > 1e-2 * s.max():
        torch.testing.assert_close(orthogonal(x, "two_phase"), u @ v, atol=2e-2, rtol=0)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_a_tall_matrix_is_handled_as_its_transpose(rows: int, columns: int, seed: int) -> None:
    x = random(rows, columns, seed=seed)
    torch.testing.assert_close(orthogonal(x.T), orthogonal(x).T, atol=1e-4, rtol=0)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert orthogonal(torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3


# --- Muon ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_a_step_has_the_rms_of_adamws(shape: tuple[int, int]) -> None:
    # An orthogonal R×C matrix has RMS √(min/(R·C)) = 1/√max, times 0.2·√max: 0.2, times the rate.
    p = weight(*shape)
    moved = step(Muon([("w", p)], lr=0.01, newton_schulz="two_phase"), p, random(*shape, seed=1))
    assert moved.square().mean().sqrt().item() == pytest.approx(0.002, rel=0.01)


def test_weight_decay_uses_the_rate_as_it_is() -> None:
    # (1 − 0.1·0.5)·w, and the same step as without.
    decayed, plain = weight(4, 3), weight(4, 3)
    a = step(Muon([("w", decayed)], lr=0.1, weight_decay=0.5), decayed, random(4, 3, seed=1))
    b = step(Muon([("w", plain)], lr=0.1), plain, random(4, 3, seed=1))
    torch.testing.assert_close(a - b, -0.05 * random(4, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("nesterov", "weights"), [(True, (1.5, 1.75)), (False, (1.0, 1.5))])
def test_momentum_adds_up_the_gradients(nesterov: bool, weights: tuple[float, float]) -> None:
    # μ = ½, gradients g, g: B = 1, 1.5; with Nesterov G + μB = 1.5, 1.75.
    p, g = weight(2, 2), random(2, 2, seed=1)
    muon = Muon([("w", p)], lr=0.1, momentum=0.5, nesterov=nesterov)
    seen = [muon._direction(p, g) for _ in range(2)]  # pyright: ignore[reportPrivateUsage]
    for got, factor in zip([seen[0] if nesterov else g, seen[1]], weights, strict=True):
        torch.testing.assert_close(got, factor * g)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_momentum_is_not_changed_by_the_orthogonalisation(nesterov: bool, dtype: torch.dtype) -> None:
    # torch's own Muon divides the momentum by its norm in place for bf16 weights without Nesterov.
    p = weight(3, 4, dtype=dtype)
    muon = Muon([("w", p)], lr=0.1, momentum=0.5, nesterov=nesterov)
    for _ in range(2):
        step(muon, p, torch.ones(3, 4))
    assert muon.state[p]["momentum"].unique().tolist() == [1.5]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_the_steps_are_those_of_torchs_muon(nesterov: bool, shape: tuple[int, int]) -> None:
    ours, theirs = weight(*shape), weight(*shape)
    a = Muon([("w", ours)], lr=0.02, nesterov=nesterov, weight_decay=0.1)
    b = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(1, 4):
        x, y = step(a, ours, random(*shape, seed=seed)), step(b, theirs, random(*shape, seed=seed))
        # Theirs iterates in bf16, of eight bits.
        assert (x - y).norm() < 0.03 * y.norm()


@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 4)])
def test_muon_refuses_what_is_not_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="muon got norm.weight of shape .*, want 2 dimensions"):
        Muon([("norm.weight", weight(*shape))], lr=0.1)


# --- who moves what -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (16, 16), True),
        ("model.layers.1.mlp.down_proj.weight", (16, 24), True),
        ("trunk.model.embed_tokens.weight", (40, 16), False),
        ("lm_head.weight", (40, 16), False),
        ("value_head.weight", (1, 16), False),
        ("scalar.weight", (1, 16), False),
        ("model.norm.weight", (16,), False),
        ("convolution.weight", (4, 4, 3), False),
    ],
)
def test_muon_moves_hidden_matrices_alone(name: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert for_muon(name, weight(*shape)) == wanted


def test_every_parameter_of_a_critic_is_moved_by_exactly_one_optimizer() -> None:
    named = trainable(Critic(tiny()))
    muon, adamw = build(named, OptimizerConfig("muon"), 0.1)
    moved = [id(p) for o in (muon, adamw) for group in o.param_groups for p in group["params"]]
    assert sorted(moved) == sorted(id(p) for _, p in named)
    # Two layers of q, k, v, o, gate, up, down.
    assert (type(muon), len(muon.param_groups[0]["params"])) == (Muon, 14)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_has_one_dimension_does_not_decay(kind: Any) -> None:
    for optimizer in build(trainable(tiny()), OptimizerConfig(kind, weight_decay=0.1), 0.1):
        for group in optimizer.param_groups:
            assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.1}


def test_a_head_alone_has_no_matrix_for_muon() -> None:
    (only,) = build(trainable(ValueHead(8)), OptimizerConfig("muon"), 0.1)
    assert isinstance(only, torch.optim.AdamW)


def test_a_parameter_given_twice_and_a_frozen_network_are_refused() -> None:
    p = weight(2, 2)
    with pytest.raises(ValueError, match="parameter b is given twice"):
        trainable([("a", p), ("b", p)])
    with pytest.raises(ValueError, match="none of 2 parameters is trainable"):
        trainable(ValueHead(4).requires_grad_(False))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "adam"),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("max_grad_norm", 0.0),
        ("momentum", 1.0),
        ("newton_schulz", "svd"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^optimizer: {field} = .*, want "):
        OptimizerConfig(**{field: value})


def test_both_schemes_are_known_by_name() -> None:
    schemes: list[NewtonSchulz] = ["jordan", "two_phase"]
    assert [OptimizerConfig(newton_schulz=s).newton_schulz for s in schemes] == schemes
