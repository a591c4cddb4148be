"""`swarm-rl tasks`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from envs.tasks import TaskSet, split_of
from envs.world import World, WorldConfig, world_of
from recipes.show_tasks import task_text, tasks_command
from swarm.types import Task
from tests.island import island

TASK = Task("city-1", "List all.\nColumns: city | population", "s", "city", ("city", "population"), (("A|b", "1"),) * 4)

SPLIT = split_of("oak")


def quiet() -> Console:
    return Console(width=160, file=io.StringIO(), record=True)


def test_an_example_shows_question_and_first_rows() -> None:
    text = task_text(TASK, rows=1)
    assert "city-1  (4 rows, 2 columns)" in text
    assert text.endswith("Gold:\n  | A\\|b | 1 |\n  ...")


def on_the_island(config: WorldConfig) -> tuple[World, TaskSet]:
    world = world_of(island(), config)
    return world, TaskSet(world)


def test_tasks_are_counted_and_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    tasks_command(["--rows", "10", "-n", "2", "--family", "city", "--json", "--split", SPLIT], quiet(), on_the_island)
    shown = json.loads(capsys.readouterr().out)
    assert [len(t["gold"]) for t in shown["tasks"]] == [10, 10]
    assert {(c["split"], c["family"], c["rows"]): c["lists"] for c in shown["counts"]}[SPLIT, "city", "10-24"] == 1


def test_tasks_are_exported(tmp_path: Path) -> None:
    path, console = tmp_path / "t.jsonl", quiet()
    tasks_command(["-n", "3", "--split", SPLIT, "--export", str(path)], console, on_the_island)
    assert len(path.read_text().splitlines()) == 3
    assert "3 tasks written to" in console.export_text()


def test_tasks_are_checked() -> None:
    console = quiet()
    tasks_command(["-n", "3", "--split", SPLIT, "--check"], console, on_the_island)
    assert "of 3; only such tasks are served" in console.export_text()


def test_the_table_counts_by_family_and_size() -> None:
    console = quiet()
    tasks_command(["-n", "1", "--split", SPLIT], console, on_the_island)
    text = console.export_text()
    assert "Lists to ask about" in text
    assert "Columns: city |" in text


def test_sizes_that_no_list_has_are_refused() -> None:
    with pytest.raises(ValueError, match="^tasks: 0 found, want 3"):
        tasks_command(["--rows", "500-600"], quiet(), on_the_island)
