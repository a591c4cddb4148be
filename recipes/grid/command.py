"""The command `swarm-rl eval`: a finished run under other harnesses, verifiers, tasks and worlds.

Not here: what is measured (`recipes.grid.cells`), and of what (`recipes.grid.runs`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.arguments import Parser, command, listed, parser_of, positive, rows_range
from recipes.episodes import Episode, by_rows, summary
from recipes.grid.cells import as_json, grid_table
from recipes.grid.judging import VERIFIERS
from recipes.grid.runs import SOURCES, TRAIL_WAYS, Asked, Measured, Plan, measure, plan
from recipes.harnesses import WAYS, systems_of
from recipes.progress import Progress
from recipes.report import ordered, summary_table
from recipes.wide_search import wide_search

WORDS = (
    "Evaluates a run on held-out tasks, of its own world or of another: every harness on the same tasks, every\n"
    "rollout under every verifier. Prints means with their intervals. Nothing is written to the run folder."
)


def eval_command(argv: Sequence[str], console: Console) -> int:
    """Evaluates, shows the grid and returns 0. Raises MisfitError and others, one line each for the user."""
    o = _parser().parse_args(argv)
    asked = Asked(
        systems=o.harness,
        verifiers=o.verifier,
        sources=o.tasks_from,
        tasks=o.tasks,
        task_seed=o.task_seed,
        world_seed=o.world_seed,
        rows=o.rows,
        budget=o.budget,
        judge=o.judge,
        program=o.program,
    )
    found = _measured(plan(o.run, asked))
    if o.json:
        print(json.dumps(evaluated(found), indent=1))
        return 0
    if found.episodes:
        console.print(summary_table(evaluated(found)["systems"]))
    for source in dict.fromkeys(cell.tasks_from for cell in found.cells):
        console.print()
        console.print(grid_table(found.cells, source))
    return 0


def _measured(plan: Plan) -> Measured:
    phases = {"episodes": plan.episodes, "verdicts": plan.verdicts}
    with Progress(Console(stderr=True), phases, {"episodes": 0.1, "verdicts": 0.001}) as progress:
        return measure(plan, lambda: progress.advance("episodes"), lambda: progress.advance("verdicts"))


def evaluated(found: Measured) -> dict[str, Any]:
    """`{"systems": {name: summary}, "by_rows": {name: {band: summary}}, "grid": [cell]}`, the first two of tables."""
    systems: dict[str, list[Episode]] = {}
    for e in found.episodes:
        systems.setdefault(e.system, []).append(e)
    groups = {s: systems[s] for s in ordered(systems)}
    return {
        "systems": {s: summary(group) for s, group in groups.items()},
        "by_rows": {s: by_rows(group) for s, group in groups.items()},
        "grid": as_json(found.cells),
    }


def _parser() -> Parser:
    example = "swarm-rl eval runs/wide_search --harness swarm,single@start --verifier item_f1,official --rows 50-80"
    parser = parser_of("eval", "RUN [options]", WORDS, example)
    names: dict[str, Any] = {"metavar": "NAMES", "type": listed, "default": ()}
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--harness", "--systems", **names, help=_harness_help())
    parser.add_argument("--verifier", **names, help=f"some of {','.join(VERIFIERS)} (default: the run's)")
    parser.add_argument("--tasks-from", **names, help=f"some of {','.join(SOURCES)} (default: the run's)")
    parser.add_argument("--judge", metavar="CHECKPOINT", type=Path, help="who judges, for judge and hybrid")
    parser.add_argument("--program", metavar="COMMAND", type=command, default=(), help="what the harness program runs")
    parser.add_argument("--world-seed", type=int, help="another world: other pages, addresses and lists")
    parser.add_argument("--task-seed", type=int, default=0, help="other tasks (default: %(default)s)")
    parser.add_argument("--tasks", type=positive, default=100, help="how many of each kind (default: %(default)s)")
    parser.add_argument("--rows", type=rows_range, default=(3, 80), help="sizes of the tables (default: 3-80)")
    parser.add_argument("--budget", type=positive, help="critical steps an episode (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _harness_help() -> str:
    named = systems_of(wide_search())
    ways = ",".join(name for name in WAYS if name not in named)
    return (
        f"some of {','.join(named)}, or harnesses ({ways}; of a run on trails {','.join(TRAIL_WAYS)}) with the trained "
        "weights or, as NAME@start, those that training started from (default: all systems that fit)"
    )
