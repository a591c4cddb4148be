"""`swarm-rl swap RUN --subagents A B C`: measures what other subagents, and other orchestrators, do to a run.

Not here: the cells (`recipes.swap.matrix`), the numbers and how they are shown (`recipes.swap.report`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from recipes.arguments import UsageError, parser_of, positive, rows_range
from recipes.cast.book import last_cast
from recipes.cast.command import changes_of
from recipes.cast.roles import Weights, label
from recipes.config import Recipe
from recipes.grid.runs import read_recipe
from recipes.named import resolve
from recipes.progress import Progress
from recipes.session import cast_of
from recipes.swap.matrix import OWN, Settings, cells_of, measure
from recipes.swap.numbers import matrix
from recipes.swap.report import table, write
from swarm.rundir import RunDirError


def swap_command(argv: Sequence[str], console: Console) -> int:
    """Measures, writes into OUT and shows the matrix; the exit code."""
    words = (
        "Runs one orchestrator over several casts of subagents (several orchestrators with --orchestrators), on the\n"
        "same held-out tasks and seeds, and tells what changes against the run's own cast. What was measured stays in\n"
        "OUT: the same command goes on where it was stopped, and a longer one measures only what is new."
    )
    example = "swarm-rl swap runs/wide_search --subagents checkpoints/a checkpoints/b --roles searcher=checkpoints/a"
    parser = parser_of("swap", "RUN --subagents A B ... [options]", words, example)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--subagents", nargs="+", metavar="A", default=[], help="a cast each; A,B:2 is a mixture")
    parser.add_argument("--roles", nargs="+", metavar="NAME=A,B", default=[], help="a cast for each of a role")
    parser.add_argument("--orchestrators", nargs="+", metavar="X", default=[], help="beside the run's own policy")
    parser.add_argument("--tasks", type=positive, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--rows", type=rows_range, default=(3, 80), help="sizes of the tables (default: 3-80)")
    parser.add_argument("--budget", type=positive, help="critical steps an episode (default: the recipe's)")
    parser.add_argument("--trials", type=positive, default=1, help="rollouts of a task (default: %(default)s)")
    parser.add_argument("--task-seed", type=int, default=0, help="other tasks (default: %(default)s)")
    parser.add_argument("--world-seed", type=int, help="another world: other pages, addresses and lists")
    parser.add_argument("--out", type=Path, help="where to (default: RUN/swap)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    o = parser.parse_args(argv)
    recipe = _recipe(o.run, o.world_seed)
    settings = Settings(o.tasks, o.rows, o.budget or recipe.evaluation.budget, o.task_seed, o.trials)
    own = last_cast(o.run) or cast_of(recipe.cast())
    orchestrators = named({o.run.name: o.run / "policy"}, o.orchestrators)
    cells = cells_of(recipe, own, orchestrators, casts_of(o.subagents, o.roles))
    out = o.out or o.run / "swap"
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (
            FileLock(out / "swap.lock", timeout=0),
            Progress(Console(stderr=True), {"episodes": len(cells) * o.tasks * o.trials}) as progress,
        ):
            found = measure(recipe, cells, settings, out / "episodes", lambda n: progress.advance("episodes", n))
            numbers = {"settings": asdict(settings), **matrix(cells, found)}
            files = write(numbers, out)
    except Timeout as e:
        raise RunDirError(f"{out}: another swap is writing there, want one at a time (or another --out)") from e
    if o.json:
        print(json.dumps(numbers, indent=1))
    else:
        console.print(table(numbers))
        console.print(f"{out}: {', '.join(files)}")
    return 0


def _recipe(run: Path, world_seed: int | None) -> Recipe:
    recipe = read_recipe(run)
    if not isinstance(recipe, Recipe) or not recipe.spawn:
        raise RunDirError(f"{run}: a run without subagents, want one that spawns")
    if not (run / "policy" / "config.json").exists():
        raise RunDirError(f"{run}: no policy, want a run that is done")
    return recipe if world_seed is None else replace(recipe, world=replace(recipe.world, seed=world_seed))


def casts_of(subagents: Sequence[str], roles: Sequence[str]) -> dict[str, dict[str, Weights]]:
    """Casts by label: `(["A", "B"], ["searcher=C,D"])` are four, the last two of the searcher alone."""
    casts: dict[str, dict[str, Weights]] = {}
    for text in subagents:
        changes = changes_of(text, ())
        _label(casts, " + ".join(map(label, changes[""])), text, changes)
    for text in roles:
        for role, weights in changes_of(None, (text,)).items():
            for folder in weights:
                _label(casts, f"{role}={label(folder)}", f"{role}={folder}", {role: {folder: 1.0}})
    if not casts:
        raise UsageError("swap: no subagents, want --subagents A B ... or --roles NAME=A,B (see swarm-rl swap --help)")
    return casts


def named(first: dict[str, Path], folders: Iterable[str]) -> dict[str, Path]:
    """Folders by their names, by their whole paths where names are equal; `first` has its own."""
    found = dict(first)
    for text in folders:
        found[name if (name := label(text)) not in found else text] = resolve(text)
    return found


def _label(casts: dict[str, dict[str, Weights]], name: str, text: str, changes: dict[str, Weights]) -> None:
    casts[name if name not in casts and name != OWN else text] = changes
