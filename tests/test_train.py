"""A whole run at small scale: trained, killed hard, gone on with, evaluated and reported."""

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from recipes.config import Evaluation, Recipe, TaskMix
from recipes.grid.runs import Asked, measure, plan
from recipes.metric_names import unknown
from recipes.train import train
from recipes.wide_search import single_agent, wide_search
from swarm.records import read
from swarm.rundir import RunDirError, read_metrics

SMALL = [
    *("--iterations", "3", "--episodes", "4", "--checkpoint_every", "1", "--wandb", "disabled", "--threads", "1"),
    *("--world.families", '["isotope"]', "--world.groups_per_band", "8", "--tasks.rows", "[3, 10]"),
    *("--ppo.critic.warmup_updates", "1", "--ppo.minibatches", "2", "--parl.anneal_steps", "4"),
    *("--evaluation.tasks", "4", "--evaluation.wide_tasks", "2", "--evaluation.during", "2"),
    *("--evaluation.rows", "[3, 10]", "--evaluation.wide_rows", "[5, 10]"),
    *("--evaluation.sweep_swarm", "[6, 12]", "--evaluation.sweep_single", "[6, 12]"),
]


def small(recipe: Recipe) -> Recipe:
    """What SMALL says, as a recipe."""
    return replace(
        recipe,
        iterations=3,
        episodes=4,
        checkpoint_every=1,
        wandb="disabled",
        threads=1,
        world=replace(recipe.world, families=("isotope",), groups_per_band=8),
        tasks=replace(recipe.tasks, rows=(3, 10)),
        ppo=replace(recipe.ppo, critic=replace(recipe.ppo.critic, warmup_updates=1), minibatches=2),
        parl=replace(recipe.parl, anneal_steps=4),
        evaluation=replace(
            recipe.evaluation,
            tasks=4,
            wide_tasks=2,
            during=2,
            rows=(3, 10),
            wide_rows=(5, 10),
            sweep_swarm=(6, 12),
            sweep_single=(6, 12),
        ),
    )


def killed_after(checkpoint: Path, *arguments: str) -> None:
    """Starts the command and kills it, hard, once the checkpoint is there."""
    command = [sys.executable, "-c", "import sys; from recipes.cli import main; sys.exit(main())", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not checkpoint.exists():
            try:
                code = process.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended with {code} before {checkpoint.name}")
        process.kill()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was_and_one_that_is_done_says_so(tmp_path: Path):
    out = tmp_path / "run"
    killed_after(out / "checkpoints" / "step_000001", "train", "wide_search", "--out", str(out), *SMALL)
    assert not (out / "done.json").exists()
    said = StringIO()
    report = train(small(wide_search()), out, console=Console(file=said, width=140))
    rows = read_metrics(out)
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert [r["optimizer_step"] for r in rows] == [0, 2, 4]
    first = wide_search().parl.lambda_parallel
    assert [r["reward/lambda_parallel"] for r in rows] == pytest.approx([first, first, first / 2])
    assert [len(list(read(out / "rollouts" / f"iteration_{k:04d}.rollouts"))) for k in (1, 2, 3)] == [4, 4, 4]
    assert report["lambda_final"] == [0.0, 0.0]
    assert report["frozen_sha256"]["before"] == report["frozen_sha256"]["after"]
    assert {s["tasks"] for s in report["systems"].values()} == {4}
    assert report["systems"]["ceiling"]["item_f1"] == 1.0
    assert report["systems"]["floor"]["item_f1"] == 0.0
    assert {p.name for p in (out / "report").iterdir()} >= {"report.md", "report.json", "overview.png"}
    again = StringIO()
    assert train(small(wide_search()), out, console=Console(file=again, width=140)) == report
    assert "is done" in again.getvalue()
    with pytest.raises(RunDirError, match="seed was 0, is 7"):
        train(replace(small(wide_search()), seed=7), out, console=Console(quiet=True))
    asked = Asked(("swarm", "ceiling"), ("item_f1", "official"), world_seed=5, tasks=2, rows=(3, 10), budget=12)
    found = measure(plan(out, asked))
    assert [e.system for e in found.episodes] == ["swarm"] * 2 + ["ceiling"] * 2
    assert {e.budget for e in found.episodes} == {12}
    assert [(c.harness, c.verifier, c.tasks) for c in found.cells] == [
        *(("swarm", "item_f1", 2), ("swarm", "official", 2), ("ceiling", "item_f1", 2), ("ceiling", "official", 2))
    ]
    assert [c.mean for c in found.cells[2:]] == [1.0, 1.0]


@pytest.mark.slow
def test_the_single_agent_is_trained_by_the_same_loop(tmp_path: Path):
    report = train(small(single_agent()), tmp_path / "run", console=Console(quiet=True))
    assert list(report["systems"]) == ["single_agent", "floor", "ceiling"]
    rows = read_metrics(tmp_path / "run")
    assert unknown({name for row in rows for name in row}) == []
    assert {r["rollout/spawn_rate"] for r in rows} == {0.0}
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["spawn"] is False


@pytest.mark.slow
def test_an_evaluation_that_the_world_has_no_tasks_for_is_refused_before_training(tmp_path: Path):
    recipe = small(single_agent())
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, wide_rows=(70, 80)))
    with pytest.raises(ValueError, match=r"tasks: 0 found, want 2 \(heldout, rows \(70, 80\)"):
        train(recipe, tmp_path / "run", console=Console(quiet=True))
    assert read_metrics(tmp_path / "run") == []


def test_senseless_settings_are_refused_with_the_value():
    with pytest.raises(ValueError, match="evaluation: budget = 0, want 1 or more"):
        Evaluation(budget=0)
    with pytest.raises(ValueError, match=r"tasks: rows = \(5, 2\), want 1 <= low <= high"):
        TaskMix(rows=(5, 2))
    with pytest.raises(ValueError, match="recipe: episodes = 0, want 1 or more"):
        Recipe(episodes=0)
