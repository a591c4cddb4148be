"""What a run needs while it runs: world, language, engines; and how rollouts are made and scored with it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import trio
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from envs.accept import accepted
from envs.tasks import TaskSet
from envs.world import World, WorldConfig, build_world
from recipes.config import Recipe, Training
from recipes.engines import Engines, check_served, open_engines
from recipes.named import resolve
from recipes.systems import Builder
from rewards.table import table_scores
from subagents.roster import Player, Roster
from swarm.chat import Chat, chat_of
from swarm.checkpoint import frozen_ref, load_model, ref_of
from swarm.folders import CheckpointError, file_sha256
from swarm.gather import Job, gather
from swarm.loop import Harness
from swarm.seeds import derive
from swarm.types import Budget, Cast, CheckpointRef, Rollout, Runner, ServingEngine, Task

CACHE = Path(".cache")
"""Where extracted facts are kept between runs, below the working folder."""


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run that do not change: its world and tasks, its systems, and its engines; and its roster, which
    says who the subagents are from the next spawn on. `opening` is its cast at first, `casts` its last ones, which
    rollouts that are under way may have begun with.
    """

    recipe: Recipe
    world: World
    tasks: TaskSet
    builder: Builder
    engine: ServingEngine
    roster: Roster
    engines: Engines
    threads: int
    opening: Cast
    casts: deque[Cast] = field(default_factory=deque[Cast])
    recasting: trio.Lock = field(default_factory=trio.Lock)

    def harness(self) -> Harness:
        """The system that is trained."""
        if self.recipe.spawn:
            return self.swarm()
        return self.builder.single(self.engine)

    def swarm(self) -> Harness:
        """An orchestrator on the policy's engine over the frozen subagents."""
        return self.builder.swarm(self.engine, self.roster.subagent)

    async def recast(self, cast: Cast) -> bool:
        """Makes this the whole cast from the next spawn on; see `Roster.swap`. False if it was already, or is empty.

        To be called between batches: engines are closed that no batch which may still run has begun with.
        """
        async with self.recasting:
            if not cast or dict(self.roster.cast) == dict(cast):
                return False
            await self.roster.swap(cast, whole=True)
            self.casts.append(self.roster.cast)
            while len(self.casts) > 1 + self.recipe.ppo.max_staleness:
                self.casts.popleft()
            await self.engines.retire({ref.sha256 for c in self.casts for mixture in c.values() for ref, _ in mixture})
            return True

    async def checksums(self) -> dict[str, str]:
        """sha256 of the frozen weights as they are served, by that of their checkpoint."""
        return await self.engines.checksums()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint. Raises CheckpointError where there is none."""
    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(f"{folder}: no tokenizer.json, want a checkpoint with its tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def load_checkpoint(folder: Path) -> tuple[PreTrainedModel, str]:
    """A model and the sha256 of its weights."""
    ref = ref_of(folder)
    return load_model(ref), ref.sha256


def open_world(config: WorldConfig) -> tuple[World, TaskSet]:
    """A world, and those of its tasks that are worth serving."""
    world = build_world(config, CACHE)
    return world, TaskSet(world, keep=accepted(world, table_scores))


def threads_of(recipe: Training) -> int:
    """Cores of the engine, and as many of the learner: half of all where the two overlap."""
    threads = recipe.threads or os.cpu_count() or 1
    return threads if recipe.ppo.max_staleness == 0 else max(1, threads // 2)


def warn_of_bf16(bf16: bool, console: Console) -> None:
    """Says so where a processor has no bf16 products of its own: emulated ones are slower than float32, not faster."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    if bf16 and not native:
        console.print("[yellow]bf16 is emulated on this processor and slower than float32; want bf16 false[/yellow]")


@asynccontextmanager
async def session(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> AsyncGenerator[Session]:
    """Opens the world and starts the engines, with the weights that training starts from and the subagents'."""
    threads = threads_of(recipe)
    torch.set_num_threads(threads)
    world, tasks = open_world(recipe.world)
    builder = Builder(world, chat_of(tokenizer), recipe)
    limit = max(recipe.main.context, recipe.child.context, recipe.judging.longest)
    for iteration in (0, *map(int, recipe.swaps)):
        for role, weights in recipe.cast(iteration).items():
            for folder in weights:
                check_served(recipe, resolve(folder), recipe.role(role).engine)
    async with open_engines(recipe, (recipe.start, *_first(recipe)), limit, threads) as engines:

        async def serve(role: str, ref: CheckpointRef) -> Player:
            engine = await engines.serve(ref, recipe.role(role).engine)
            return Player(engine, language_of(ref.path, recipe.start, builder.chat))

        roster = Roster(builder.roles(), serve)
        opening = cast_of(recipe.cast())
        await roster.swap(opening)
        yield Session(recipe, world, tasks, builder, engines.each[0], roster, engines, threads, opening)


def cast_of(weights: Mapping[str, Mapping[str, float]]) -> Cast:
    """The cast of a recipe's folders or names in the store, by role. Raises CheckpointError for one that is neither."""
    refs = {folder: frozen_ref(resolve(folder)) for mixture in weights.values() for folder in mixture}
    return {role: tuple((refs[f], weight) for f, weight in mixture.items()) for role, mixture in weights.items()}


def _first(recipe: Recipe) -> list[Path]:
    """The checkpoints whose engines are opened together, at the start: those of the run's own kind of engine."""
    mixtures = [m for role, m in recipe.cast().items() if recipe.role(role).engine in ("", recipe.engine)]
    return list(dict.fromkeys(resolve(folder) for mixture in mixtures for folder in mixture))


def language_of(folder: Path, start: Path, chat: Chat) -> Chat:
    """The language of a checkpoint: the policy's, unless it comes with another tokenizer."""
    own, policys = folder / "tokenizer.json", start / "tokenizer.json"
    if not own.exists() or file_sha256(own) == file_sha256(policys):
        return chat
    return chat_of(load_tokenizer(folder))


async def roll_out(
    harness: Runner,
    tasks: Sequence[Task],
    budgets: Sequence[int],
    seed: int,
    at_once: int,
    done: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """One rollout a task, each with its own budget of critical steps and its own seed."""
    jobs = [
        Job(harness, task, derive(seed, "rollout", k), Budget(steps, harness.budget.tokens, harness.budget.seconds))
        for k, (task, steps) in enumerate(zip(tasks, budgets, strict=True))
    ]
    return await gather(jobs, at_once=at_once, done=done)
