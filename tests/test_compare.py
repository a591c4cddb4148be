"""Comparing runs: numbers over seeds worked out by hand, and what makes runs not comparable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.ablations import serial_collapse, serial_collapse_parl
from recipes.arguments import UsageError
from recipes.cli import main
from recipes.compare.charts import mean_curve
from recipes.compare.command import compare, load, parse_groups, write_results
from recipes.compare.numbers import Measured, Run, ablation, mean_of, ratio_of, spread
from recipes.compare.page import markdown
from recipes.compare.words import falls_short
from recipes.config import Recipe
from recipes.episodes import Episode, write
from recipes.overrides import to_json
from recipes.report import ReportError
from recipes.wide_search import single_agent, wide_search
from swarm.rundir import RunDirError
from tests.test_report_episodes import BASE, swept

SUMMARY = {"frozen_sha256": {"before": "a", "after": "a"}, "start_sha256": "s", "wall_seconds": 60}
ITERATIONS = wide_search().iterations
ALONE = replace(BASE, assigned=0, useful=0, refused=0, width=0)


def rows(*values: float, key: str = "item_f1", other: float = 0.5) -> list[dict[str, Any]]:
    """A line of metrics an iteration: `values` for one key, `other` for the rest."""
    keys = ("item_f1", "spawn_rate", "width", "critical_steps", "finish_rate", "spurious_rate")
    return [
        {"step": k, "iteration": k, **{f"rollout/{name}": value if name == key else other for name in keys}}
        for k, value in enumerate(values, 1)
    ]


def run(
    make: Callable[[], Recipe],
    seed: int,
    episodes: Sequence[Episode] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    **changes: Any,
) -> Run:
    recipe = to_json(replace(make(), seed=seed, **changes))
    return Run(Path(f"{make.__name__}-{seed}"), recipe, metrics or rows(0.2, 0.4), episodes, SUMMARY)


def swarm_run(seed: int, small: float, wide: float) -> Run:
    """Its sweep meets item-F1 t at 4 + 10·t steps."""
    table = [replace(BASE, task="s", item_f1=small), replace(BASE, task="w", rows=60, item_f1=wide)]
    others = [replace(ALONE, system=s, task="w", rows=60) for s in ("single_agent", "cold_start", "floor", "ceiling")]
    alone = [swept(8, 8, 0.0, "single_agent"), swept(40, 40, 0.8, "single_agent")]
    return run(wide_search, seed, [*table, *others, *alone, swept(4, 4, 0.0), swept(12, 12, 0.8)])


def single_run(seed: int, sweep: Sequence[tuple[int, float]] = ((8, 0.0), (40, 0.8))) -> Run:
    table = [replace(ALONE, task="s", item_f1=0.8), replace(ALONE, task="w", rows=60, item_f1=0.4)]
    points = [swept(steps, steps, f1) for steps, f1 in sweep]
    return run(single_agent, seed, [replace(e, system="single_agent") for e in (*table, *points)])


def headline() -> dict[str, Any]:
    """Two pairs; the single agent of seed 2 gets no further than 0.3, at 32 steps."""
    swarm = [swarm_run(1, 0.9, 0.8), swarm_run(2, 0.7, 0.6)]
    return compare({"swarm": swarm, "single_agent": [single_run(2, ((8, 0.0), (32, 0.3))), single_run(1)]})


def folder(path: Path, made: Run) -> Path:
    path.mkdir()
    (path / "recipe.json").write_text(json.dumps(made.recipe))
    (path / "done.json").write_text(json.dumps(made.summary))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.metrics))
    write(path / "episodes.jsonl", made.episodes)
    return path


# --- numbers ---------------------------------------------------------------------------


def test_a_spread_has_mean_error_and_ends() -> None:
    # The values differ from the mean 0.3 by 0.1 each: variance 0.02, error sqrt(0.02 / 2) = 0.1.
    made = spread([0.2, 0.4])
    assert made == {"mean": pytest.approx(0.3), "se": pytest.approx(0.1), "low": 0.2, "high": 0.4, "values": [0.2, 0.4]}


def test_one_seed_has_no_error_and_a_missing_value_no_mean() -> None:
    assert spread([0.2])["se"] is None
    assert spread([0.2, None])["mean"] is None


def test_gains_are_paired_by_task_within_a_seed() -> None:
    gain = headline()["headline"]["gain"]["single_agent_ppo"]
    assert gain["wide"]["values"] == pytest.approx([0.4, 0.2])
    assert gain["small"]["values"] == pytest.approx([0.1, -0.1])
    assert gain["all"]["mean"] == pytest.approx(0.15)
    assert (gain["all"]["tasks"], gain["wide"]["tasks"]) == (2, 1)


def test_systems_hold_every_seed_and_both_single_agents() -> None:
    systems = headline()["headline"]["systems"]
    assert list(systems) == ["single_agent", "single_agent_ppo", "cold_start", "swarm", "floor", "ceiling"]
    assert systems["swarm"]["seeds"] == [1, 2]
    assert systems["swarm"]["item_f1"]["values"] == pytest.approx([0.85, 0.65])
    assert systems["single_agent_ppo"]["item_f1"]["mean"] == pytest.approx(0.6)


def test_ratios_are_a_seeds_then_their_mean() -> None:
    # Seed 1: 24 / 8. Seed 2 never gets to 0.4: 32 steps stand in, 32 / 8 at least.
    row = headline()["headline"]["steps_to_target"]["single_agent_ppo"][1]
    assert [s["ratio"] for s in row["seeds"]] == [
        {"value": pytest.approx(3.0), "bound": "exact"},
        {"value": pytest.approx(4.0), "bound": "at_least"},
    ]
    assert row["ratio"] == {"value": pytest.approx(3.5), "bound": "at_least"}
    assert row["single_agent"] == {"value": pytest.approx(28.0), "bound": "at_least"}
    assert (row["k25"], row["met"]) == (3.0, True)


def test_the_swarms_own_weights_alone_are_a_second_opponent() -> None:
    # 8 + 40·0.7 = 36 steps against 4 + 10·0.7 = 11: 3.27, below 4.5.
    row = headline()["headline"]["steps_to_target"]["single_agent"][4]
    assert row["ratio"] == {"value": pytest.approx(36 / 11), "bound": "exact"}
    assert not row["met"]


def test_a_target_met_by_the_smallest_budget_is_a_bound() -> None:
    single = single_run(1, ((8, 0.35), (40, 0.8)))
    made = compare({"swarm": [swarm_run(1, 0.9, 0.8)], "single_agent": [single]})
    row = made["headline"]["steps_to_target"]["single_agent_ppo"][0]
    assert row["single_agent"] == {"value": 8.0, "bound": "at_most"}
    assert row["ratio"] == {"value": pytest.approx(8 / 7), "bound": "at_most"}


@pytest.mark.parametrize(
    ("single", "swarm", "ratio"),
    [
        (Measured(24.0), Measured(8.0), Measured(3.0)),
        (Measured(24.0, "at_least"), Measured(8.0, "at_most"), Measured(3.0, "at_least")),
        (Measured(24.0), Measured(8.0, "at_most"), Measured(3.0, "at_least")),
        (Measured(24.0, "at_most"), Measured(8.0), Measured(3.0, "at_most")),
        (Measured(24.0, "at_most"), Measured(8.0, "at_most"), Measured(None)),
        (Measured(24.0), Measured(None), Measured(None)),
    ],
)
def test_a_ratio_knows_what_is_known_of_it(single: Measured, swarm: Measured, ratio: Measured) -> None:
    assert ratio_of(single, swarm) == ratio


def test_a_mean_with_an_unknown_or_opposite_bounds_is_unknown() -> None:
    assert mean_of([Measured(1.0), Measured(3.0, "at_least")]) == Measured(2.0, "at_least")
    assert mean_of([Measured(1.0), Measured(None)]) == Measured(None)
    assert mean_of([Measured(1.0, "at_most"), Measured(3.0, "at_least")]) == Measured(None)


def test_an_ablation_is_read_at_both_ends_of_training() -> None:
    falling = rows(0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.0, 0.0, 0.0, 0.1, 0.0, key="spawn_rate")
    made = ablation([run(serial_collapse, 1, [BASE], falling), run(serial_collapse, 2, [BASE], rows(0.2))])
    # The last five of seed 1: 0.1 / 5 = 0.02, under 5 %. Seed 2 has one iteration, at 0.5.
    assert made["first"]["spawn_rate"]["values"] == pytest.approx([0.5, 0.5])
    assert made["last"]["spawn_rate"]["values"] == pytest.approx([0.02, 0.5])
    assert made["collapsed"] == 1
    assert made["held_out"]["spurious_rate"]["mean"] == pytest.approx(0.25)


def test_who_spawns_no_more_is_not_spurious() -> None:
    wasteful = rows(0.9, key="spurious_rate")
    quiet = [{**wasteful[0], "rollout/spawn_rate": 0.01}]
    made = ablation([run(serial_collapse, 1, [BASE], wasteful), run(serial_collapse, 2, [BASE], quiet)])
    assert (made["spurious"], made["collapsed"]) == (1, 1)


@pytest.mark.parametrize(("after", "met"), [(0.9, True), (0.01, False)])
def test_a_cure_needs_the_failure_and_its_absence(after: float, met: bool) -> None:
    failing = run(serial_collapse, 1, [BASE], rows(0.0, key="spawn_rate"))
    cured = run(serial_collapse_parl, 1, [BASE], rows(after, key="spawn_rate"))
    made = compare({"serial_collapse": [failing], "serial_collapse_parl": [cured]})
    assert [c["met"] for c in made["cures"]] == [met]
    assert len(falls_short(made)) == (0 if met else 1)


def test_a_mean_curve_has_the_iterations_that_all_seeds_have() -> None:
    assert mean_curve([([1, 2], [0.1, 0.3]), ([1], [0.3])]) == ([1], [pytest.approx(0.2)])
    assert mean_curve([]) == ([], [])


# --- words -----------------------------------------------------------------------------


def test_the_page_says_what_falls_short_and_by_how_much() -> None:
    made = headline()
    # At 30 %: 20 / 7 and 32 / 7, mean 3.71. At 50 %: 28 / 9 and 32 / 9 at least, mean 3.33. At 60 %: 3.2 twice.
    # At 70 %: 36 / 11 and 32 / 11, mean 3.09.
    assert falls_short(made) == [
        "Ratio at 60 %: ≥ 3.20, wanted 3.7, 0.5 below.",
        "Ratio at 70 %: ≥ 3.09, wanted 4.5, 1.4 below.",
    ]
    assert "| **ratio, mean** | 3.7× | ≥ 3.5× | ≥ 3.3× | ≥ 3.2× | ≥ 3.1× |" in markdown(made, [])


def test_a_loss_on_small_tables_falls_short() -> None:
    made = compare({"swarm": [swarm_run(1, 0.7, 0.8)], "single_agent": [single_run(1)]})
    assert "On tables of at most 4 rows the swarm loses item-F1: -10.0 points" in falls_short(made)[-1]


def test_trainings_that_differ_are_named() -> None:
    single = single_run(1)
    longer = replace(single, recipe={**single.recipe, "iterations": 80})
    made = compare({"swarm": [swarm_run(1, 0.9, 0.8)], "single_agent": [longer]})
    assert falls_short(made)[0].endswith(f"`iterations` is {ITERATIONS} for the swarm, 80 for the other.")


def test_seeds_without_a_partner_are_left_out_of_gains() -> None:
    made = compare({"swarm": [swarm_run(1, 0.9, 0.8), swarm_run(3, 0.1, 0.1)], "single_agent": [single_run(1)]})
    assert made["headline"]["gain"]["single_agent_ppo"]["wide"]["values"] == pytest.approx([0.4])
    assert "Seeds of only one of the two groups, in no gain or ratio: 3." in falls_short(made)


def test_the_commands_hold_seeds_and_overrides() -> None:
    made = compare({"serial_collapse": [run(serial_collapse, 7, [BASE], iterations=3, threads=2)]})
    assert "swarm-rl train serial_collapse --seed 7 --out runs/serial_collapse-7 --iterations 3\n" in markdown(made, [])


# --- what a user can get wrong ---------------------------------------------------------


def test_a_group_has_one_run_a_seed() -> None:
    with pytest.raises(ReportError, match="wide_search-1 and wide_search-1 both have the seed 1"):
        compare({"swarm": [swarm_run(1, 0.9, 0.8), swarm_run(1, 0.9, 0.8)]})


def test_a_group_is_one_recipe() -> None:
    with pytest.raises(ReportError, match=f"wide_search-2 cannot be compared: iterations is {ITERATIONS} and 3"):
        compare({"swarm": [swarm_run(1, 0.9, 0.8), run(wide_search, 2, [BASE], iterations=3)]})


def test_a_single_agent_in_the_group_of_the_swarm_is_refused() -> None:
    with pytest.raises(ReportError, match="single_agent-1: spawn is False, want a run of wide_search"):
        compare({"swarm": [single_run(1)]})


def test_runs_evaluated_on_other_tasks_are_refused() -> None:
    other = run(single_agent, 1, [BASE], evaluation=replace(Recipe().evaluation, tasks=7))
    with pytest.raises(ReportError, match="cannot be compared: evaluation.tasks is 200 and 7"):
        compare({"swarm": [swarm_run(1, 0.9, 0.8)], "single_agent": [other]})


def test_groups_without_a_common_seed_are_refused() -> None:
    with pytest.raises(ReportError, match="no seed in common"):
        compare({"swarm": [swarm_run(1, 0.9, 0.8)], "single_agent": [single_run(2)]})


def test_an_unfinished_run_is_one_clear_line(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", single_run(1))
    (path / "done.json").unlink()
    with pytest.raises(ReportError, match="a: the run is not finished"):
        load(path)


def test_a_missing_folder_and_a_foreign_recipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="a: no run here"):
        load(tmp_path / "a")
    (tmp_path / "recipe.json").write_text('{"seed": 1}')
    with pytest.raises(ReportError, match=r"recipe\.json has no spawn, want that of a training run"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["swam=a"], "unknown group 'swam', nearest: swarm"),
        (["swarm="], "names no run, want swarm=RUN"),
        (["swarm=a", "swarm=b"], "--group swarm is given twice"),
    ],
)
def test_groups_that_do_not_read_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_groups(texts)


def test_groups_are_names_and_folders() -> None:
    assert parse_groups(["swarm=a, b", "spurious=c"]) == {"swarm": [Path("a"), Path("b")], "spurious": [Path("c")]}


# --- files -----------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_folders_give_equal_files(tmp_path: Path) -> None:
    groups = {"swarm": [folder(tmp_path / "a", swarm_run(1, 0.9, 0.8))]}
    contents: list[dict[str, bytes]] = []
    for out in (tmp_path / "x", tmp_path / "y"):
        write_results(groups, out)
        contents.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_the_command_writes_the_page_its_numbers_and_its_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm = ",".join(str(folder(tmp_path / f"swarm-{s}", swarm_run(s, 0.9, 0.8))) for s in (1, 2))
    single = folder(tmp_path / "single", single_run(1))
    collapsed = folder(tmp_path / "collapsed", run(serial_collapse, 1, [BASE], rows(0.0, key="spawn_rate")))
    groups = [f"swarm={swarm}", f"single_agent={single}", f"serial_collapse={collapsed}"]
    out = tmp_path / "out"
    assert main(["compare", str(out), *(x for g in groups for x in ("--group", g))]) == 0
    page = (out / "results.md").read_text()
    names = {f"results-{x}.png" for x in ("overview", "learning", "steps", "sweep", "sizes", "ablations")}
    assert {p.name for p in out.iterdir()} == names | {"results.md", "results.json"}
    assert all(f"({name})" in page for name in names)
    assert str(tmp_path) not in page
    assert json.loads((out / "results.json").read_bytes())["headline"]["pairs"] == [1]
    assert "1 of 1 seeds collapsed" in " ".join(capsys.readouterr().out.split())
