"""A finished run as a grid: what may be asked of it by name, and its parts opened.

A run on tables has the harnesses of `recipes.harnesses`; a run on trails has its agent, whose context is kept in one
way or another. Either may be given tasks of the other kind. Not here: what is measured (`recipes.grid.cells`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import trio

from envs.accept import accepted
from envs.tasks import TaskSet
from envs.trails import TrailConfig, TrailSet
from envs.world import World
from recipes import episodes
from recipes.arguments import unknown
from recipes.cast.book import last_cast
from recipes.compaction.run import TRAIL_RUNS, Compaction, TrailJob
from recipes.compaction.start import TRAILS
from recipes.compaction.systems import System as TrailSystem
from recipes.compaction.systems import agent, limits_of
from recipes.config import Recipe
from recipes.episodes import Episode
from recipes.grid.cells import Cell, Grid, Source, Trial, cells, check_fits, make, verify
from recipes.grid.judging import VERIFIERS
from recipes.grid.verifying import MisfitError, fitting, verifiers_of
from recipes.harnesses import SCRIPTS, WAYS, System, Way, load, systems_of
from recipes.named import resolve
from recipes.overrides import from_json
from recipes.session import load_tokenizer, session
from rewards.parl import spawning
from rewards.table import table_scores
from swarm.checkpoint import ref_of
from swarm.context import ContextPolicy
from swarm.folders import CheckpointError
from swarm.types import Runner, Task
from swarm.verdicts import Verifier

SourceName = Literal["table", "trails"]
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
TRAIL_WAYS = ("compaction", "truncation", "full_window", "single")
"""How the agent of a run on trails can keep its context; single: not at all, in the small window."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured, by name: `Asked(systems=("swarm", "single@start"), verifiers=("item_f1", "official"))`.

    A system has a name of its own, or is HARNESS (with the trained weights), HARNESS@policy or HARNESS@start. Of each
    source `tasks` are drawn, by `task_seed`; tables have `rows` rows. What is empty or None is as the run has it.
    """

    systems: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    tasks: int = 100
    task_seed: int = 0
    world_seed: int | None = None
    rows: tuple[int, int] = (3, 80)
    budget: int | None = None
    judge: Path | None = None
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked of a run, every name known and fit for its recipe. Nothing is loaded for it."""

    run: Path
    recipe: Recipe | Compaction
    asked: Asked
    systems: tuple[System, ...]
    verifiers: tuple[str, ...]
    sources: tuple[SourceName, ...]

    @property
    def episodes(self) -> int:
        return len(self.systems) * len(self.sources) * self.asked.tasks

    @property
    def verdicts(self) -> int:
        return self.episodes * len(self.verifiers)

    @property
    def budget(self) -> int:
        """Critical steps of an episode."""
        recipe = self.recipe
        return self.asked.budget or (recipe.evaluation.budget if isinstance(recipe, Recipe) else recipe.main.steps)


@dataclass(frozen=True, slots=True)
class Measured:
    """The cells of the grid, and the episodes on tables, scored as those of every evaluation are."""

    cells: tuple[Cell, ...]
    episodes: tuple[Episode, ...]


def plan(run: Path, asked: Asked, ways: Mapping[str, Way] = WAYS) -> Plan:
    """Reads the run's recipe and checks every name. Raises CheckpointError where there is no run, MisfitError."""
    recipe = read_recipe(run)
    if asked.world_seed is not None:
        recipe = replace(recipe, world=replace(recipe.world, seed=asked.world_seed))
    if asked.judge is not None:
        recipe = replace(recipe, judging=replace(recipe.judging, checkpoint=asked.judge))
    if asked.program and isinstance(recipe, Recipe):
        recipe = replace(recipe, program=asked.program)
    trails = isinstance(recipe, Compaction)
    systems = _trail_systems(recipe, asked.systems) if trails else _table_systems(recipe, asked.systems, ways)
    sources = asked.sources or ("trails" if trails else "table",)
    verifiers = asked.verifiers or ("trails" if trails else recipe.verifier,)
    for name in sources:
        _known("source of tasks", name, SOURCES)
    for name in verifiers:
        _known("verifier", name, VERIFIERS)
        if why := recipe.judging.lacks(name):
            raise MisfitError(f"verifier {name}: {why} (--judge CHECKPOINT)")
    return Plan(run, recipe, asked, tuple(systems), verifiers, cast(tuple[SourceName, ...], sources))


def read_recipe(run: Path) -> Recipe | Compaction:
    """The recipe of a run folder. Raises CheckpointError where there is none that has a policy."""
    path = run / "recipe.json"
    if not path.exists():
        raise CheckpointError(f"{run}: no recipe.json, want the folder of a run")
    data: dict[str, Any] = json.loads(path.read_text())
    return from_json(Compaction if "trails" in data else Recipe, data)


def measure(
    plan: Plan,
    made: Callable[[], None] = lambda: None,
    judged: Callable[[], None] = lambda: None,
    ways: Mapping[str, Way] = WAYS,
) -> Measured:
    """Runs the plan; `made` hears of each rollout, `judged` of each verdict. Raises MisfitError before any rollout."""
    return trio.run(_measure, plan, made, judged, ways)


async def _measure(
    plan: Plan, made: Callable[[], None], judged: Callable[[], None], ways: Mapping[str, Way]
) -> Measured:
    recipe = plan.recipe
    async with _tables(plan, recipe, ways) if isinstance(recipe, Recipe) else _trails(plan, recipe) as grid:
        await check_fits(grid)
        rolled = await make(grid, lambda _: made())
        trials: list[Trial] = await verify(grid, rolled, judged)
    found = [
        episodes.of(m.system.name, r, table_scores(r.task, r.table), spawning(r), m.source.budget, False)
        for m in rolled
        for r in m.rollouts
        if m.source.name == "table"
    ]
    return Measured(tuple(cells(trials)), tuple(found))


# --- the two kinds of run --------------------------------------------------------------


@asynccontextmanager
async def _tables(plan: Plan, recipe: Recipe, ways: Mapping[str, Way]) -> AsyncGenerator[Grid]:
    policy = plan.run / "policy"
    async with session(recipe, load_tokenizer(policy)) as s:
        await s.recast(await trio.to_thread.run_sync(last_cast, plan.run))
        verifiers = await verifiers_of(plan.verifiers, recipe.judging, s.engines)
        yield Grid(
            systems=plan.systems,
            sources=_sources(plan, s.world, s.tasks, TRAILS, verifiers),
            verifiers=verifiers,
            open=lambda system: ways[system.harness](s),
            load=lambda system: load(s, system, policy),
            at_once=recipe.at_once,
            judged_at_once=recipe.judging.at_once,
        )


@asynccontextmanager
async def _trails(plan: Plan, recipe: Compaction) -> AsyncGenerator[Grid]:
    policy = plan.run / "policy"
    async with TRAIL_RUNS.open(recipe, load_tokenizer(policy)) as opened:
        job = cast(TrailJob, opened)
        tables = TaskSet(job.world, accepted(job.world, table_scores))
        verifiers = await verifiers_of(plan.verifiers, recipe.judging, job.engines)

        async def put(system: System) -> None:
            folder = policy if system.weights == "policy" else resolve(str(recipe.start))
            await job.engine.load(await trio.to_thread.run_sync(ref_of, folder))

        yield Grid(
            systems=plan.systems,
            sources=_sources(plan, job.world, tables, recipe.trails, verifiers),
            verifiers=verifiers,
            open=lambda system: _trail_agent(job, system.harness),
            load=put,
            at_once=recipe.at_once,
            judged_at_once=recipe.judging.at_once,
        )


def _trail_agent(job: TrailJob, harness: str) -> AbstractAsyncContextManager[Runner]:
    main = job.recipe.main
    whole = replace(main, rewriting=ContextPolicy())
    limits = whole if harness == "single" else limits_of(main, cast(TrailSystem, harness))
    return nullcontext(agent(job.world, job.chat, job.engine, limits))


def _sources(
    plan: Plan, world: World, tables: TaskSet, trails: TrailConfig, verifiers: Mapping[str, Verifier]
) -> list[Source]:
    asked = plan.asked

    def draw(name: SourceName, n: int) -> Sequence[Task]:
        if name == "table":
            return tables.draw("heldout", n, asked.task_seed, rows=asked.rows)
        return TrailSet(world, trails).draw("heldout", n, asked.task_seed)

    return [Source(n, fitting(n, partial(draw, n), asked.tasks, verifiers), plan.budget) for n in plan.sources]


# --- names -----------------------------------------------------------------------------


def _table_systems(recipe: Recipe, texts: Sequence[str], ways: Iterable[str]) -> list[System]:
    """Those asked for, or all named ones that fit."""
    named = systems_of(recipe)
    systems = [_system(text, named, ways) for text in texts]
    for system in systems:
        if why := recipe.misfit(system.harness):
            raise MisfitError(f"harness {system.name} does not fit the recipe: {why}")
    return systems or [s for s in named.values() if not recipe.misfit(s.harness)]


def _trail_systems(recipe: Compaction, texts: Sequence[str]) -> list[System]:
    own = recipe.system
    return [_system(text, {}, TRAIL_WAYS) for text in texts or (own, f"{own}@start")]


def _system(text: str, named: Mapping[str, System], ways: Iterable[str]) -> System:
    if text in named:
        return named[text]
    harness, at, weights = text.partition("@")
    _known("harness", harness, [*dict.fromkeys([*named, *ways])])
    if harness in named or harness in SCRIPTS:
        raise MisfitError(f"harness {text}: {harness} has its weights already, want it without @{weights}")
    if at and weights not in ("policy", "start"):
        raise MisfitError(f"harness {text}: weights {weights!r}, want {harness}@policy or {harness}@start")
    trained = weights in ("", "policy")
    return System(harness if trained else text, harness, "policy" if trained else "start")


def _known(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise MisfitError(unknown(kind, name, known))
