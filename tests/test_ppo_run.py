"""The one training loop in its other settings: collection that overlaps learning, groups, teachers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from recipes.config import SHIPPED, Recipe
from recipes.train import train
from recipes.wide_search import wide_search
from swarm.folders import CheckpointError
from swarm.records import read
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.distill import DistillConfig, Teacher
from swarm.rundir import read_metrics
from tests.test_train import small

QUIET = Console(quiet=True)


@pytest.mark.slow
def test_collection_overlaps_learning_and_tokens_keep_the_version_that_sampled_them(tmp_path: Path) -> None:
    recipe = small(wide_search())
    recipe = replace(recipe, iterations=4, ppo=replace(recipe.ppo, max_staleness=1))
    train(recipe, tmp_path / "run", console=QUIET)
    rows = read_metrics(tmp_path / "run")
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4]
    # The first batch is of the weights that learn from it; any later one may be begun an update too early.
    assert rows[0]["train/staleness"] == 0
    assert {r["train/staleness"] for r in rows[1:]} == {1}
    assert all("count/left_out_stale" not in r for r in rows)
    last = list(read(tmp_path / "run" / "rollouts" / "iteration_0004.rollouts"))
    versions = {s.version for r in last for g in r.trace.segments for s in g.spans if s.kind == "sampled"}
    assert versions <= {2, 3}
    assert min(versions) == 2


@pytest.mark.slow
def test_groups_without_a_critic_train_in_the_same_loop(tmp_path: Path) -> None:
    recipe = small(wide_search())
    ppo = replace(recipe.ppo, advantage=AdvantageConfig("rloo"), truncated="leave_out")
    train(replace(recipe, iterations=1, group=2, ppo=ppo), tmp_path / "run", console=QUIET)
    (row,) = read_metrics(tmp_path / "run")
    assert (row["train/critic_steps"], row["train/groups_of_one"], row["optimizer_step"]) == (0, 0, 2)
    (path,) = (tmp_path / "run" / "rollouts").glob("*.rollouts")
    tasks = [r.task.id for r in read(path)]
    assert tasks[0] == tasks[1] != tasks[2] == tasks[3]


def test_a_baseline_of_a_group_wants_more_than_one_rollout_of_a_task() -> None:
    ppo = replace(wide_search().ppo, advantage=AdvantageConfig("mean"), truncated="leave_out")
    with pytest.raises(ValueError, match=r"group = 1 with ppo\.advantage\.form = 'mean', want 2 or more"):
        replace(wide_search(), ppo=ppo)
    with pytest.raises(ValueError, match="episodes = 64, want a multiple of group = 3"):
        replace(wide_search(), group=3)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(SHIPPED, teacher)
    raw = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (teacher / "tokenizer.json").write_text(json.dumps(raw))
    (teacher / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"distill: teacher .* want .* as the policy's tokenizer has"):
        train(_taught(teacher), tmp_path / "run", console=QUIET)


def _taught(teacher: Path) -> Recipe:
    recipe = small(wide_search())
    return replace(recipe, ppo=replace(recipe.ppo, distill=DistillConfig((Teacher(teacher),))))


def test_the_learner_takes_the_temperature_that_the_policy_is_sampled_at() -> None:
    recipe = wide_search()
    with pytest.raises(ValueError, match=r"ppo\.temperature = 0\.7 with main\.temperature = 1\.0, want the same"):
        replace(recipe, ppo=replace(recipe.ppo, temperature=0.7))
