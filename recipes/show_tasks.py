"""`swarm-rl tasks`: counts, shows, checks and exports the tasks of the world.

Not here: how tasks are made (`envs.tasks`) and what makes one worth serving (`envs.accept`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envs.accept import accept
from envs.tasks import Split, TaskSet, export, possible, usual_values
from envs.world import BANDS, FAMILIES, World, WorldConfig, band
from recipes.arguments import family_name, parser_of, positive, rows_range
from recipes.session import open_world
from recipes.wide_search import wide_search
from rewards.table import table_scores
from swarm.types import Task


def tasks_command(
    argv: list[str], console: Console, opened: Callable[[WorldConfig], tuple[World, TaskSet]] = open_world
) -> int:
    """Runs `swarm-rl tasks ...`; returns the exit code. Raises UsageError, and ValueError where too few tasks fit.

    `opened` gives the world of a configuration, and those of its tasks that are served.
    """
    words = "Counts the tasks of the world by family, table size and split, and shows some of them."
    parser = parser_of(
        "tasks", "[options]", words, "swarm-rl tasks --family airport --rows 50-80 -n 500 --export t.jsonl"
    )
    parser.add_argument("--split", choices=("train", "heldout"), default="train", help="default: %(default)s")
    parser.add_argument("--rows", type=rows_range, default=(3, 80), help="sizes of the tables (default: 3-80)")
    parser.add_argument("--family", type=family_name, help=f"one of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("-n", type=positive, default=3, help="how many tasks to draw (default: %(default)s)")
    parser.add_argument("--world-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--task-seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the drawn tasks to FILE as JSON lines")
    parser.add_argument(
        "--check", action="store_true", help="test the drawn tasks: oracle, constant guess, serial agent"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    o = parser.parse_args(argv)
    world, served = opened(replace(wide_search().world, seed=o.world_seed))
    source = TaskSet(world) if o.check else served
    drawn = source.draw(o.split, o.n, o.task_seed, rows=o.rows, families=(o.family,) if o.family else ())
    counts = _counts(served)
    verdicts = _verdicts(world, drawn) if o.check else {}
    if o.export:
        export(drawn, o.export)
    if o.json:
        shown: dict[str, Any] = {"counts": counts, "tasks": [] if o.export else [asdict(t) for t in drawn]}
        print(json.dumps(shown | ({"check": verdicts} if o.check else {}), indent=1, ensure_ascii=False))
        return 0
    console.print(_count_table(counts))
    if o.check:
        _print_verdicts(verdicts, console)
    elif o.export:
        console.print(f"{len(drawn)} tasks written to {escape(str(o.export))}", highlight=False)
    else:
        for task in drawn:
            console.print(task_text(task), markup=False, highlight=False)
    return 0


def _counts(served: TaskSet) -> list[dict[str, Any]]:
    """Lists, and distinct tasks about them, of each split, family and band of rows."""
    lists: Counter[tuple[str, str, str]] = Counter()
    tasks: Counter[tuple[str, str, str]] = Counter()
    splits: tuple[Split, ...] = ("train", "heldout")
    for split in splits:
        for listed, n in possible(served, split):
            key = (split, listed.group.family, band(len(listed.members)))
            lists[key] += 1
            tasks[key] += n
    return [
        {"split": s, "family": f, "rows": b, "lists": lists[s, f, b], "tasks": tasks[s, f, b]}
        for s, f, b in sorted(lists)
    ]


def _count_table(counts: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Lists to ask about, by rows (and the tasks they allow)", title_justify="left", box=None)
    table.add_column("split")
    table.add_column("family")
    names = [f"{low}-{high}" for low, high in BANDS]
    for name in (*names, "all"):
        table.add_column(name, justify="right")
    for split, family in sorted({(c["split"], c["family"]) for c in counts}):
        found = {c["rows"]: c for c in counts if (c["split"], c["family"]) == (split, family)}
        cells = [f"{found[b]['lists']} ({found[b]['tasks']:,})" if b in found else "–" for b in names]
        total = f"{sum(c['lists'] for c in found.values())} ({sum(c['tasks'] for c in found.values()):,})"
        table.add_row(split, family, *cells, total)
    return table


def _verdicts(world: World, drawn: Sequence[Task]) -> dict[str, Any]:
    """How many of the tasks are worth serving, and why the others are not."""
    usual = usual_values(world)
    reasons = {t.id: accept(world, t, table_scores, usual=usual).reason for t in drawn}
    refused = {task: reason for task, reason in reasons.items() if reason}
    return {"tasks": len(drawn), "accepted": len(drawn) - len(refused), "refused": refused}


def _print_verdicts(verdicts: Mapping[str, Any], console: Console) -> None:
    console.print(f"accepted: {verdicts['accepted']} of {verdicts['tasks']}; only such tasks are served")
    for task, reason in verdicts["refused"].items():
        console.print(f"  {escape(task)}: {escape(reason)}", highlight=False)


def task_text(task: Task, rows: int = 3) -> str:
    """The question and the first rows of its answer."""
    lines = [f"\n{task.id}  ({len(task.gold)} rows, {len(task.columns)} columns)", task.query, "Gold:"]
    lines += ["  | " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in task.gold[:rows]]
    return "\n".join(lines + (["  ..."] if len(task.gold) > rows else []))
