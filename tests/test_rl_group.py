"""Learners in several processes: the update of one, and an end with a cause when one of them dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from swarm.rl.batch import collect
from swarm.rl.critic import CriticConfig
from swarm.rl.group import LearnerGroup, local_group, shards
from swarm.rl.learner import Learner
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.ranks import LearnerError, LearnerLost, LocalRanks
from swarm.types import Rollout
from tests.fake_ranks import Fails
from tests.rl_cases import TASK, prompt, rollout, said, some_rollouts, tiny

CONFIG = PPOConfig(
    lr=1e-3,
    critic_lr=1e-3,
    critic=CriticConfig(warmup_updates=0),
    optimizer=OptimizerConfig(max_grad_norm=1e9),
    minibatches=1,
    max_staleness=2,
    micro_tokens=48,
)


def of_task(name: str, *lengths: int) -> list[Rollout]:
    made = [rollout([prompt(1), said(*range(n - 1))]) for n in lengths]
    return [replace(r, task=replace(TASK, id=name)) for r in made]


def eight() -> list[Rollout]:
    """Rollouts of five tasks, uneven, one of which failed."""
    made = [replace(r, task=replace(TASK, id=f"t{k % 5}")) for k, r in enumerate(some_rollouts(8))]
    return [*made, replace(made[0], trace=replace(made[0].trace, status="error"))]


def make(accelerator: Accelerator) -> Learner:
    """The learner of a rank. Only the first has the right weights: the others must be given them."""
    return Learner(tiny(accelerator.process_index), CONFIG, accelerator)


def numbers(metrics: Any) -> list[float]:
    assert metrics.policy is not None
    of_all = [metrics.tokens, metrics.rollouts, metrics.reward, metrics.value_loss, metrics.explained_variance]
    return [*of_all, metrics.drift_max, metrics.policy.loss, metrics.policy.ratio_max, metrics.policy.grad_norm]


def check_as_one(group: LearnerGroup) -> None:
    """Two updates, with a save and a load between them, are those of one learner."""
    alone = Learner(tiny(0), CONFIG, Accelerator(cpu=True))
    for _ in range(2):
        metrics, weights = group.update(eight())
        expected = alone.update(collect(eight(), CONFIG.truncated, alone.oldest))
        assert numbers(metrics) == pytest.approx(numbers(expected), abs=1e-4)
        assert metrics.left_out == expected.left_out == {"failed": 1}
        assert (group.step, group.updates) == (alone.step, alone.updates)
        plain = alone.policy.state_dict()
        assert weights.keys() == plain.keys()
        for name, x in plain.items():
            # AdamW divides by the size of the gradient, which magnifies what rounding leaves of the smallest ones.
            torch.testing.assert_close(weights[name], x, atol=2e-4, rtol=0)
        group.load_state_dict(group.state_dict())
        assert all(torch.equal(x, weights[name]) for name, x in group.weights().items())
    state, expected = group.state_dict(), alone.state_dict()
    for name, kept in expected["policy_stepper"]["moments"].items():
        torch.testing.assert_close(
            state["policy_stepper"]["moments"][name]["exp_avg"], kept["exp_avg"], atol=1e-6, rtol=0
        )


def test_shards_are_even_keep_tasks_together_and_lose_nothing():
    rollouts = [*of_task("a", 8, 8), *of_task("b", 9), *of_task("c", 4), *of_task("a", 2), *of_task("d", 5)]
    # a: 18 tokens, b: 9, d: 5, c: 4; a to the first, then b, d and c to the second.
    assert shards(rollouts, 2) == [[0, 1, 4], [2, 3, 5]]
    assert shards(rollouts, 1) == [[0, 1, 2, 3, 4, 5]]
    assert shards(of_task("a", 3), 2) == [[0], []]


@pytest.mark.slow
def test_two_processes_learn_as_one():
    with local_group(make, 2, threads=1, seconds=240) as group:
        check_as_one(group)
        # One task is on one rank; the other has nothing to learn from, and takes the same step.
        before = group.step
        group.update([replace(r, task=TASK) for r in some_rollouts(3)])
        assert group.step == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("die", "learners: rank 1 of 2 died by SIGKILL"),
        ("exit", "learners: rank 1 of 2 died with exit code 3"),
        ("raise", "learners: rank 1 of 2 raised ZeroDivisionError: of rank 1"),
        ("hang", "learners: add was not done after 0 s"),
    ],
)
def test_one_that_fails_ends_the_call_with_its_cause(how: str, line: str):
    ranks = LocalRanks(partial(Fails, how), 2)
    processes = list(ranks._processes)
    try:
        assert ranks.call("add", [(1,), (2,)], 120) == [1, 12]
        assert ranks.call("add", [(5,)], 120) == [5]
        with pytest.raises(LearnerError, match=line) as caught:
            ranks.call("add", [(0,), (0,)], 0.01 if how == "hang" else 120)
        # What one raised is a bug and has a traceback; that one is gone is a line for the user.
        assert isinstance(caught.value, LearnerLost) == (how != "raise")
    finally:
        ranks.close()
    assert not any(p.is_alive() for p in processes)
    with pytest.raises(LearnerLost, match="learners: the group is closed"):
        ranks.call("add", [(1,)], 120)


class Recorded:
    """Ranks in this process, which fail when they are told to."""

    def __init__(self, *fail: str) -> None:
        self.fail, self.closed = fail, False

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        if method in self.fail:
            raise LearnerLost(f"learners: rank 1 of 2 died in {method}")
        return ["127.0.0.1:1"] if method == "listen" else [(0, 0)] * 2

    def close(self) -> None:
        self.closed = True


def test_a_group_that_lost_a_learner_is_closed_whenever_that_was():
    at_start = Recorded("join")
    with pytest.raises(LearnerLost, match="died in join"):
        LearnerGroup(at_start, 2, 10)
    assert at_start.closed
    later = Recorded("update")
    group = LearnerGroup(later, 2, 10)
    with pytest.raises(LearnerLost, match="died in update"):
        group.update(eight())
    assert later.closed


def test_a_factory_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="want one that can be pickled"):
        LocalRanks(lambda rank, host, local: Fails("die", rank, host, local), 2)


PARENT = """
import time
from functools import partial
from swarm.rl.ranks import LearnerError, LearnerLost, LocalRanks
from tests.fake_ranks import Fails
if __name__ == "__main__":
    ranks = LocalRanks(partial(Fails, "hang"), 2)
    ranks.call("add", [(1,), (1,)], 100)
    print(*(p.pid for p in ranks._processes), flush=True)
    ranks.call("add", [(0,), (0,)], 100)
"""


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_learners_end_with_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pids = [int(x) for x in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        # Their end closes the last copies of the pipe that they write to.
        parent.stdout.read()
    deadline = time.monotonic() + 60
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(running(pid) for pid in pids)
