"""The report of a run: a pure function of the run folder, so that it can be rebuilt at any time.

    recipe.json  metrics.jsonl  episodes.jsonl  summary.json   →   report/report.json, report.md, *.png

Equal input gives equal files. Not here: evaluating anything (`recipes.evaluate`), and the
pictures themselves (`recipes.plots`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes import plots
from recipes.episodes import Episode, by_rows, json_lines, paired, read, steps_to_target, summary, sweep_points

ORDER = ("single_agent", "single_agent_ppo", "cold_start", "swarm", "floor", "ceiling")
"""The systems in the order of every table; others follow by name."""
WIDE = 50
"""Rows from which a table counts as wide."""
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("item_f1", "item-F1", ".3f"),
    ("row_f1", "row-F1", ".3f"),
    ("success", "success", ".3f"),
    ("critical_steps", "critical steps", ".1f"),
    ("total_steps", "total steps", ".1f"),
    ("parallelism", "width", ".1f"),
    ("spawn_rate", "spawn rate", ".2f"),
    ("finish_rate", "finish rate", ".2f"),
    ("spurious_rate", "spurious", ".2f"),
    ("tokens", "tokens", ".0f"),
    ("tasks", "tasks", "d"),
)


class ReportError(ValueError):
    """The folder is not a run, or a file in it does not read; the message is one line for the user."""


def write_report(run: Path) -> dict[str, Any]:
    """Builds `run/report/` and returns what report.json holds. Raises `ReportError`, or OSError."""
    if not (run / "recipe.json").is_file():
        raise ReportError(f"{run} is no run folder: it has no recipe.json")
    metrics = json_lines(run / "metrics.jsonl", dict[str, Any]) if (run / "metrics.jsonl").exists() else []
    episodes = read(run / "episodes.jsonl") if (run / "episodes.jsonl").exists() else []
    report = build(episodes, _json(run / "summary.json") if (run / "summary.json").exists() else {})
    folder = run / "report"
    folder.mkdir(exist_ok=True)
    pictures = plots.draw_all(report, metrics, folder)
    replace(folder / "report.md", markdown(report, pictures).encode())
    replace(folder / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def build(episodes: Sequence[Episode], run_summary: Mapping[str, Any]) -> dict[str, Any]:
    """The content of report.json. `run_summary` is what training left in summary.json."""
    table, swept = _by_system(e for e in episodes if not e.sweep), _by_system(e for e in episodes if e.sweep)
    bands = {system: by_rows(group) for system, group in table.items()}
    names = sorted({(int(b.split("-")[0].rstrip("+")), b) for found in bands.values() for b in found})
    targets = {s: steps_to_target(swept[s], swept["swarm"]) for s in swept if s != "swarm" and "swarm" in swept}
    swarm, single = table.get("swarm", []), table.get("single_agent", [])
    return {
        "systems": {system: summary(group) for system, group in table.items()},
        "by_rows": {b: {s: found[b] for s, found in bands.items() if b in found} for _, b in names},
        "swarm_minus_single_agent": {
            "all": paired(swarm, single),
            "wide": paired((e for e in swarm if e.rows >= WIDE), (e for e in single if e.rows >= WIDE)),
        },
        "steps_to_target": targets.get("single_agent", []),
        "steps_to_target_others": {s: rows for s, rows in targets.items() if s != "single_agent"},
        "sweep": {s: [asdict(p) for p in sweep_points(group)] for s, group in swept.items()},
        "lambda_final": run_summary.get("lambda_final"),
        "frozen_sha256": run_summary.get("frozen_sha256", {"before": None, "after": None}),
        "wall_seconds": run_summary.get("wall_seconds"),
        "seed": run_summary.get("seed"),
    }


def _by_system(episodes: Any) -> dict[str, list[Episode]]:
    found: dict[str, list[Episode]] = {}
    for e in episodes:
        found.setdefault(e.system, []).append(e)
    return {s: found[s] for s in ordered(found)}


def ordered(systems: Any) -> list[str]:
    """System names in the order of the tables."""
    return sorted(systems, key=lambda s: (ORDER.index(s) if s in ORDER else len(ORDER), s))


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ReportError(f"{path}: {error}") from error


def replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)


# --- the terminal ----------------------------------------------------------------------


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """The main table and the steps to each target, compact."""
    console.print(summary_table(report["systems"]))
    if report["steps_to_target"]:
        console.print("\n[bold]Critical steps to reach a mean item-F1 (wide tables)[/bold]", highlight=False)
        console.print(_target_table(report["steps_to_target"]))
    gain = report["swarm_minus_single_agent"]["wide"]
    if gain["difference"] is not None:
        console.print(f"\nitem-F1 on wide tables, swarm minus single agent: {_gain(gain)}", highlight=False)


def summary_table(systems: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line a system with the means of its episodes."""
    table = Table(title="Held-out tasks", title_justify="left", title_style="bold", header_style="bold", box=None)
    table.add_column("system")
    for _, heading, _ in FIELDS:
        table.add_column(heading, justify="right")
    for system, values in systems.items():
        style = "bold" if system == "swarm" else None
        cells = [_number(values[key], form) for key, _, form in FIELDS]
        table.add_row(escape(plots.style(system, list(systems))[0]), *cells, style=style)
    return table


def _target_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(header_style="bold", box=None)
    table.add_column("")
    for row in rows:
        table.add_column(f"{100 * row['target']:.0f} %", justify="right")
    for name, cells in _target_rows(rows):
        table.add_row(name, *cells)
    return table


def _target_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    single = [_number(r["single_agent"], ".1f", r.get("single_agent_lower_bound")) for r in rows]
    swarm = [_number(r["swarm"], ".1f") for r in rows]
    ratio = [_number(r["ratio"], ".1f", r.get("ratio_lower_bound")) for r in rows]
    return [("single agent", single), ("swarm", swarm), ("ratio", [f"{x}×" if x != "–" else x for x in ratio])]


def _number(value: float | None, form: str, lower_bound: float | None = None) -> str:
    if value is not None:
        return format(value, form)
    return "–" if lower_bound is None else f"> {lower_bound:{form}}"


def _gain(gain: Mapping[str, Any]) -> str:
    low, high = (100 * x for x in gain["ci"])
    return f"{100 * gain['difference']:+.1f} points (95 % {low:+.1f} to {high:+.1f}, {gain['tasks']} tasks)"


# --- the page --------------------------------------------------------------------------


def markdown(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """report.md: what was measured, in tables and plain words; shows the pictures that exist."""
    parts = [
        "# Report",
        picture("overview.png", pictures, "The run on one page"),
        _systems_section(report),
        _targets_section(report, pictures),
        _sizes_section(report, pictures),
        _learning_section(report, pictures),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _systems_section(report: Mapping[str, Any]) -> str:
    if not report["systems"]:
        return "This run has no evaluation yet."
    names = list(report["systems"])
    rows = [
        [plots.style(s, names)[0], *(_number(v[key], form) for key, _, form in FIELDS), _interval(v["item_f1_ci"])]
        for s, v in report["systems"].items()
    ]
    failed = sum(v["failed"] for v in report["systems"].values())
    lines = [
        "## Held-out tasks, full budget",
        grid(["system", *(h for _, h, _ in FIELDS), "item-F1, 95 %"], rows),
        "All systems saw the same tasks, none of them in training. *single agent* and *cold start* are the "
        "checkpoint that training started from, without and with the spawning tools (of a run that trains a single "
        "agent, *single agent* is the trained one). *item-F1*: cells right, strictly compared; "
        "*row-F1*: whole rows right; *success*: whole tables right. *critical steps*: the longest chain of tool "
        "calls, what a user waits for; *total steps*: all calls of all agents. *width*: most subagents at once. "
        "*finish rate*: assignments that brought a needed row, among all assignments, refused ones included; "
        "*spurious*: the others. *tokens*: sampled by all agents of an episode. The intervals are bootstrapped over "
        "tasks.",
    ]
    if failed:
        lines.append(f"{failed} episodes failed for reasons of the infrastructure and are in no mean.")
    gain = report["swarm_minus_single_agent"]
    texts = [(words, gain[k]) for k, words in (("all", "all tables"), ("wide", f"tables of {WIDE} rows and more"))]
    lines += [f"Swarm minus single agent, {w}: {_gain(g)}." for w, g in texts if g["difference"] is not None]
    return "\n\n".join(lines)


def _targets_section(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    if not report["steps_to_target"]:
        return ""
    rows = report["steps_to_target"]
    heads = ["", *(f"{100 * r['target']:.0f} %" for r in rows)]
    lines = [
        "## Critical steps to reach a quality",
        grid(heads, [[name, *cells] for name, cells in _target_rows(rows)]),
        "Each system was run on the same wide tables with budgets from small to large. A budget gives one point: mean "
        "critical steps used, mean item-F1. The table reads, for each target, where the curve first meets it (straight "
        "lines between points). *ratio*: how many times more steps the single agent needs. `–`: no budget reached "
        "it; `>`: the single agent never did, so its largest mean steps stand in. This is the analogue of figure 8 of "
        "Kimi K2.5 (arXiv 2602.02276), which reports 3.0, 3.0, 3.2, 3.7 and 4.5 in wall-clock time.",
        picture("steps_to_target.png", pictures, "Critical steps to each target"),
        picture("sweep.png", pictures, "Item-F1 against critical steps"),
    ]
    for system, others in report["steps_to_target_others"].items():
        cells = [_number(r["ratio"], ".2f", r.get("ratio_lower_bound")) for r in others]
        lines.append(f"Ratio of *{plots.style(system, [system])[0]}* to the swarm: {', '.join(cells)}.")
    return "\n\n".join(line for line in lines if line)


def _sizes_section(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    if not report["by_rows"]:
        return ""
    names = list(report["systems"])
    sections = ["## By table size"]
    for key, heading, form in (FIELDS[0], FIELDS[3], FIELDS[5]):
        rows = [
            [
                plots.style(s, names)[0],
                *(_number(b[s][key], form) if s in b else "–" for b in report["by_rows"].values()),
            ]
            for s in names
        ]
        sections.append(grid([f"{heading}, rows:", *report["by_rows"]], rows))
    sections.append(
        "Small tables show whether the policy learned *when* to work alone: there the swarm should lose no item-F1 "
        "against the single agent. Large tables are where parallel work pays."
    )
    sections.append(picture("by_rows.png", pictures, "Item-F1 and critical steps by table size"))
    return "\n\n".join(s for s in sections if s)


def _learning_section(report: Mapping[str, Any], pictures: Sequence[str]) -> str:
    lines = ["## Training"]
    if "learning.png" in pictures:
        lines += [
            picture("learning.png", pictures, "Learning curves"),
            "Faint lines are single iterations on training tasks, strong ones a running mean of five; dots are "
            "held-out tasks. Spawn rate and width are what the auxiliary rewards pay for; item-F1 is the objective. "
            "If a proxy rises while item-F1 does not, the proxy is being gamed.",
            picture("proxies.png", pictures, "Proxies beside the truth"),
        ]
    frozen, wall = report["frozen_sha256"], report["wall_seconds"]
    if report["lambda_final"] is not None:
        lines.append("λ1, λ2 at the end: " + ", ".join(f"{x:g}" for x in report["lambda_final"]) + ".")
    if frozen["before"]:
        same = "the same" if frozen["before"] == frozen["after"] else "NOT the same"
        lines.append(f"Weights of the frozen subagents before and after: {same} (`{frozen['after']}`).")
    if wall is not None:
        lines.append(f"Wall clock: {wall / 60:.1f} minutes. Seed: {report['seed']}.")
    return "\n\n".join(line for line in lines if line) if len(lines) > 1 else ""


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in (heads, rule, *rows))


def picture(name: str, pictures: Sequence[str], words: str) -> str:
    return f"![{words}]({name})" if name in pictures else ""


def _interval(ci: Sequence[float] | None) -> str:
    return f"{ci[0]:.3f}–{ci[1]:.3f}" if ci else "–"
