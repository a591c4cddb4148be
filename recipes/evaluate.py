"""Compares systems on held-out tasks: the closing evaluation of a run, and `swarm-rl eval` on new worlds.

    single_agent   the weights that training started from, `search` and `access` only;
                   of a run that trains a single agent, the trained ones
    swarm          the trained weights, with subagents
    cold_start     the weights that training started from, with subagents
    floor, ceiling scripts

Episodes are appended to the run's `episodes.jsonl` a block (system, budget) at a time, so that a killed
evaluation goes on at its first unfinished block. Not here: what is made of the episodes (`recipes.report`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from recipes import episodes
from recipes.config import Recipe
from recipes.episodes import Episode
from recipes.overrides import from_json
from recipes.session import Session, load_tokenizer, roll_out, session
from rewards.parl import spawning
from rewards.table import table_scores
from swarm.checkpoint import ref_of
from swarm.folders import CheckpointError
from swarm.loop import Harness
from swarm.seeds import derive
from swarm.types import Task

SYSTEMS = ("single_agent", "cold_start", "swarm", "floor", "ceiling")
_SEED = 1_000_003
"""Held-out tasks of the closing evaluation: the same for every run and seed, so that runs can be compared."""


@dataclass(frozen=True, slots=True)
class Block:
    """One system on one set of tasks at one budget."""

    system: str
    budget: int
    sweep: bool
    tasks: Sequence[Task]


async def quick(s: Session, harness: Harness, n: int) -> dict[str, float]:
    """Means over n held-out tasks at the full budget, for the learning curve, under `eval/`."""
    ev = s.recipe.evaluation
    tasks = s.tasks.draw("heldout", n, _SEED + 1, rows=ev.rows)
    found = await _block(s, harness, Block("quick", ev.budget, False, tasks), lambda n: None)
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
        harness = await _harness(s, block.system, s.recipe.start, run / "policy")
        episodes.append(path, await _block(s, harness, block, advance))


def episodes_of(recipe: Recipe) -> int:
    """How many episodes the closing evaluation has."""
    ev, systems = recipe.evaluation, _systems(recipe)
    return len(systems) * ev.tasks + ev.wide_tasks * sum(len(budgets) for _, budgets in _sweeps(recipe))


def _systems(recipe: Recipe) -> tuple[str, ...]:
    return SYSTEMS if recipe.spawn else ("single_agent", "floor", "ceiling")


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


async def _block(s: Session, harness: Harness, block: Block, advance: Callable[[int], None]) -> list[Episode]:
    seed = derive(_SEED, block.system, block.budget, block.sweep)
    budgets = [block.budget] * len(block.tasks)
    rollouts = await roll_out(harness, block.tasks, budgets, seed, s.recipe.at_once, done=lambda _: advance(1))
    return [
        episodes.of(block.system, r, table_scores(r.task, r.table), spawning(r), block.budget, block.sweep)
        for r in rollouts
    ]


async def _harness(s: Session, system: str, start: Path, policy: Path) -> Harness:
    """The system, its weights in the engine."""
    if system in ("floor", "ceiling"):
        return s.builder.floor() if system == "floor" else s.builder.ceiling()
    folder = policy if system == "swarm" or not s.recipe.spawn else start
    await s.engine.load(await trio.to_thread.run_sync(ref_of, folder))
    return s.builder.single(s.engine) if system == "single_agent" else s.swarm()


# --- swarm-rl eval ---------------------------------------------------------------------


def eval_command(
    run: Path,
    systems: Sequence[str] = SYSTEMS,
    world_seed: int | None = None,
    task_seed: int = 0,
    tasks: int = 100,
    rows: tuple[int, int] = (3, 80),
    budget: int | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> list[Episode]:
    """Evaluates a run's systems on held-out tasks of a world of its own seed.

    Raises CheckpointError where the run or its policy is not there, ValueError for an unknown system.
    """
    unknown = [x for x in systems if x not in SYSTEMS]
    if unknown:
        raise ValueError(f"systems: {unknown[0]!r}, want some of {', '.join(SYSTEMS)}")
    recipe = read_recipe(run)
    if world_seed is not None:
        recipe = replace(recipe, world=replace(recipe.world, seed=world_seed))
    evaluation = replace(recipe.evaluation, tasks=tasks, rows=rows, budget=budget or recipe.evaluation.budget)
    return trio.run(_eval, replace(recipe, evaluation=evaluation), run, tuple(systems), task_seed, done)


def read_recipe(run: Path) -> Recipe:
    """The recipe of a run folder. Raises CheckpointError where there is none."""
    path = run / "recipe.json"
    if not path.exists():
        raise CheckpointError(f"{run}: no recipe.json, want the folder of a run")
    data: dict[str, Any] = json.loads(path.read_text())
    return from_json(Recipe, data)


async def _eval(
    recipe: Recipe, run: Path, systems: tuple[str, ...], task_seed: int, done: Callable[[int], None]
) -> list[Episode]:
    ev = recipe.evaluation
    found: list[Episode] = []
    async with session(recipe, load_tokenizer(run / "policy")) as s:
        tasks = s.tasks.draw("heldout", ev.tasks, task_seed, rows=ev.rows)
        for system in systems:
            harness = await _harness(s, system, recipe.start, run / "policy")
            found += await _block(s, harness, Block(system, ev.budget, False, tasks), done)
    return found
