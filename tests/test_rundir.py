"""The run folder: who may write it, what it keeps, what a kill leaves."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.rundir import RunDir, RunDirError, read_done, read_metrics, read_recipe

RECIPE = {"ppo": {"lr": 1e-4, "epochs": 1}, "seed": 0}


def test_a_new_run_keeps_its_recipe_and_has_its_folders(tmp_path: Path) -> None:
    with RunDir(tmp_path / "runs" / "x", RECIPE) as run:
        assert read_recipe(run.path) == RECIPE
        assert all((run.path / n).is_dir() for n in ("checkpoints", "rollouts", "report"))
        assert run.done is None


@pytest.mark.slow
def test_a_second_writer_is_refused_with_the_owners_pid(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE):
        code = f"from swarm.rundir import *; RunDir(Path({str(tmp_path)!r}), {RECIPE!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        pid = (tmp_path / "run.pid").read_text().strip()
    assert other.stderr.splitlines()[-1].endswith(f"{tmp_path}: in use by process {pid}, want one writer a run")


@pytest.mark.slow
def test_the_lock_of_a_dead_process_is_reclaimed(tmp_path: Path) -> None:
    code = f"import os; from swarm.rundir import *; run = RunDir(Path({str(tmp_path)!r}), {RECIPE!r}); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert (tmp_path / "run.pid").exists()
    with RunDir(tmp_path, RECIPE) as run:
        assert run.done is None


def test_a_closed_run_can_be_opened_again(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1, "loss": 0.5})
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 2, "loss": 0.25})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"ppo": {"lr": 2e-4, "epochs": 1}, "seed": 0}, r"ppo\.lr was 0\.0001, is 0\.0002"),
        ({"ppo": {"lr": 1e-4}, "seed": 0}, r"ppo\.epochs was 1, is absent"),
        ({**RECIPE, "width": 8}, "width was absent, is 8"),
    ],
)
def test_another_recipe_is_refused_and_the_field_named(tmp_path: Path, recipe: dict, message: str) -> None:
    RunDir(tmp_path, RECIPE).__exit__(None, None, None)
    with pytest.raises(RunDirError, match=message + "; want the same, another folder, or --clean"):
        RunDir(tmp_path, recipe)


def test_tuples_in_a_recipe_are_the_lists_that_they_became(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(tmp_path, {"rows": (3, 80)}):
            pass


def test_a_refused_recipe_leaves_the_folder_free(tmp_path: Path) -> None:
    RunDir(tmp_path, RECIPE).__exit__(None, None, None)
    with pytest.raises(RunDirError):
        RunDir(tmp_path, {"seed": 1})
    RunDir(tmp_path, RECIPE).__exit__(None, None, None)


def test_clean_starts_the_run_afresh_with_any_recipe(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1})
        run.finish({})
        (run.path / "checkpoints" / "step_1").mkdir()
    with RunDir(tmp_path, {"seed": 1}, clean=True) as run:
        assert (read_recipe(tmp_path), read_metrics(tmp_path), run.done) == ({"seed": 1}, [], None)
        assert not (tmp_path / "checkpoints" / "step_1").exists()


def test_a_folder_of_somebody_else_is_refused_and_kept_even_when_cleaning(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirError, match="not a run folder"):
        RunDir(tmp_path, RECIPE, clean=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(RunDirError, match="not a run folder"):
        RunDir(tmp_path / "x", RECIPE)
    with pytest.raises(RunDirError, match="cannot be made or written"):
        RunDir(tmp_path / "x" / "y", RECIPE)


def test_a_torn_last_line_of_metrics_is_left_out_and_not_continued(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 2})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_line_of_metrics_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1})
        assert read_metrics(tmp_path) == [{"step": 1}]


def test_metrics_on_a_full_disk_are_one_clear_line(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (12, before[1]))
        try:
            with pytest.raises(RunDirError, match="cannot write metrics: .*; earlier ones are intact"):
                run.log({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.log({"step": 3})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]


def test_a_resumed_run_drops_what_it_logged_past_its_checkpoint(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        for step in (1, 2, 3):
            run.log({"step": step})
        run.rewind(1)
        run.log({"step": 2, "again": True})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_corrupt_line_of_metrics_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(RunDirError, match=r"metrics\.jsonl: corrupt"):
        read_metrics(tmp_path)


def test_a_finished_run_says_so_with_its_summary(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.finish({"item_f1": 0.7})
    assert read_done(tmp_path) == {"item_f1": 0.7}
    with RunDir(tmp_path, RECIPE) as run:
        assert run.done == {"item_f1": 0.7}


def test_a_missing_or_corrupt_recipe_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no run here"):
        read_recipe(tmp_path)
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(RunDirError, match=r"recipe\.json: corrupt"):
        RunDir(tmp_path, RECIPE)


def test_the_metrics_file_holds_one_json_object_a_line(tmp_path: Path) -> None:
    with RunDir(tmp_path, RECIPE) as run:
        run.log({"step": 1, "loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}
