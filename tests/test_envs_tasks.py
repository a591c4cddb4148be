"""Tasks: what they ask, how they are split, and which are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.accept import accept, accepted, explore
from envs.facts import Facts
from envs.tasks import (
    TEMPLATES,
    Column,
    TaskSet,
    constant_guess,
    count,
    export,
    heldout_combination,
    make_task,
    split_of,
    usual_values,
)
from envs.world import World, WorldConfig, build_world, world_of
from swarm.types import Task
from tests.island import SUBJECT, island, item_f1


def _task(world: World, *columns: str) -> Task:
    listed = next(x for x in world.lists if x.group.subject == SUBJECT)
    return make_task(world, listed, tuple(map(Column.parse, columns)), "train", 0)


def _small(facts: Facts, **knobs: float) -> World:
    return world_of(facts, WorldConfig(distractors=0.0, **knobs))  # pyright: ignore[reportArgumentType]


def test_a_query_names_the_rows_the_columns_and_the_rules() -> None:
    task = _task(_small(island()), "population", "elevation of nearest airport")
    assert task.query == (
        "List all cities in Oak Island.\n"
        "Columns: city | population | elevation of nearest airport\n"
        "The latest revision wins. Write N/A if a page does not say."
    )
    assert task.subject == SUBJECT
    assert (task.meta["rows"], task.meta["hops"], task.meta["pages"], task.meta["steps_per_row"]) == (10, 1, 2, 2)


def test_gold_is_what_the_pages_say() -> None:
    task = _task(_small(island()), "population", "code of nearest airport")
    assert dict((row[0], row[1:]) for row in task.gold)["Cedar"] == ("1,002", "X2")


def test_gold_is_not_available_where_the_pages_are_silent() -> None:
    task = _task(_small(island(), missing=1.0), "population", "code of nearest airport")
    assert {row[1:] for row in task.gold} == {("N/A", "N/A")}


def test_the_latest_revision_is_gold() -> None:
    task = _task(_small(island(), conflicts=1.0), "population")
    assert sorted(row[1] for row in task.gold) == [f"1,00{k}" for k in range(10)]


def test_a_column_that_a_constant_gets_right_is_not_offered() -> None:
    facts = island()
    flat = {
        i: e if e.family != "city" else type(e)(e.id, e.family, e.title, (e.facts[0], *_same(e.facts[1:])))
        for i, e in facts.entities.items()
    }
    world = _small(Facts(flat, facts.groups))
    (options,) = [v for k, v in TaskSet(world).options.items() if len(world.pages[k].title) == len(SUBJECT)]
    assert "population" in [c.text for c in options]
    assert "latitude" not in [c.text for c in options]


def _same(facts: tuple) -> tuple:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    return tuple(f if f.link else type(f)(f.name, "1.00") for f in facts)


def test_tasks_are_drawn_alike_for_alike_arguments_and_are_distinct() -> None:
    split = split_of("oak")
    one, two = (TaskSet(_small(island())).draw(split, 20, seed=4) for _ in range(2))
    assert one == two
    assert len({t.id for t in one}) == 20


def test_bounds_of_a_draw_are_kept() -> None:
    drawn = TaskSet(_small(island())).draw(split_of("oak"), 6, 0, rows=(4, 80), columns=(3, 3), hops=(1, 1))
    assert all(len(t.gold) == 10 and len(t.columns) == 3 and t.meta["hops"] == 1 for t in drawn)


def test_asking_for_more_tasks_than_there_are_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"found, want 9 .*rows \(40, 80\)"):
        TaskSet(_small(island())).draw("train", 9, 0, rows=(40, 80))


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows = \(9, 3\), want 1 <= low <= high"):
        TaskSet(_small(island())).draw("train", 1, 0, rows=(9, 3))


def test_held_out_sentences_are_never_used_in_training() -> None:
    assert not set(TEMPLATES["train"]) & set(TEMPLATES["heldout"])


def test_the_constant_guess_is_a_repeated_value_or_else_the_usual_one() -> None:
    assert constant_guess(["a", "b", "b"], "z") == "b"
    assert constant_guess(["a", "b", "c"], "z") == "z"


def test_the_oracle_needs_a_step_a_call_and_solves_the_task() -> None:
    world = _small(island())
    task = _task(world, "population", "code of nearest airport")
    found = explore(world, task)
    assert found.calls == 1 + 2 + 10 * 2  # search, two pages of the list, two pages a row
    assert sorted(found.table) == sorted(task.gold)
    assert accept(world, task, item_f1).ok


def test_a_serial_agent_is_stopped_by_the_budget() -> None:
    world = _small(island())
    task = _task(world, "population")
    result = accept(world, task, item_f1, budget=9)
    assert result.serial == pytest.approx(0.75)  # ten keys, and 9 - 1 - 3 = 5 of ten values
    assert (result.oracle, result.keys, result.steps) == (1.0, 0.5, 14)


def test_a_wide_task_that_a_serial_agent_solves_is_refused() -> None:
    world = _small(island(60))
    task = _task(world, "population", "latitude")
    assert accept(world, task, item_f1, budget=40).ok
    assert "a serial agent reaches 1.000" in accept(world, task, item_f1, budget=100).reason


def test_a_task_that_a_constant_answers_is_refused() -> None:
    world = _small(island(), missing=1.0)
    result = accept(world, _task(world, "population"), item_f1)
    assert result.reason == "a constant guess gains 0.500 over keys alone, want at most 0.1"


def test_a_task_whose_list_is_not_found_is_refused() -> None:
    world = _small(island())
    task = _task(world, "population")
    lost = Task(task.id, task.query, "cities in Atlantis", task.domain, task.columns, task.gold, meta=task.meta)
    assert "the oracle reaches 0.000" in accept(world, lost, item_f1).reason


def test_only_accepted_tasks_are_served() -> None:
    world = _small(island())
    kept = TaskSet(world, accepted(world, item_f1)).draw(split_of("oak"), 5, 0)
    assert all(accept(world, t, item_f1).ok for t in kept)


def test_exported_tasks_read_back_line_by_line(tmp_path: Path) -> None:
    drawn = TaskSet(_small(island())).draw(split_of("oak"), 3, 0)
    assert export(drawn, tmp_path / "tasks.jsonl") == 3
    lines = [json.loads(x) for x in (tmp_path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [x["id"] for x in lines] == [t.id for t in drawn]
    assert sum(count(drawn).values()) == 3


@pytest.mark.slow
def test_the_real_world_has_thousands_of_tasks_split_by_group_and_columns() -> None:
    tasks = TaskSet(build_world(WorldConfig(missing=0.03, conflicts=0.05)))
    train, heldout = tasks.draw("train", 5000, 0), tasks.draw("heldout", 500, 0)
    assert not {t.meta["group"] for t in train} & {t.meta["group"] for t in heldout}
    assert not any(heldout_combination(t.domain, map(Column.parse, t.columns[1:])) for t in train)
    assert len({t.domain for t in train}) == len({t.domain for t in heldout}) == 6
    assert {len(t.columns) for t in train} == {2, 3, 4, 5, 6}
    assert all(3 <= len(t.gold) <= 80 for t in train + heldout)
    assert sum(len(t.gold) >= 50 for t in train) >= 500
    usual = usual_values(tasks.world)
    results = [accept(tasks.world, t, item_f1, usual=usual) for t in train[:100]]
    assert sum(r.ok for r in results) >= 95
