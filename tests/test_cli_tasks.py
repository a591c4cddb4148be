"""`swarm-rl tasks`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.cli import main
from recipes.show_tasks import task_text
from swarm.types import Task

TASK = Task("city-1", "List all.\nColumns: city | population", "s", "city", ("city", "population"), (("A|b", "1"),) * 4)


def test_an_example_shows_question_and_first_rows() -> None:
    text = task_text(TASK, rows=1)
    assert "city-1  (4 rows, 2 columns)" in text
    assert text.endswith("Gold:\n  | A\\|b | 1 |\n  ...")


@pytest.mark.slow
def test_tasks_are_counted_and_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--split", "heldout", "--family", "airport", "--rows", "5-9", "-n", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [t["domain"] for t in shown["tasks"]] == ["airport", "airport"]
    assert all(5 <= len(t["gold"]) <= 9 for t in shown["tasks"])
    assert {c["split"] for c in shown["counts"]} == {"train", "heldout"}


@pytest.mark.slow
def test_tasks_are_exported_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    assert main(["tasks", "-n", "3", "--export", str(path), "--check"]) == 0
    assert len(path.read_text().splitlines()) == 3
    assert "accepted: " in capsys.readouterr().out


@pytest.mark.slow
def test_sizes_that_no_list_has_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--rows", "500-600"]) == 2
    assert capsys.readouterr().err.startswith("swarm-rl: tasks: 0 found, want 3")
