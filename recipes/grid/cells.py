"""Task × harness × verifier: every harness on the same tasks, every rollout under every verifier.

    sources ─ draw ─▶ tasks ─┐
    systems ─ open ─▶ runner ┴─▶ rollouts ─┬─▶ verifier ─▶ verdicts ─▶ trials ─▶ cells
                                           └─▶ verifier ─▶ …

A rollout is made once, whoever scores it. What does not fit is refused by name before anything is run. Not here: where
runners, tasks and verifiers come from (`recipes.grid.runs`), and the command (`recipes.grid.command`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from recipes.episodes import interval
from recipes.grid.verifying import MisfitError
from recipes.harnesses import System
from recipes.session import roll_out
from rewards.verifiers import verified
from swarm.seeds import derive
from swarm.types import Rollout, Runner, Task
from swarm.verdicts import Verifier

SEED = 1_000_003
"""What the rollouts of an evaluation are drawn with: the same for every run."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where tasks are from: `Source("table", tasks, budget=40)`; the budget is of critical steps, for each of them."""

    name: str
    tasks: Sequence[Task]
    budget: int


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: all of `systems`, on the tasks of all of `sources`, under all of `verifiers`.

    `open` gives a system's runner, `load` puts its weights into the policy's engine. Rollouts and verdicts are made up
    to `at_once` and `judged_at_once` at a time.
    """

    systems: Sequence[System]
    sources: Sequence[Source]
    verifiers: Mapping[str, Verifier]
    open: Callable[[System], AbstractAsyncContextManager[Runner]]
    load: Callable[[System], Awaitable[None]]
    at_once: int = 64
    judged_at_once: int = 32


@dataclass(frozen=True, slots=True)
class Made:
    """The rollouts of one system on one source, in the order of the tasks."""

    source: Source
    system: System
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout under one verifier: `Trial("table", "swarm", "item_f1", "city-12", 0.8)`; without a score, why."""

    source: str
    system: str
    verifier: str
    task: str
    score: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A system under a verifier, over the tasks of a source.

    `mean` of the verifier's main score, of all `episodes` that have one, and `ci`, its 95 % bootstrap interval over
    tasks: None where there are none. `failed`: those that have no score, by kind, in no mean.
    """

    tasks_from: str
    harness: str
    verifier: str
    mean: float | None
    ci: tuple[float, float] | None
    tasks: int
    episodes: int
    failed: Mapping[str, int]


async def check_fits(grid: Grid) -> None:
    """Raises MisfitError, one line that names what does not fit which task. Runs nothing."""
    every = [(source, task) for source in grid.sources for task in source.tasks]
    for name, verifier in grid.verifiers.items():
        _refuse("verifier", name, every, verifier.fits)
    for system in grid.systems:
        async with grid.open(system) as runner:
            _refuse("harness", system.name, every, runner.fits)


def _refuse(kind: str, name: str, every: Iterable[tuple[Source, Task]], fits: Callable[[Task], str]) -> None:
    for source, task in every:
        if why := fits(task):
            raise MisfitError(f"{kind} {name} does not fit task {task.id} from {source.name}: {why}")


async def make(grid: Grid, done: Callable[[Rollout], None]) -> list[Made]:
    """Every system on every source; `done` hears of each rollout."""
    made: list[Made] = []
    for system in grid.systems:
        await grid.load(system)
        async with grid.open(system) as runner:
            for source in grid.sources:
                seed = derive(SEED, system.name, source.budget, False)
                budgets = [source.budget] * len(source.tasks)
                rollouts = await roll_out(runner, source.tasks, budgets, seed, grid.at_once, done)
                made.append(Made(source, system, rollouts))
    return made


async def verify(grid: Grid, made: Sequence[Made], done: Callable[[], None]) -> list[Trial]:
    """Every rollout under every verifier; `done` hears of each verdict."""
    trials: list[Trial] = []
    for m in made:
        for name, verifier in grid.verifiers.items():
            verdicts = await verified(verifier, m.rollouts, at_once=grid.judged_at_once, done=done)
            trials += [
                Trial(m.source.name, m.system.name, name, r.task.id, v.scores.get(verifier.main), v.error)
                for r, v in zip(m.rollouts, verdicts, strict=True)
            ]
    return trials


def cells(trials: Iterable[Trial]) -> list[Cell]:
    """The cells of the grid, in the order in which they were measured."""
    groups: dict[tuple[str, str, str], list[Trial]] = defaultdict(list)
    for t in trials:
        groups[t.source, t.system, t.verifier].append(t)
    return [_cell(*names, group) for names, group in groups.items()]


def _cell(source: str, system: str, verifier: str, trials: Sequence[Trial]) -> Cell:
    by_task: dict[str, list[float]] = defaultdict(list)
    for t in trials:
        if t.score is not None:
            by_task[t.task].append(t.score)
    scores = [score for found in by_task.values() for score in found]
    ci = interval([sum(found) / len(found) for found in by_task.values()])
    failed = Counter(t.error.partition(":")[0] for t in trials if t.error)
    return Cell(
        tasks_from=source,
        harness=system,
        verifier=verifier,
        mean=sum(scores) / len(scores) if scores else None,
        ci=(ci[0], ci[1]) if ci else None,
        tasks=len(by_task),
        episodes=len(scores),
        failed=dict(sorted(failed.items())),
    )


def as_json(found: Iterable[Cell]) -> list[dict[str, Any]]:
    """The cells, ready for `json.dumps`."""
    return [asdict(cell) for cell in found]


def grid_table(found: Sequence[Cell], source: str) -> Table:
    """A row a harness, a column a verifier: mean and interval, and how many episodes have no score, by kind."""
    here = [c for c in found if c.tasks_from == source]
    verifiers = list(dict.fromkeys(c.verifier for c in here))
    title = f"Tasks from {source}: mean, 95 % over tasks"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None)
    table.add_column("harness")
    for heading in (*verifiers, "tasks", "no score"):
        table.add_column(heading, justify="right")
    for harness in dict.fromkeys(c.harness for c in here):
        row = {c.verifier: c for c in here if c.harness == harness}
        tasks = max(c.tasks for c in row.values())
        table.add_row(escape(harness), *(_shown(row[v]) for v in verifiers), str(tasks), _failed(row.values()))
    return table


def _shown(cell: Cell) -> str:
    if cell.mean is None:
        return "–"
    return f"{cell.mean:.3f} ({cell.ci[0]:.3f}–{cell.ci[1]:.3f})" if cell.ci else f"{cell.mean:.3f}"


def _failed(row: Iterable[Cell]) -> str:
    """`2 rollout, 1 judge_unparsed`: a rollout that failed is one, however many verifiers missed it."""
    most: Counter[str] = Counter()
    for cell in row:
        most |= Counter(cell.failed)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(most.items())) or "–"
