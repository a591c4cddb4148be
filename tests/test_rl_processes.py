"""Two processes make the step that one would make: the same gradient, the same metrics."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from accelerate import Accelerator

from swarm.rl.batch import collect
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from tests.rl_cases import some_rollouts, tiny

CONFIG = PPOConfig(
    lr=1e-3,
    critic_lr=1e-3,
    critic=CriticConfig(warmup_updates=0),
    optimizer=OptimizerConfig(max_grad_norm=1e9),
    minibatches=1,
    micro_tokens=48,
)


def learn(rank: int, world: int, seed: int) -> dict[str, Any]:
    """One update on this process's share of seven uneven rollouts; what AdamW was given is its first moment / 0.1."""
    torch.set_num_threads(1)
    learner = Learner(tiny(seed), CONFIG, Accelerator(cpu=True))
    metrics = learner.update(collect(some_rollouts(7)[rank::world]))
    moments = [
        s["exp_avg"]
        for stepper in (learner.policy_stepper, learner.critic_stepper)
        for optimizer in stepper.optimizers
        for s in optimizer.state.values()
    ]
    assert metrics.policy is not None
    numbers = [metrics.tokens, metrics.rollouts, metrics.reward, metrics.value_loss, metrics.drift_max]
    numbers += [metrics.policy.loss, metrics.policy.ratio_max, metrics.policy.entropy, metrics.policy.grad_norm]
    return {"gradients": torch.cat([m.flatten() / 0.1 for m in moments]), "numbers": numbers}


def worker(rank: int, port: int, folder: str) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in local.items()})
    # Only the first process has the right weights: the others must be given them.
    torch.save(learn(rank, 2, seed=rank), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_uneven_shares_make_the_gradient_of_one(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    one = learn(0, 1, seed=0)
    for rank in range(2):
        two = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(two["gradients"], one["gradients"], atol=1e-5, rtol=0)
        assert two["numbers"] == pytest.approx(one["numbers"], abs=1e-4)
