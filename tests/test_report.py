"""The report: a pure function of the run folder."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from recipes.episodes import Episode, EpisodesError, write
from recipes.plots import smooth, style
from recipes.report import ReportError, build, markdown, print_table, write_report
from tests.test_report_episodes import BASE, swept

FIELDS = {
    "item_f1",
    "row_f1",
    "success",
    "critical_steps",
    "total_steps",
    "parallelism",
    "spawn_rate",
    "finish_rate",
    "spurious_rate",
    "tokens",
    "tasks",
}


def episodes() -> list[Episode]:
    wide = replace(BASE, task="w", rows=60)
    single = [replace(e, system="single_agent", item_f1=0.4, assigned=0, refused=0, useful=0) for e in (BASE, wide)]
    sweep = [swept(4, 4, 0.0), swept(12, 12, 0.8), swept(8, 8, 0.0, "single_agent"), swept(40, 40, 0.8, "single_agent")]
    others = [replace(BASE, system=s) for s in ("ceiling", "floor", "cold_start", "mine")]
    return [BASE, wide, *single, *sweep, *others]


def run_folder(path: Path) -> Path:
    (path / "recipe.json").write_text("{}")
    (path / "summary.json").write_text(
        '{"lambda_final": [0.0, 0.0], "frozen_sha256": {"before": "ab", "after": "ab"}, "wall_seconds": 60, "seed": 3}'
    )
    write(path / "episodes.jsonl", episodes())
    row = {"rollout/item_f1": 0.5, "rollout/width": 2.0, "rollout/critical_steps": 9.0, "eval/item_f1": 0.4}
    lines = [json.dumps({"phase": "ppo", "iteration": i, "reward/lambda_parallel": 0.1, **row}) for i in range(3)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"phase": "pp')
    return path


def test_the_report_has_the_promised_fields() -> None:
    report = build(episodes(), {"lambda_final": [0.0, 0.0], "seed": 3})
    assert list(report["systems"]) == ["single_agent", "cold_start", "swarm", "floor", "ceiling", "mine"]
    assert all(set(values) >= FIELDS for values in report["systems"].values())
    assert {"by_rows", "steps_to_target", "lambda_final", "frozen_sha256", "wall_seconds", "seed"} <= set(report)
    assert report["frozen_sha256"] == {"before": None, "after": None}


def test_the_sweep_is_in_no_mean_of_the_main_table() -> None:
    assert build(episodes(), {})["systems"]["swarm"]["episodes"] == 2


def test_bands_hold_the_systems() -> None:
    made = build(episodes(), {})["by_rows"]
    assert list(made) == ["1-4", "50-80"]
    assert list(made["50-80"]) == ["single_agent", "swarm"]
    assert made["50-80"]["swarm"]["item_f1"] == 0.5


def test_the_targets_come_from_the_sweep() -> None:
    made = build(episodes(), {})["steps_to_target"]
    assert [r["target"] for r in made] == [0.3, 0.4, 0.5, 0.6, 0.7]
    assert made[1] == {"target": 0.4, "single_agent": 24.0, "swarm": 8.0, "ratio": 3.0}


def test_the_gain_on_wide_tables_is_paired() -> None:
    gain = build(episodes(), {})["swarm_minus_single_agent"]["wide"]
    assert (gain["difference"], gain["tasks"]) == (pytest.approx(0.1), 1)


@pytest.mark.slow
def test_a_run_folder_gives_a_page_numbers_and_pictures(tmp_path: Path) -> None:
    report = write_report(run_folder(tmp_path))
    folder = tmp_path / "report"
    pictures = {p.name for p in folder.glob("*.png")}
    assert pictures == {
        "overview.png",
        "learning.png",
        "proxies.png",
        "sweep.png",
        "steps_to_target.png",
        "by_rows.png",
    }
    assert json.loads((folder / "report.json").read_bytes()) == json.loads(json.dumps(report))
    assert all(f"({name})" in (folder / "report.md").read_text() for name in pictures)


@pytest.mark.slow
def test_equal_input_gives_equal_files(tmp_path: Path) -> None:
    contents: list[dict[str, bytes]] = []
    for _ in range(2):
        write_report(run_folder(tmp_path))
        contents.append({p.name: p.read_bytes() for p in (tmp_path / "report").iterdir()})
    assert contents[0] == contents[1]


def test_a_run_without_episodes_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    assert write_report(tmp_path)["systems"] == {}
    assert "no evaluation yet" in (tmp_path / "report" / "report.md").read_text()
    assert list((tmp_path / "report").glob("*.png")) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is no run folder: it has no recipe.json"):
        write_report(tmp_path)


def test_a_broken_line_of_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}\n{nope\n{}\n")
    with pytest.raises(EpisodesError, match=r"metrics\.jsonl, line 2: "):
        write_report(tmp_path)


def test_a_lower_bound_is_marked_in_the_page() -> None:
    made = [swept(8, 8, 0.0, "single_agent"), swept(40, 32, 0.3, "single_agent"), swept(4, 4, 0.0), swept(12, 12, 0.8)]
    page = markdown(build(made, {}), [])
    # Swarm: 0.3 at 7 steps, 0.4 at 8; the single agent reaches 0.3 at 32 and nothing beyond.
    assert "| ratio | 4.6× | > 4.0× |" in page


def test_a_changed_subagent_is_shouted_about() -> None:
    page = markdown(build([], {"frozen_sha256": {"before": "a", "after": "b"}}), [])
    assert "NOT the same" in page


def test_the_terminal_shows_systems_and_ratios() -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    print_table(build(episodes(), {}), console)
    text = console.export_text()
    assert "swarm, PARL" in text
    assert "3.0×" in text
    assert "+10.0 points" in text


def test_a_running_mean_is_shorter_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0], reach=1) == [1.5, 3.0, 4.5]


def test_unknown_systems_get_colours_of_their_own() -> None:
    names = ["b", "a", "swarm"]
    assert len({style(n, names)[1] for n in names}) == 3
