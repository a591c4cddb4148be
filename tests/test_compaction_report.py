"""The report of a study of compaction: numbers worked by hand, a page and pictures from synthetic folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from recipes.cli import main
from recipes.compaction.episodes import TrailEpisode
from recipes.compaction.numbers import (
    FORMS,
    ORDER,
    START,
    Finished,
    build,
    curve,
    difference,
    of_seeds,
    of_tasks,
    t_interval,
)
from recipes.compaction.report import answer, gain, load, print_table, report_study, write_report
from recipes.report import ReportError

RECIPE = {
    "run": {
        "iterations": 4,
        "episodes": 8,
        "start": "checkpoints/scout-1m",
        "main": {
            "context": 512,
            "steps": 96,
            "rewriting": {"kind": "compaction", "threshold": 336, "keep": 1, "summary_tokens": 48},
        },
    },
    "seeds": [0, 1],
    "forms": list(FORMS),
}


BASE = TrailEpisode(
    system="compaction",
    task="t0",
    trails=5,
    score=0.5,
    success=0.0,
    compactions=6,
    steps=20,
    tokens=900,
    transcript=2048,
    status="done",
    failed=False,
)


def episode(task: str, score: float, system: str = "compaction", **changes: Any) -> TrailEpisode:
    return replace(BASE, task=task, score=score, success=float(score == 1.0), system=system, **changes)


def episodes(*scores: float, system: str = "compaction") -> list[TrailEpisode]:
    """Tasks t0, t1, … with these scores."""
    return [episode(f"t{k}", score, system) for k, score in enumerate(scores)]


def rows(*scores: float) -> list[dict[str, Any]]:
    """A line of metrics an iteration."""
    others = {"rollout/success": 0.1, "rollout/compactions": 6.0, "rollout/summary_tokens": 30.0}
    return [
        {"step": k, "iteration": k, "rollout/score": s, "rollout/critical_steps": 20.0, "eval/score": s, **others}
        for k, s in enumerate(scores, 1)
    ]


def start() -> list[TrailEpisode]:
    """Truncation 0.2, untrained 0.4, full window 0.8 on both tasks."""
    return [e for s, v in zip(START, (0.2, 0.4, 0.8), strict=True) for e in episodes(v, v, system=s)]


def finished() -> list[Finished]:
    """Chained 0.6 and 0.7, the others 0.5 in both seeds."""
    chained = [Finished("chained", s, episodes(v, v), rows(0.4, 0.5, v), 60.0) for s, v in enumerate((0.6, 0.7))]
    others = [Finished(f, s, episodes(0.5, 0.5), rows(0.4, 0.5), None) for f in FORMS[1:] for s in (0, 1)]
    return [*chained, *others]


def folder(path: Path, runs: Sequence[Finished], before: Sequence[TrailEpisode] = ()) -> Path:
    path.mkdir(exist_ok=True)
    (path / "recipe.json").write_text(json.dumps(RECIPE))
    (path / "start").mkdir(exist_ok=True)
    for system in {e.system for e in before}:
        _lines(path / "start" / f"{system}.jsonl", [e for e in before if e.system == system])
    for run in runs:
        made = path / f"{run.form}-{run.seed}"
        made.mkdir(exist_ok=True)
        (made / "done.json").write_text(json.dumps({"wall_seconds": run.seconds}))
        _lines(made / "metrics.jsonl", run.metrics)
        _lines(made / "trails.jsonl", run.episodes)
    return path


def _lines(path: Path, values: Sequence[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(v) + b"\n" for v in values))


# --- numbers ---------------------------------------------------------------------------


def test_an_interval_over_seeds_is_students() -> None:
    # Mean 0.6, s = 0.1, t(2, 0.975) = 4.303 (any table): 4.303 · 0.1 / sqrt(3) = 0.2484.
    assert t_interval([0.5, 0.6, 0.7]) == pytest.approx([0.6 - 0.2484, 0.6 + 0.2484], abs=1e-4)


def test_one_seed_and_a_gap_have_no_interval_over_seeds() -> None:
    assert t_interval([0.5]) is None
    assert t_interval([0.5, None, 0.7]) is None


def test_a_trained_system_is_the_mean_of_its_seeds_means() -> None:
    made = of_seeds({0: episodes(0.5, 1.0), 1: episodes(0.25, 0.25)})
    # (0.75 + 0.25) / 2 = 0.5, s = sqrt(2 · 0.25²) = 0.35355, t(1, 0.975) = 12.706: 12.706 · 0.35355 / sqrt(2) = 3.1765.
    score = made["score"]
    assert (score["mean"], score["min"], score["max"], score["values"]) == (0.5, 0.25, 0.75, [0.75, 0.25])
    assert score["ci"] == pytest.approx([0.5 - 3.1765, 0.5 + 3.1765], abs=1e-3)
    assert made["success"]["values"] == [0.5, 0.0]
    assert (made["ci_over"], made["seeds"], made["tasks"], made["episodes"]) == ("seeds", [0, 1], 2, 4)


def test_one_seed_has_an_interval_over_tasks_and_says_so() -> None:
    made = of_seeds({0: episodes(0.5, 1.0)})
    assert made["ci_over"] == "tasks"
    assert made["score"]["ci"] == of_tasks(episodes(0.5, 1.0))["score"]["ci"] == [0.5, 1.0]


def test_what_is_not_trained_has_no_seeds() -> None:
    made = of_tasks(episodes(0.5, 1.0))
    assert (made["trained"], made["seeds"], made["ci_over"]) == (False, [], "tasks")
    assert made["score"]["mean"] == 0.75


def test_what_failed_is_in_no_mean_but_counted() -> None:
    made = of_tasks([*episodes(0.5), episode("t9", 0.0, failed=True)])
    assert (made["score"]["mean"], made["tasks"], made["failed"]) == (0.5, 1, 1)


def test_only_failures_leave_no_mean() -> None:
    made = of_tasks([episode("t0", 0.0, failed=True)])
    assert (made["score"]["mean"], made["score"]["ci"], made["episodes"]) == (None, None, 0)


def test_a_difference_is_taken_by_task_and_averaged_over_seeds() -> None:
    base = episodes(0.25, 0.5)
    made = difference({0: episodes(1.0, 0.5), 1: episodes(0.5, 0.5)}, {0: base, 1: base})
    # Seed 0: (0.75 + 0) / 2; seed 1: (0.25 + 0) / 2. Task 0: (0.75 + 0.25) / 2 = 0.5, task 1: 0.
    assert made["values"] == [0.375, 0.125]
    assert (made["difference"], made["tasks"], made["seeds"]) == (0.25, 2, [0, 1])
    assert made["ci"] == [0.0, 0.5]


def test_a_difference_is_clear_only_if_seeds_and_intervals_agree() -> None:
    base = episodes(0.2, 0.2)
    steady = difference({0: episodes(0.4, 0.5), 1: episodes(0.5, 0.4)}, {0: base, 1: base})
    uneven = difference({0: episodes(0.3, 0.3), 1: episodes(0.9, 0.9)}, {0: base, 1: base})
    worse = difference({0: episodes(0.1, 0.0)}, {0: base})
    assert (steady["clear"], worse["clear"]) == (True, True)
    # 0.1 and 0.7: the interval over seeds is 0.4 ± 12.706 · 0.3, which holds 0.
    assert not uneven["clear"]


def test_nothing_in_common_has_no_difference() -> None:
    made = difference({0: episodes(0.5)}, {1: episodes(0.5)})
    assert (made["difference"], made["tasks"], made["clear"]) == (None, 0, False)


SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@settings(max_examples=40)
@given(SCORES, SCORES)
def test_a_difference_turned_round_changes_its_sign(a: list[float], b: list[float]) -> None:
    ours, base = {0: episodes(*a)}, {0: episodes(*b)}
    there, back = difference(ours, base), difference(base, ours)
    assert there["difference"] == pytest.approx(-back["difference"])
    assert there["tasks"] == min(len(a), len(b))


@given(st.permutations(episodes(0.1, 0.3, 0.8, 0.9)))
def test_the_order_of_episodes_does_not_matter(shuffled: list[TrailEpisode]) -> None:
    assert of_tasks(shuffled) == of_tasks(episodes(0.1, 0.3, 0.8, 0.9))


def test_a_curve_has_the_iterations_that_all_seeds_have() -> None:
    made = curve([{1: 0.1, 2: 0.3}, {1: 0.3}])
    assert made == {"iteration": [1], "mean": [pytest.approx(0.2)], "low": [0.1], "high": [0.3]}
    assert curve([])["iteration"] == []


# --- the report ------------------------------------------------------------------------


def test_the_report_has_every_system_in_order_with_a_score() -> None:
    report = build(start(), finished())
    assert tuple(report["systems"]) == ORDER
    scores = {s: v["score"]["mean"] for s, v in report["systems"].items()}
    assert scores == pytest.approx(
        {"truncation": 0.2, "untrained": 0.4, "chained": 0.65, "copied": 0.5, "decayed": 0.5, "full_window": 0.8}
    )
    assert report["minus_untrained"]["chained"]["difference"] == pytest.approx(0.25)
    assert "untrained" not in report["minus_untrained"]


def test_forms_are_compared_seed_by_seed() -> None:
    between = build(start(), finished())["between_forms"]
    assert list(between) == ["chained_minus_copied", "chained_minus_decayed", "copied_minus_decayed"]
    assert between["chained_minus_copied"]["values"] == pytest.approx([0.1, 0.2])
    assert between["copied_minus_decayed"]["difference"] == 0.0


def test_scores_stand_by_trails_and_by_rewrites() -> None:
    found = [
        episode("a", 1.0, "untrained", trails=5, compactions=4),
        episode("b", 0.5, "untrained", trails=10, compactions=5),
        episode("c", 0.0, "untrained", trails=10, compactions=40),
    ]
    report = build(found, [])
    assert {n: b["untrained"]["score"] for n, b in report["by_trails"].items()} == {"5": 1.0, "10": 0.25}
    assert {n: b["untrained"]["episodes"] for n, b in report["by_compactions"].items()} == {
        "1-4": 1,
        "5-8": 1,
        "17+": 1,
    }


def test_curves_are_over_seeds() -> None:
    score = build(start(), finished())["learning"]["chained"]["score"]
    assert score["iteration"] == [1, 2, 3]
    assert (score["mean"][2], score["low"][2], score["high"][2]) == (pytest.approx(0.65), 0.6, 0.7)


def test_the_answer_says_how_much_of_the_gap_is_closed() -> None:
    lines = answer(build(start(), finished()))
    # (0.65 − 0.4) / (0.8 − 0.4) = 62.5 %, and Python rounds half to even.
    assert "Trained (chained): 62 % of the way from untrained compaction to the full window." in lines


def test_a_trained_system_above_the_full_window_is_said_to_be() -> None:
    low = [replace(e, score=0.5) if e.system == "full_window" else e for e in start()]
    lines = answer(build(low, finished()))
    assert "Trained (chained): above the full window with the weights that training starts from." in lines


def test_a_gain_is_told_with_its_seeds_and_intervals() -> None:
    found = {
        "difference": 0.123,
        "ci": [0.1, 0.15],
        "tasks": 200,
        "seeds": [0, 1],
        "values": [0.12, 0.126],
        "ci_seeds": [0.08, 0.16],
        "clear": True,
    }
    assert gain(found) == (
        "+12.3 points, clear (seeds +12.0, +12.6; 95 % over 200 tasks +10.0 to +15.0, over seeds +8.0 to +16.0)"
    )


@pytest.mark.slow
def test_a_folder_gives_a_page_numbers_and_pictures_the_same_every_time(tmp_path: Path) -> None:
    report = write_report(folder(tmp_path / "s", finished(), start()))
    made = tmp_path / "s" / "report"
    before = {p.name: p.read_bytes() for p in made.iterdir()}
    pictures = {p.name for p in made.glob("*.png")}
    assert pictures == {"overview.png", "systems.png", "learning.png", "by_difficulty.png"}
    assert json.loads((made / "report.json").read_bytes()) == json.loads(json.dumps(report))
    page = (made / "report.md").read_text()
    assert all(f"({name})" in page for name in pictures)
    assert "| trained (chained) | 0.650 | 0.000 |" in page
    assert "Context: 512 tokens, rewritten from 336 on" in page
    assert "Transcript of full window: 4.0 times the context." in page
    said = StringIO()
    assert report_study(tmp_path / "s", Console(file=said, width=160)) == report
    assert str(made / "report.md") in said.getvalue()
    assert {p.name: p.read_bytes() for p in made.iterdir()} == before


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    report = build(*load(folder(tmp_path / "s", finished()[:1], start()[:2]), RECIPE))
    missing = ["untrained", "full_window", "chained-1", "copied-0", "copied-1", "decayed-0", "decayed-1"]
    assert report["missing"] == missing
    assert list(report["systems"]) == ["truncation", "chained"]
    assert answer(report)[0] == f"Still missing: {', '.join(missing)}."


def test_the_command_shows_the_report_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder(tmp_path / "s", [])), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["study"] == "compaction"
    assert "no evaluation yet" in (tmp_path / "s" / "report" / "report.md").read_text()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ReportError, match="recipe.json has no run, seeds and forms, want that of a study"):
        write_report(tmp_path)


def test_the_terminal_shows_a_line_a_system() -> None:
    said = StringIO()
    print_table(build(start(), finished()), Console(file=said, width=160))
    lines = said.getvalue().splitlines()
    assert [line.strip().split("  ")[0] for line in lines[2:8]] == [
        "truncation",
        "compaction (untrained)",
        "trained (chained)",
        "trained (copied)",
        "trained (decayed)",
        "full window",
    ]
