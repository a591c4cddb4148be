"""Who the subagents are, and what that does: orchestrators against casts of subagents, on the same tasks and seeds.

                        reader    small    large       a cell: one rollout a task and trial, appended as it ends,
    wide_search            …        …        …         to a file of its own, so that what was measured is never
    single_agent           …        …        …         measured again

The first cast is the run's own, which all others are held against, task by task. Not here: what is made of the
episodes (`recipes.swap.report`), and the command line (`recipes.swap.command`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from recipes import episodes
from recipes.cast.roles import Weights
from recipes.config import Recipe
from recipes.engines import check_served
from recipes.episodes import Episode
from recipes.overrides import to_json
from recipes.session import Session, cast_of, load_tokenizer, session
from rewards.parl import spawning
from rewards.table import table_scores
from swarm.alike import check_alike
from swarm.checkpoint import ref_of
from swarm.gather import Job, gather
from swarm.seeds import derive
from swarm.types import Budget, Cast, CheckpointRef, Rollout, Task

_SEED = 1_000_033
OWN = "as it is"
"""The label of the run's own cast."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Held-out tasks, how often each is run, and the critical steps of a rollout; the same for every cell."""

    tasks: int = 100
    rows: tuple[int, int] = (3, 80)
    budget: int = 40
    task_seed: int = 0
    trials: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One orchestrator over one cast: `cast` changes the run's own."""

    orchestrator: str
    policy: CheckpointRef
    name: str
    cast: Cast

    def key(self, recipe: Recipe, settings: Settings) -> str:
        """Equal for cells whose episodes would be the same: of the weights, the limits, the world and the tasks."""
        played = {role: [[ref.sha256, weight] for ref, weight in mixture] for role, mixture in self.cast.items()}
        whole = to_json(recipe)
        kept = {name: whole[name] for name in ("world", "main", "child", "spawning", "roles")}
        text = json.dumps([self.policy.sha256, played, kept, asdict(settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cells_of(
    recipe: Recipe, own: Cast, orchestrators: Mapping[str, Path], casts: Mapping[str, Mapping[str, Weights]]
) -> list[Cell]:
    """Every orchestrator over the run's own cast and then over each of the others, all checkpoints checked.

    Raises CheckpointError for a folder that is none, or that cannot be served here.
    """
    changes = {OWN: own, **{name: {**own, **cast_of(weights)} for name, weights in casts.items()}}
    for mixture in (m for cast in changes.values() for m in cast.values()):
        for ref, _ in mixture:
            check_served(recipe, ref.path)
    for folder in orchestrators.values():
        check_alike(folder, recipe.start)
    policies = {name: ref_of(folder) for name, folder in orchestrators.items()}
    return [Cell(o, policy, name, cast) for o, policy in policies.items() for name, cast in changes.items()]


def measure(
    recipe: Recipe, cells: Sequence[Cell], settings: Settings, out: Path, advance: Callable[[int], None]
) -> list[list[Episode]]:
    """The episodes of every cell, in order; those that are on file under `out` are not run again.

    Raises ValueError where the world has too few such tasks.
    """
    return trio.run(_measure, recipe, cells, settings, out, advance)


async def _measure(
    recipe: Recipe, cells: Sequence[Cell], settings: Settings, out: Path, advance: Callable[[int], None]
) -> list[list[Episode]]:
    out.mkdir(parents=True, exist_ok=True)
    async with session(recipe, load_tokenizer(recipe.start)) as s:
        tasks = s.tasks.draw("heldout", settings.tasks, settings.task_seed, rows=settings.rows)
        return [await _cell(s, cell, tasks, settings, out, advance) for cell in cells]


async def _cell(
    s: Session, cell: Cell, tasks: Sequence[Task], settings: Settings, out: Path, advance: Callable[[int], None]
) -> list[Episode]:
    """The policy and the cast are only brought up where something is left to run."""
    found: list[Episode] = []
    ready = False
    for trial in range(settings.trials):
        path = out / f"{cell.key(s.recipe, settings)}-{trial}.jsonl"
        kept = episodes.read(path) if path.exists() else []
        known = {e.task for e in kept}
        left = [(k, task) for k, task in enumerate(tasks) if task.id not in known]
        advance(len(tasks) - len(left))
        if left and not ready:
            await s.engine.load(cell.policy)
            await s.recast(cell.cast)
            ready = True
        found += kept + await _trial(s, cell, left, settings, trial, path, advance)
    return found


async def _trial(
    s: Session,
    cell: Cell,
    left: Sequence[tuple[int, Task]],
    settings: Settings,
    trial: int,
    path: Path,
    advance: Callable[[int], None],
) -> list[Episode]:
    made: list[Episode] = []

    def done(rollout: Rollout) -> None:
        scores = table_scores(rollout.task, rollout.table)
        name = f"{cell.orchestrator} over {cell.name}"
        made.append(episodes.of(name, rollout, scores, spawning(rollout), settings.budget, sweep=False))
        episodes.append(path, made[-1:])
        advance(1)

    harness, seed = s.swarm(), derive(_SEED, "trial", trial)
    limits = Budget(settings.budget, harness.budget.tokens, harness.budget.seconds)
    # A task's seed is its place among all: what is left of a trial runs as it would have run.
    jobs = [Job(harness, task, derive(seed, "rollout", k), limits) for k, task in left]
    await gather(jobs, at_once=s.recipe.at_once, done=done)
    return made
