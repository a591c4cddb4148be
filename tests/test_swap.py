"""Subagents swapped: the matrix, task by task; what is measured once is not measured again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from recipes import episodes
from recipes.arguments import UsageError
from recipes.cli import main
from recipes.config import SHIPPED, Recipe
from recipes.episodes import Episode
from recipes.overrides import to_json
from recipes.session import cast_of
from recipes.swap.command import casts_of, named
from recipes.swap.matrix import OWN, Cell, Settings, cells_of
from recipes.swap.numbers import MEASURES, difference, matrix
from recipes.swap.report import differences, heatmap, markdown, table
from swarm.checkpoint import ref_of
from swarm.folders import CheckpointError
from tests.test_report_episodes import BASE

SLOPPY = SHIPPED.with_name("sloppy-1m")
F1, FINISH, STEPS, *_ = MEASURES


def episode(**changes: object) -> Episode:
    return replace(BASE, **changes)  # type: ignore[arg-type]


def cell(cast: str, orchestrator: str = "lead", policy: Path = SHIPPED, players: Path = SHIPPED) -> Cell:
    return Cell(orchestrator, ref_of(policy), cast, cast_of({"": {str(players): 1.0}}))


def test_differences_are_of_the_same_tasks_and_trials_of_a_task_are_one_draw():
    base = [episode(task="a", item_f1=0.5), episode(task="b", item_f1=0.5), episode(task="only here", item_f1=0.0)]
    mine = [
        *(episode(task="a", item_f1=x) for x in (0.6, 0.8)),
        episode(task="b", item_f1=0.9),
        episode(task="b", item_f1=0.0, failed=True),
    ]
    found = difference(mine, base, F1)
    assert found["mean"] == pytest.approx((0.2 + 0.4) / 2)
    assert found["tasks"] == 2
    assert found["ci"] == pytest.approx([0.2, 0.4])
    assert found["verdict"] == "better"


def test_more_steps_are_worse_and_what_crosses_zero_is_neither():
    base = [episode(task=t, critical_steps=10) for t in "abcd"]
    assert difference([episode(task=t, critical_steps=14) for t in "abcd"], base, STEPS)["verdict"] == "worse"
    assert difference([episode(task=t, critical_steps=9) for t in "abcd"], base, STEPS)["verdict"] == "better"
    mixed = [episode(task=t, critical_steps=10 + d) for t, d in zip("abcd", (-5, 5, -5, 5), strict=True)]
    assert difference(mixed, base, STEPS)["verdict"] == ""


def test_tasks_without_assignments_have_no_finish_rate():
    base = [episode(task="a", assigned=4, useful=2), episode(task="b", assigned=0, useful=0)]
    found = difference([episode(task="a", assigned=4, useful=3), episode(task="b", assigned=4, useful=4)], base, FINISH)
    assert (found["mean"], found["tasks"]) == (0.25, 1)


def test_the_matrix_marks_regressions_and_shows_them_everywhere():
    cells = [cell(OWN), cell("small")]
    good = [episode(task=t, item_f1=0.9) for t in "abc"]
    bad = [episode(task=t, item_f1=0.4) for t in "abc"]
    numbers = {"settings": {"tasks": 3, "rows": (3, 8), "budget": 9, "trials": 1}, **matrix(cells, [good, bad])}
    assert [c["difference"]["item_f1"]["verdict"] for c in numbers["cells"]] == ["", "worse"]
    page = markdown(numbers)
    assert "- lead over small: item-F1 -0.500, -0.500 to -0.500▼" in page
    assert f"| small | (everybody) | {SHIPPED} |" in page
    console = Console(width=140, record=True, file=StringIO())
    console.print(table(numbers))
    assert "0.400▼" in console.export_text()
    (axis,) = heatmap(numbers).axes
    assert [t.get_text().split("\n")[0] for t in axis.texts] == ["0.900", "0.400"]
    assert len(differences(numbers).axes) == len(MEASURES)


def test_a_cell_is_known_by_its_weights_its_limits_and_its_tasks():
    recipe, settings = Recipe(), Settings(tasks=4)
    key = cell("x").key(recipe, settings)
    assert key == cell("another name").key(recipe, settings)
    assert key == cell("x").key(replace(recipe, seed=7, iterations=3), settings)
    others = [
        cell("x", players=SLOPPY).key(recipe, settings),
        cell("x", policy=SLOPPY).key(recipe, settings),
        cell("x").key(recipe, replace(settings, task_seed=1)),
        cell("x").key(replace(recipe, child=replace(recipe.child, steps=7)), settings),
    ]
    assert len({key, *others}) == 5


def test_casts_and_orchestrators_are_named_by_their_folders(tmp_path: Path):
    casts = casts_of(["x/a", "y/a", "b:2,c"], ["searcher=d,e"])
    assert casts == {
        "a": {"": {"x/a": 1.0}},
        "y/a": {"": {"y/a": 1.0}},
        "b + c": {"": {"b": 2.0, "c": 1.0}},
        "searcher=d": {"searcher": {"d": 1.0}},
        "searcher=e": {"searcher": {"e": 1.0}},
    }
    others = [tmp_path / "other" / "policy", tmp_path / "z" / "mine"]
    for folder in others:
        folder.mkdir(parents=True)
    orchestrators = named({"mine": Path("runs/mine/policy")}, map(str, others))
    assert orchestrators == {"mine": Path("runs/mine/policy"), "other": others[0], str(others[1]): others[1]}
    with pytest.raises(UsageError, match="no subagents"):
        casts_of([], [])


def test_checkpoints_that_cannot_be_served_are_refused_before_anything_runs(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SHIPPED, other)
    config = json.loads((other / "config.json").read_text())
    recipe, own = Recipe(), cast_of({"": {str(SHIPPED): 1.0}})
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"architectures = \['LlamaForCausalLM'\], want .* --engine vllm"):
        cells_of(recipe, own, {}, {"x": {"": {str(other): 1.0}}})
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    with pytest.raises(CheckpointError, match="vocab_size = 9, want 2560"):
        cells_of(recipe, own, {"lead": other}, {})


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    recipe = replace(Recipe(), threads=1)
    (run / "recipe.json").write_text(json.dumps(to_json(recipe)))
    shutil.copytree(SHIPPED, run / "policy")
    return run


@pytest.mark.slow
def test_a_swap_is_written_and_goes_on_where_it_was(finished: Path, capsys: pytest.CaptureFixture[str]):
    common = ("--subagents", str(SLOPPY), "--rows", "3-6", "--budget", "12", "--task-seed", "3")
    assert main(["swap", str(finished), *common, "--tasks", "4"]) == 0
    out = finished / "swap"
    assert {"swap.json", "swap.md", "heatmap.png", "differences.png"} <= {p.name for p in out.iterdir()}
    files = sorted((out / "episodes").iterdir())
    assert [len(episodes.read(f)) for f in files] == [4, 4]
    before = {f: episodes.read(f) for f in files}
    # One line lost and one cut, as by a kill: only these are run again, and come out as they were.
    lines = files[0].read_bytes().splitlines(keepends=True)
    files[0].write_bytes(b"".join(lines[:2]) + lines[2][:20])
    untouched = files[1].stat().st_mtime_ns
    capsys.readouterr()
    assert main(["swap", str(finished), *common, "--tasks", "4", "--json"]) == 0
    assert files[1].stat().st_mtime_ns == untouched
    told = json.loads(capsys.readouterr().out)
    assert [c["cast"] for c in told["cells"]] == [OWN, "sloppy-1m"]
    for f, kept in before.items():
        again = {e.task: replace(e, seconds=0.0) for e in episodes.read(f)}
        assert again == {e.task: replace(e, seconds=0.0) for e in kept}


def test_a_run_without_a_policy_or_subagents_is_refused_in_one_line(finished: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(finished / "policy")
    assert main(["swap", str(finished), "--subagents", str(SLOPPY)]) == 2
    assert "no policy, want a run that is done" in capsys.readouterr().err
    (finished / "recipe.json").write_text(json.dumps(to_json(replace(Recipe(), spawn=False))))
    assert main(["swap", str(finished), "--subagents", str(SLOPPY)]) == 2
    assert "a run without subagents, want one that spawns" in capsys.readouterr().err
