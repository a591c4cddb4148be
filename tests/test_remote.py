"""A whole run whose rollouts are made by workers, and whose updates are shared by learners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes.config import Recipe
from recipes.placement import Placement
from recipes.remote import cluster_config, publish, requests_of
from recipes.train import train
from recipes.wide_search import wide_search
from swarm.records import read
from swarm.rundir import read_metrics
from swarm.types import Budget, Rollout
from tests.rl_cases import TASK
from tests.test_train import small


def run(folder: Path, placement: Placement, recipe: Recipe) -> tuple[list[dict[str, Any]], list[Rollout]]:
    """The metrics of each iteration, and all rollouts in order."""
    train(replace(recipe, placement=placement), folder, console=Console(quiet=True))
    return read_metrics(folder), [r for path in sorted((folder / "rollouts").glob("*.rollouts")) for r in read(path)]


def said(rollouts: Sequence[Rollout]) -> list[Any]:
    """All that is in rollouts and in those of their subagents but times and log-probabilities."""
    return [
        (
            r.task,
            r.trace.status,
            [s.ids for s in r.trace.segments],
            r.ledger.stages,
            r.table,
            r.reward,
            said(r.children),
        )
        for r in rollouts
    ]


def logprobs(rollouts: Sequence[Rollout]) -> list[float]:
    return [x for r in rollouts for s in r.trace.segments for x in s.logprobs]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="without the extra `ray`")
def test_workers_and_learners_make_the_run_that_one_process_makes(tmp_path: Path):
    small_one = small(wide_search())
    # With one minibatch the learners' shares of it are the whole of it.
    recipe = replace(small_one, iterations=2, ppo=replace(small_one.ppo, minibatches=1))
    alone, expected = run(tmp_path / "alone", Placement(), recipe)
    apart, made = run(tmp_path / "apart", Placement(workers=2, worker_cpus=0.5, learners=2, learner_cpus=0.5), recipe)
    assert said(made) == said(expected)
    # What else is in a batch changes the last digits.
    assert logprobs(made) == pytest.approx(logprobs(expected), abs=1e-4)
    assert [r["workers/up"] for r in apart] == [2, 2]
    assert [r["workers/lost"] for r in apart] == [0, 0]
    for name in ("optimizer_step", "train/tokens", "train/reward", "train/value_loss", "rollout/item_f1"):
        assert [r[name] for r in apart] == pytest.approx([r[name] for r in alone], abs=1e-4)


def test_requests_have_the_seeds_that_rollouts_here_have():
    limits = Budget(40, 8192, 300.0)
    first, second = requests_of(limits, [TASK, TASK], [10, 20], 5)
    assert first.budget == Budget(10, 8192, 300.0)
    assert second.budget.critical_steps == 20
    assert first.seed != second.seed
    assert requests_of(limits, [TASK], [10], 5) == [first]


def test_workers_share_what_is_made_at_once():
    config = cluster_config(replace(wide_search(), at_once=64, placement=Placement(workers=3, address="head:6379")))
    assert (config.workers, config.at_once, config.address) == (3, 22, "head:6379")


class Serves:
    """Workers whose policy is what they are told, as two of them report it."""

    def __init__(self, *policies: str) -> None:
        self.policies = policies

    async def update(self, weights: object, version: int) -> None:
        pass

    async def checksums(self) -> list[dict[str, str]]:
        return [{"policy": p, "": "f" * 64} for p in self.policies]


async def test_a_worker_that_serves_something_else_ends_the_run() -> None:
    here = {"policy": "a" * 64, "": "f" * 64}
    await publish(Serves("a" * 64, "a" * 64), {}, 3, here)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match="update to version 3: a worker serves 'policy' with sha256 bbbbbbbbbbbb, want aaaaaaaaaaaa"
    ):
        await publish(Serves("a" * 64, "b" * 64), {}, 3, here)  # type: ignore[arg-type]
    await publish(Serves("a" * 64), {}, 3, {**here, "of another cast": "c" * 64})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="serves 'policy' with sha256 aaaaaaaaaaaa, want nothing"):
        await publish(Serves("a" * 64), {}, 3, {})  # type: ignore[arg-type]
