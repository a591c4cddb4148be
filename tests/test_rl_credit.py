"""What an update made of each token: kept by rollout, whoever learnt from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.rl.batch import collect
from swarm.rl.credit import Credit, CreditError, path_of, read, write
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.ppo import PPOConfig
from tests.rl_cases import some_rollouts, tiny


def learnt(rollouts, **changes) -> tuple[Learner, Credit]:
    config = PPOConfig(critic=CriticConfig(warmup_updates=0), minibatches=2, micro_tokens=64)
    learner = Learner(tiny(), replace(config, **changes))
    learner.update(collect(rollouts))
    assert learner.credit is not None
    return learner, learner.credit


def test_every_action_token_has_its_rollout_among_all_its_advantage_value_and_ratio():
    rollouts = some_rollouts(4)
    rollouts[1] = replace(rollouts[1], reward=None)  # left out of the loss
    _, credit = learnt(rollouts)
    tokens = [sum(len(s.logprobs) for g in r.trace.segments for s in g.spans) for r in rollouts]
    assert np.bincount(credit.rollout_N).tolist() == [tokens[0], 0, tokens[2], tokens[3]]
    for name in ("advantage_N", "value_N", "ratio_N"):
        assert np.isfinite(getattr(credit, name)).all()
    assert credit.advantage_N.mean() == pytest.approx(0.0, abs=1e-5)  # whitened


def test_while_the_critic_warms_up_there_are_no_ratios():
    _, credit = learnt(some_rollouts(3), critic=CriticConfig(warmup_updates=1))
    assert np.isnan(credit.ratio_N).all()


def test_the_credit_of_several_processes_is_in_the_order_of_all_rollouts():
    def part(rollouts, base):
        x = np.arange(len(rollouts), dtype=np.float32) + base
        return Credit(np.asarray(rollouts, np.int32), x, x, x)

    joined = Credit.joined([((0, 3), part([0, 0, 1], 0)), ((1, 2), part([0, 1, 1], 10))])
    assert joined.rollout_N.tolist() == [0, 0, 1, 2, 2, 3]
    assert joined.value_N.tolist() == [0, 1, 10, 11, 12, 2]


def test_a_file_comes_back_as_it_was_and_a_damaged_one_is_one_line(tmp_path: Path):
    _, credit = learnt(some_rollouts(2))
    path = path_of(tmp_path / "iteration_0007.rollouts")
    assert path.name == "iteration_0007.credit.npz"
    write(path, credit)
    back = read(path)
    for name in Credit.__slots__:
        assert getattr(back, name).dtype == getattr(credit, name).dtype
        assert np.array_equal(getattr(back, name), getattr(credit, name), equal_nan=True)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CreditError, match=r"credit\.npz: no credit of tokens"):
            read(path)
