"""The critic's settings and its head; what it sees is tested with the update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swarm.rl.batch import collect
from swarm.rl.critic import Critic, CriticConfig, ValueHead
from swarm.rl.forward import hidden_states
from swarm.rl.rows import micro_batches
from tests.rl_cases import prompt, rollout, said, tiny


def test_a_value_head_starts_at_zero_and_answers_in_float32() -> None:
    value_n = ValueHead(4).values(torch.randn(3, 4, dtype=torch.bfloat16))
    assert value_n.tolist() == [0.0, 0.0, 0.0]
    assert value_n.dtype == torch.float32


def test_a_value_is_the_heads_product_and_bias() -> None:
    head = ValueHead(2)
    head.weight.data.copy_(torch.tensor([[2.0, -1.0]]))
    head.bias.data.fill_(0.5)
    # 2·3 − 1·4 + .5 = 2.5
    assert head.values(torch.tensor([[3.0, 4.0]])).tolist() == [2.5]


def test_the_first_gradient_reaches_the_head_and_not_the_trunk() -> None:
    head, h_nd = ValueHead(2), torch.ones(1, 2, requires_grad=True)
    (head.values(h_nd) - 1).square().sum().backward()
    assert h_nd.grad is not None
    assert h_nd.grad.tolist() == [[0.0, 0.0]]
    assert head.weight.grad is not None
    # d(v − 1)²/dw = 2·(0 − 1)·h = −2
    assert head.weight.grad.tolist() == [[-2.0, -2.0]]


def test_a_head_on_the_policys_trunk_gives_the_values_of_a_critic_with_all_its_layers() -> None:
    policy = tiny()
    (micro,) = micro_batches(collect([rollout([prompt(1, 2), said(3, 4)])]).rows, torch.arange(1), 99)
    critic, head = Critic(policy), ValueHead(policy.config.hidden_size)
    for h in (critic.head, head):
        h.weight.data.fill_(0.25)
    assert torch.equal(head.values(hidden_states(policy, micro)), critic.values(micro))


def test_a_critic_of_its_own_shares_no_weight_with_the_policy() -> None:
    policy = tiny()
    ours = {p.data_ptr() for p in Critic(policy, 1).parameters()}
    assert ours.isdisjoint({p.data_ptr() for p in policy.parameters()})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"trunk": "both"}, "trunk = 'both', want 'own' or 'shared'"),
        ({"layers": 0}, "layers = 0, want None or at least 1"),
        ({"epochs": 0}, "epochs = 0, want at least 1"),
        ({"warmup_epochs": 0}, "warmup_epochs = 0, want at least 1"),
        ({"warmup_updates": -1}, "warmup_updates = -1, want at least 0"),
        ({"value_clip": 0.0}, "value_clip = 0.0, want None or"),
        ({"value_clip": math.inf}, "value_clip = inf, want None or"),
        ({"coef": 0.0}, "coef = 0.0, want a finite number above 0"),
        ({"trunk": "shared"}, "layers = 2, want None with trunk = 'shared'"),
        ({"trunk": "shared", "layers": None, "epochs": 2}, "epochs = 2, want 1 with trunk = 'shared'"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^critic: {line}"):
        CriticConfig(**changes)


def test_a_shared_trunk_takes_one_pass_and_no_layers() -> None:
    assert CriticConfig(trunk="shared", layers=None).coef == 0.5
