"""What a run needs while it runs: world, language, engines; and how rollouts are made and scored with it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from envs.accept import accepted
from envs.tasks import TaskSet
from envs.world import World, WorldConfig, build_world
from recipes.config import Recipe, Training
from recipes.engines import Engines, open_engines
from recipes.systems import Builder
from rewards.table import table_scores
from swarm.chat import chat_of
from swarm.checkpoint import load_model, ref_of
from swarm.folders import CheckpointError
from swarm.gather import Job, gather
from swarm.loop import Harness
from swarm.seeds import derive
from swarm.types import Budget, Rollout, Runner, ServingEngine, Task

CACHE = Path(".cache")
"""Where extracted facts are kept between runs, below the working folder."""


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run that do not change: its world and tasks, its systems, and its engines.

    `frozen` serves the subagents, all but those of a name in `roles`.
    """

    recipe: Recipe
    world: World
    tasks: TaskSet
    builder: Builder
    engine: ServingEngine
    frozen: ServingEngine
    roles: Mapping[str, ServingEngine]
    engines: Engines
    threads: int

    def harness(self) -> Harness:
        """The system that is trained."""
        if self.recipe.spawn:
            return self.swarm()
        return self.builder.single(self.engine)

    def swarm(self) -> Harness:
        """An orchestrator on the policy's engine over the frozen subagents."""
        return self.builder.swarm(self.engine, self.frozen, self.roles)

    async def checksums(self) -> dict[str, str]:
        """sha256 of the frozen weights as they are served, by role; "" is everybody else's."""
        return {name: await engine.checksum() for name, engine in {"": self.frozen, **self.roles}.items()}


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
    limit = max(recipe.main.context, recipe.child.context)
    others = tuple(dict.fromkeys(recipe.roles.values()))
    async with open_engines(recipe, (recipe.start, recipe.subagent, *others), limit, threads) as engines:
        engine, frozen, *more = engines.each
        serves = {recipe.subagent: frozen, **dict(zip(others, more, strict=True))}
        roles = {name: serves[folder] for name, folder in recipe.roles.items()}
        yield Session(recipe, world, tasks, builder, engine, frozen, roles, engines, threads)


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
