"""Episodes: their files, and summaries worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.episodes import (
    Episode,
    EpisodesError,
    Point,
    append,
    by_rows,
    interval,
    of,
    paired,
    read,
    steps_at,
    steps_to_target,
    summary,
    sweep_points,
    write,
)
from rewards.parl import Spawning
from swarm.types import Ledger, Rollout, Stage, Task, Trace

BASE = Episode(
    system="swarm",
    task="t1",
    domain="city",
    rows=4,
    columns=3,
    budget=40,
    sweep=False,
    item_f1=0.5,
    row_f1=0.25,
    success=0.0,
    critical_steps=6,
    total_steps=10,
    width=2,
    assigned=4,
    useful=3,
    refused=1,
    tokens=90,
    tokens_main=40,
    status="answered",
    failed=False,
    seconds=1.5,
)


def swept(budget: int, steps: int, f1: float, system: str = "swarm") -> Episode:
    return replace(BASE, system=system, budget=budget, sweep=True, critical_steps=steps, item_f1=f1)


def test_an_episode_counts_the_whole_tree() -> None:
    task = Task("t1", "q", "s", "city", ("a", "b", "c"), (("1", "2", "3"),) * 4)
    child = Rollout(task, Trace("main/0:a", (), "answered"), Ledger((Stage(2), Stage(1)), tokens_sampled=50))
    ledger = Ledger((Stage(1), Stage(1, (3,)), Stage(1)), tokens_sampled=40, seconds=1.5)
    root = Rollout(task, Trace("main", (), "answered"), ledger, children=(child,))
    scores = {"item_f1": 0.5, "row_f1": 0.25, "success": 0.0}
    made = of("swarm", root, scores, Spawning(assigned=4, useful=3, width=2, refused=1), 40, sweep=False)
    assert made == replace(BASE, critical_steps=6, total_steps=6)


def test_a_failed_rollout_needs_no_scores() -> None:
    task = Task("t1", "q", "s", "city", ("a",), ())
    root = Rollout(task, Trace("main", (), "error", "engine"), Ledger())
    made = of("swarm", root, {}, Spawning(0, 0, 0, 0), 40, sweep=False)
    assert (made.failed, made.item_f1) == (True, 0.0)


def test_a_file_gives_back_what_was_written_and_added(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write(path, [BASE])
    append(path, [replace(BASE, task="t2")])
    assert read(path) == [BASE, replace(BASE, task="t2")]


def test_a_torn_last_line_is_dropped_and_cut_off_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write(path, [BASE])
    path.write_bytes(path.read_bytes() + b'{"system": "sw')
    assert read(path) == [BASE]
    append(path, [replace(BASE, task="t2")])
    assert [e.task for e in read(path)] == ["t1", "t2"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text("oops\n")
    with pytest.raises(EpisodesError, match=r"episodes\.jsonl, line 1: "):
        read(path)


def test_rates_are_over_all_assignments_and_means_over_episodes() -> None:
    serial = replace(BASE, task="t2", item_f1=1.0, critical_steps=10, width=0, assigned=0, useful=0, refused=0)
    all_refused = replace(BASE, task="t3", item_f1=0.0, critical_steps=2, width=0, assigned=2, useful=0, refused=2)
    made = summary([BASE, serial, all_refused])
    assert made["item_f1"] == pytest.approx(0.5)
    assert made["critical_steps"] == pytest.approx(6.0)
    assert made["parallelism"] == pytest.approx(2 / 3)
    assert made["spawn_rate"] == pytest.approx(1 / 3)
    assert made["finish_rate"] == pytest.approx(3 / 6)
    assert made["spurious_rate"] == pytest.approx(3 / 6)
    assert made["tasks"] == 3


def test_nothing_assigned_is_not_spurious() -> None:
    made = summary([replace(BASE, assigned=0, useful=0, refused=0, width=0)])
    assert (made["finish_rate"], made["spurious_rate"]) == (0.0, 0.0)


def test_failed_episodes_are_counted_and_in_no_mean() -> None:
    made = summary([BASE, replace(BASE, task="t2", item_f1=0.0, failed=True)])
    assert (made["item_f1"], made["tasks"], made["failed"]) == (0.5, 1, 1)


def test_a_summary_of_nothing_has_no_means() -> None:
    made = summary([replace(BASE, failed=True)])
    assert (made["item_f1"], made["item_f1_ci"], made["spurious_rate"], made["tasks"]) == (None, None, None, 0)


def test_the_interval_of_equal_values_is_a_point() -> None:
    assert interval([0.5] * 7) == [0.5, 0.5]


def test_the_interval_of_two_values_spans_them() -> None:
    # Half of the resamples are mixed, a quarter each all 0 and all 1: the tails of 2.5 % are pure.
    assert interval([0.0, 1.0]) == [0.0, 1.0]


def test_the_interval_does_not_depend_on_the_order() -> None:
    assert interval([0.1, 0.9, 0.4, 0.3]) == interval([0.4, 0.3, 0.9, 0.1])


def test_trials_of_a_task_count_as_one_draw() -> None:
    trials = [replace(BASE, item_f1=0.0), replace(BASE, item_f1=1.0)]
    assert summary(trials)["item_f1_ci"] == [0.5, 0.5]


def test_bands_hold_their_limits() -> None:
    made = by_rows([replace(BASE, rows=n) for n in (3, 4, 5, 9, 10, 24, 25, 49, 50, 80, 81)])
    assert {b: s["episodes"] for b, s in made.items()} == {
        "1-4": 2,
        "5-9": 2,
        "10-24": 2,
        "25-49": 2,
        "50-80": 2,
        "81+": 1,
    }


def test_a_paired_difference_uses_common_tasks_only() -> None:
    ours = [replace(BASE, item_f1=0.8), replace(BASE, task="t2", item_f1=0.9)]
    assert paired(ours, [BASE]) == {"difference": pytest.approx(0.3), "ci": pytest.approx([0.3, 0.3]), "tasks": 1}


def test_a_sweep_has_one_point_a_budget() -> None:
    made = sweep_points([swept(8, 8, 0.2), swept(4, 4, 0.0), swept(8, 6, 0.4), replace(swept(4, 9, 1.0), failed=True)])
    assert [p.budget for p in made] == [4, 8]
    assert [p.critical_steps for p in made] == [4.0, 7.0]
    assert [p.item_f1 for p in made] == pytest.approx([0.0, 0.3])


def test_steps_are_interpolated_between_points() -> None:
    points = [Point(4, 4.0, 0.0), Point(8, 8.0, 0.4)]
    assert steps_at(points, 0.3) == pytest.approx(7.0)


def test_a_dip_does_not_move_the_running_maximum() -> None:
    points = [Point(4, 4.0, 0.2), Point(6, 6.0, 0.1), Point(8, 8.0, 0.4)]
    assert steps_at(points, 0.3) == pytest.approx(7.0)


def test_the_first_point_bounds_a_target_below_it() -> None:
    assert steps_at([Point(4, 4.0, 0.5)], 0.3) == 4.0


def test_a_target_beyond_every_point_is_not_reached() -> None:
    assert steps_at([Point(4, 4.0, 0.5)], 0.7) is None


def test_the_ratio_is_single_agent_over_swarm() -> None:
    single = [swept(8, 8, 0.0, "single_agent"), swept(40, 40, 0.8, "single_agent")]
    swarm = [swept(4, 4, 0.0), swept(12, 12, 0.8)]
    (row,) = steps_to_target(single, swarm, [0.4])
    assert row == {"target": 0.4, "single_agent": 24.0, "swarm": 8.0, "ratio": 3.0}


def test_a_target_that_only_the_swarm_reaches_gives_a_lower_bound() -> None:
    single = [swept(8, 8, 0.0, "single_agent"), swept(40, 32, 0.3, "single_agent")]
    (row,) = steps_to_target(single, [swept(4, 4, 0.0), swept(12, 12, 0.8)], [0.4])
    assert (row["single_agent"], row["ratio"]) == (None, None)
    assert (row["single_agent_lower_bound"], row["ratio_lower_bound"]) == (32.0, 4.0)


def test_a_target_that_the_swarm_misses_has_no_ratio() -> None:
    (row,) = steps_to_target([swept(8, 8, 0.9, "single_agent")], [swept(4, 4, 0.1)], [0.4])
    assert row == {"target": 0.4, "single_agent": 8.0, "swarm": None, "ratio": None}
