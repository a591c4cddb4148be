"""The command line: what a user sees, and what a user's mistakes end as."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import RECIPES, Entry, explained, main
from recipes.episodes import write
from swarm.folders import CheckpointError
from tests.test_report_episodes import BASE


@dataclass(frozen=True)
class Ppo:
    """How it learns."""

    lr: float = 1e-4

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"ppo: lr = {self.lr}, want more than 0")


@dataclass(frozen=True)
class Small:
    seed: int = 0
    ppo: Ppo = field(default_factory=Ppo)


def small() -> Small:
    """A recipe for tests."""
    return Small()


Seen = list[tuple[Any, Path, bool]]


def one(seen: Seen) -> dict[str, Entry]:
    def run(recipe: Small, out: Path, *, clean: bool, console: object) -> None:
        seen.append((recipe, out, clean))

    return {"small": Entry(small, run)}


def failing(error: BaseException) -> dict[str, Entry]:
    def run(recipe: Small, out: Path, *, clean: bool, console: object) -> None:
        raise error

    return {"small": Entry(small, run)}


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command line that must be refused, and gives its one line."""

    def run(*argv: str, recipes: dict[str, Entry] | None = None) -> str:
        assert main(argv, RECIPES if recipes is None else recipes) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("swarm-rl: ")
        return lines[0].removeprefix("swarm-rl: ")

    return run


def test_a_recipe_is_run_with_its_overrides_and_folder() -> None:
    seen: Seen = []
    argv = ["train", "small", "--ppo.lr", "2e-4", "--out", "runs/x", "--seed=3", "--clean"]
    assert main(argv, one(seen)) == 0
    assert seen == [(Small(3, Ppo(2e-4)), Path("runs/x"), True)]


def test_a_run_folder_has_the_name_of_its_recipe() -> None:
    seen: Seen = []
    main(["train", "small"], one(seen))
    assert seen == [(Small(), Path("runs/small"), False)]


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb}" in text for verb in ("train", "eval", "report", "tasks", "score"))


@pytest.mark.parametrize("command", ["eval", "report", "tasks", "score"])
def test_every_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "usage: swarm-rl" in capsys.readouterr().out


def test_help_of_train_lists_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"], one([])) == 0
    assert "  small  A recipe for tests." in capsys.readouterr().out


def test_help_of_a_recipe_lists_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Seen = []
    assert main(["train", "small", "--help"], one(seen)) == 0
    text = capsys.readouterr().out
    assert "--ppo.lr" in text
    assert "How it learns." in text
    assert seen == []


def test_the_main_recipes_are_there() -> None:
    assert {"wide_search", "single_agent", "cold_start"} <= set(RECIPES)
    assert all(entry.words for entry in RECIPES.values())


def test_an_unknown_command_is_one_line(refusal: Refusal) -> None:
    assert refusal("trian") == "unknown command 'trian', nearest: train"


def test_an_unknown_recipe_is_answered_with_the_nearest(refusal: Refusal) -> None:
    assert refusal("train", "wide_serch").startswith("unknown recipe 'wide_serch', nearest: wide_search")


def test_an_unknown_field_is_one_line(refusal: Refusal) -> None:
    line = refusal("train", "small", "--ppo.lrr", "1", recipes=one([]))
    assert line == "unknown field --ppo.lrr, nearest: --ppo.lr"


def test_a_value_that_the_recipe_refuses_is_one_line(refusal: Refusal) -> None:
    assert refusal("train", "small", "--ppo.lr", "0", recipes=one([])) == "ppo: lr = 0.0, want more than 0"


def test_options_before_the_recipe_are_refused(refusal: Refusal) -> None:
    line = refusal("train", "--ppo.lr", "1", "small", recipes=one([]))
    assert line.startswith("train: the recipe comes before --ppo.lr")


def test_a_budget_of_nothing_is_refused(refusal: Refusal) -> None:
    line = refusal("eval", "runs/x", "--budget", "0")
    assert line.startswith("argument --budget: '0', want a number of 1 or more")


def test_a_range_that_runs_backwards_is_refused(refusal: Refusal) -> None:
    assert refusal("tasks", "--rows", "80-50").startswith("argument --rows: '80-50', want LOW-HIGH")


def test_an_unknown_family_is_answered_with_the_nearest(refusal: Refusal) -> None:
    assert "unknown family 'airprt', nearest: airport" in refusal("tasks", "--family", "airprt")


def test_a_run_folder_that_is_not_there_is_one_line(tmp_path: Path, refusal: Refusal) -> None:
    assert refusal("report", str(tmp_path / "none")).endswith("is no run folder: it has no recipe.json")


def test_a_run_to_evaluate_that_is_not_there_is_one_line(tmp_path: Path, refusal: Refusal) -> None:
    assert "none" in refusal("eval", str(tmp_path / "none"))


def test_a_missing_argument_is_one_line(refusal: Refusal) -> None:
    assert refusal("report").startswith("the following arguments are required: RUN")


def test_a_bad_checkpoint_is_one_line(refusal: Refusal) -> None:
    error = CheckpointError("runs/x/policy: corrupt\nweights")
    assert refusal("train", "small", recipes=failing(error)) == "runs/x/policy: corrupt weights"


def test_a_full_disk_is_one_line(refusal: Refusal) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")
    line = refusal("train", "small", recipes=failing(error))
    assert line == "runs/x/metrics.jsonl: the disk is full; what was saved before is intact"


def test_a_mistake_inside_a_nursery_is_still_one_line(refusal: Refusal) -> None:
    group = ExceptionGroup("nursery", [ExceptionGroup("inner", [PermissionError(13, "Permission denied", "x")])])
    assert refusal("train", "small", recipes=failing(group)) == "x: Permission denied"


def test_bounds_that_no_task_meets_are_one_line(refusal: Refusal) -> None:
    error = ValueError("tasks: 0 found, want 64 (train, rows (200, 300))")
    assert refusal("train", "small", recipes=failing(error)).startswith("tasks: 0 found, want 64")


def test_ctrl_c_is_one_line_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    group = BaseExceptionGroup("nursery", [KeyboardInterrupt()])
    for error in (KeyboardInterrupt(), group):
        assert main(["train", "small"], failing(error)) == 130
        assert capsys.readouterr().err.startswith("swarm-rl: interrupted; ")


@pytest.mark.parametrize("bug", [ValueError("shapes differ"), ExceptionGroup("nursery", [ValueError("shapes differ")])])
def test_a_bug_keeps_its_traceback(bug: Exception) -> None:
    with pytest.raises((ValueError, ExceptionGroup)):
        main(["train", "small"], failing(bug))


def test_a_group_with_a_bug_in_it_is_a_bug() -> None:
    assert explained(ExceptionGroup("nursery", [CheckpointError("corrupt"), TypeError("bug")])) == ("", 1)


def test_the_report_is_rebuilt_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    assert "report.md" in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_can_be_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    write(tmp_path / "episodes.jsonl", [BASE])
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["systems"]["swarm"]["item_f1"] == 0.5
