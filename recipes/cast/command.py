"""`swarm-rl roster RUN`: who a run's subagents were, are and will be; and a swap by hand while it trains.

    swarm-rl roster runs/x                                        the history
    swarm-rl roster runs/x --subagents A,B:2                      from the next iteration on, two of three spawns draw B
    swarm-rl roster runs/x --roles searcher=A --roles checker=B

Not here: what is on file (`recipes.cast.book`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recipes.arguments import UsageError, parser_of
from recipes.cast.book import Played, ask, asked_of, entries_of
from recipes.cast.roles import Weights
from recipes.config import Recipe
from recipes.engines import check_served
from recipes.named import resolve
from recipes.overrides import from_json
from swarm.checks import want
from swarm.rundir import RunDirError, read_recipe


def roster_command(argv: Sequence[str], console: Console) -> int:
    """Shows or changes the roster of a run; the exit code."""
    words = (
        "Shows which checkpoint played which subagent role from which iteration on. With --subagents or --roles, has\n"
        "the run change that with its next iteration, also while it trains; subagents that run finish as they began."
    )
    example = "swarm-rl roster runs/wide_search --subagents checkpoints/large"
    parser = parser_of("roster", "RUN [options]", words, example)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--subagents", metavar="A,B:2", help="checkpoints of everybody without a role, with weights")
    parser.add_argument("--roles", metavar="NAME=A,B:2", action="append", default=[], help="those of one role")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    o = parser.parse_args(argv)
    recipe = read_recipe(o.run)
    if "subagent" not in recipe or not recipe.get("spawn"):
        raise RunDirError(f"{o.run}: a run without subagents, want one that spawns")
    changes = changes_of(o.subagents, o.roles)
    if changes:
        if (o.run / "done.json").exists():
            raise RunDirError(f"{o.run}: the run is done, want one that has iterations left")
        _check(from_json(Recipe, recipe), changes)
        ask(o.run, changes)
    if o.json:
        known = {"entries": entries_of(o.run), "next": asked_of(o.run)}
        print(json.dumps(msgspec.to_builtins(known), indent=1))
    else:
        console.print(_table(o.run))
    return 0


def _check(recipe: Recipe, changes: Mapping[str, Weights]) -> None:
    """Raises CheckpointError now for what the run could not serve, and not when it comes to it."""
    for role, weights in changes.items():
        for folder in weights:
            check_served(recipe, resolve(folder), recipe.role(role).engine)


def changes_of(subagents: str | None, roles: Sequence[str]) -> dict[str, Weights]:
    """`("A,B:2", ["searcher=C"])` as {"": {"A": 1, "B": 2}, "searcher": {"C": 1}}. Raises UsageError."""
    changes = {"": _weights(subagents)} if subagents else {}
    for text in roles:
        name, equals, players = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--roles {text!r}, want NAME=CHECKPOINT, for example searcher=checkpoints/large")
        changes[name.strip()] = _weights(players)
    return changes


def _weights(text: str) -> Weights:
    """`A,B:2`: a number behind the last colon is a weight."""
    found: Weights = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        folder, colon, weight = part.rpartition(":")
        try:
            value = float(weight) if colon else 1.0
        except ValueError:
            folder, value = part, 1.0
        name = folder if colon and folder else part
        want("roster", f"checkpoint {name!r}", name, name not in found, "each checkpoint once, with its weight")
        found[name] = value
    if not found:
        raise UsageError(f"checkpoints {text!r}, want A or A,B:2")
    return found


def _table(run: Path) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f"{run}: who plays whom", title_justify="left")
    for heading in ("from iteration", "role", "checkpoints", "by"):
        table.add_column(heading)
    entries = entries_of(run)
    for before, entry in zip([None, *entries], entries, strict=False):
        known: Mapping[str, Sequence[Played]] = before.cast if before else {}
        for role, players in entry.cast.items():
            if known.get(role) != players:
                table.add_row(str(entry.iteration), role or "(everybody)", _players(players), entry.by)
    for role, players in asked_of(run).items():
        table.add_row("the next", role or "(everybody)", _players(players), "hand")
    return table


def _players(players: Sequence[Played]) -> str:
    total = sum(p.weight for p in players)
    return ", ".join(f"{p.weight / total:.0%} {p.name or Path(p.path).name} ({p.sha256[:8]})" for p in players)
