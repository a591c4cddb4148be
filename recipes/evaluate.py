"""Compares systems on held-out tasks: the evaluations during a run and at its end.

    single_agent   the weights that training started from, `search` and `access` only;
                   of a run that trains a single agent, the trained ones
    swarm          the trained weights, with subagents
    cold_start     the weights that training started from, with subagents
    floor, ceiling scripts

Episodes are appended to the run's `episodes.jsonl` a block (system, budget) at a time, so that a killed
evaluation goes on at its first unfinished block. Not here: what is made of the episodes (`recipes.report`), and
other harnesses, verifiers and tasks (`recipes.grid.cells`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes import episodes
from recipes.config import Recipe
from recipes.episodes import Episode
from recipes.harnesses import WAYS, load, systems_of
from recipes.session import Session, roll_out
from rewards.parl import spawning
from rewards.table import table_scores
from swarm.seeds import derive
from swarm.types import Runner, Task

_SEED = 1_000_003
"""Held-out tasks of the closing evaluation: the same for every run and seed, so that runs can be compared."""


@dataclass(frozen=True, slots=True)
class Block:
    """One system on one set of tasks at one budget."""

    system: str
    budget: int
    sweep: bool
    tasks: Sequence[Task]


async def quick(s: Session, runner: Runner, n: int) -> dict[str, float]:
    """Means over n held-out tasks at the full budget, for the learning curve, under `eval/`."""
    ev = s.recipe.evaluation
    tasks = s.tasks.draw("heldout", n, _SEED + 1, rows=ev.rows)
    found = await _block(s, runner, Block("quick", ev.budget, False, tasks), lambda n: None)
    means = episodes.summary(found)
    wanted = ("item_f1", "critical_steps", "parallelism", "spawn_rate", "finish_rate", "spurious_rate")
    return {f"eval/{k}": float(means[k]) for k in wanted if means[k] is not None}


async def closing(
    s: Session, run: Path, blocks: Sequence[Block], advance: Callable[[int], None], skip: Callable[[int], None]
) -> None:
    """All blocks of the recipe's evaluation; those that are on file already are skipped."""
    path = run / "episodes.jsonl"
    kept = episodes.read(path) if path.exists() else []
    counts = Counter((e.system, e.budget, e.sweep) for e in kept)
    whole = {(b.system, b.budget, b.sweep) for b in blocks if counts[b.system, b.budget, b.sweep] == len(b.tasks)}
    episodes.write(path, [e for e in kept if (e.system, e.budget, e.sweep) in whole])
    for block in blocks:
        if (block.system, block.budget, block.sweep) in whole:
            skip(len(block.tasks))
            continue
        system = systems_of(s.recipe)[block.system]
        await load(s, system, run / "policy")
        async with WAYS[system.harness](s) as runner:
            episodes.append(path, await _block(s, runner, block, advance))


def episodes_of(recipe: Recipe) -> int:
    """How many episodes the closing evaluation has."""
    ev, systems = recipe.evaluation, _systems(recipe)
    return len(systems) * ev.tasks + ev.wide_tasks * sum(len(budgets) for _, budgets in _sweeps(recipe))


def _systems(recipe: Recipe) -> tuple[str, ...]:
    return tuple(name for name, system in systems_of(recipe).items() if not recipe.misfit(system.harness))


def _sweeps(recipe: Recipe) -> list[tuple[str, tuple[int, ...]]]:
    ev = recipe.evaluation
    single = [("single_agent", ev.sweep_single)]
    return [*single, ("swarm", ev.sweep_swarm)] if recipe.spawn else single


def blocks_of(s: Session) -> list[Block]:
    """The blocks of the closing evaluation. Raises ValueError where the world has too few such tasks:
    draw them before training, not after it.
    """
    ev = s.recipe.evaluation
    tasks = s.tasks.draw("heldout", ev.tasks, _SEED, rows=ev.rows)
    wide = s.tasks.draw("heldout", ev.wide_tasks, _SEED + 2, rows=ev.wide_rows)
    full = [Block(system, ev.budget, False, tasks) for system in _systems(s.recipe)]
    swept = [Block(system, budget, True, wide) for system, budgets in _sweeps(s.recipe) for budget in budgets]
    return full + swept


async def _block(s: Session, runner: Runner, block: Block, advance: Callable[[int], None]) -> list[Episode]:
    seed = derive(_SEED, block.system, block.budget, block.sweep)
    budgets = [block.budget] * len(block.tasks)
    rollouts = await roll_out(runner, block.tasks, budgets, seed, s.recipe.at_once, done=lambda _: advance(1))
    return [
        episodes.of(block.system, r, table_scores(r.task, r.table), spawning(r), block.budget, block.sweep)
        for r in rollouts
    ]
