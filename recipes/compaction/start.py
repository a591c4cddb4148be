"""The cold start on trails: from the shipped reader to the shipped scout, which follows trails and writes summaries.

First comes practice in recall (`recipes.compaction.recall`), then demonstrations. Their summaries are of varying
quality: some episodes forget nothing, others now and then a value. One model learns all three ways of keeping a
context, so that what is compared later starts from one point.
Not here: reinforcement (`recipes.compaction.run`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import trio
from rich.console import Console

from envs.trails import TrailConfig, TrailSet
from envs.world import WorldConfig, build_world
from recipes.cold_start import DEMOS, epochs, fit_steps, fitted
from recipes.compaction.recall import Practice, practise
from recipes.compaction.recall import rows as practice_rows
from recipes.compaction.systems import System, agent, limits_of, scripted
from recipes.config import SHIPPED, Limits
from recipes.demonstrations import Demo, examples_of, renumbered
from recipes.progress import Progress
from recipes.session import CACHE, load_checkpoint, load_tokenizer
from recipes.tokenizer import handle_tokens
from rewards.trails import trail_scores
from subagents.trails import SummaryStyle, follow
from swarm.chat import HermesChat
from swarm.checkpoint import save
from swarm.checks import want
from swarm.context import ContextPolicy
from swarm.gather import Job, gather
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import SFTConfig, sft_loss
from swarm.rundir import RunDir
from swarm.seeds import derive
from swarm.types import Budget, Rollout

WINDOW = Limits(
    turn_tokens=72,
    context=512,
    temperature=0.6,
    steps=96,
    rewriting=ContextPolicy("compaction", threshold=336, keep=1, summary_tokens=56, limit=64),
)
"""A small window: a transcript is on average more than four times as long."""
TRAILS = TrailConfig(trails=(8, 9), links=(2, 3), repeats=False)
PRACTICE = "practice"
_HELD_OUT = 60
_want = partial(want, "trail start")


@dataclass(frozen=True, slots=True)
class TrailDemos:
    """How many episodes under each way of keeping a context, and how well summaries remember.

    `drops`: in an episode with summaries, each of them gives a found value as N/A with one of these probabilities.
    """

    compaction: int = 900
    full_window: int = 400
    truncation: int = 100
    drops: tuple[float, ...] = (0.0, 0.03, 0.08, 0.15)

    @property
    def episodes(self) -> int:
        return self.compaction + self.full_window + self.truncation

    def __post_init__(self) -> None:
        if not self.drops or not all(0 <= d < 1 for d in self.drops):
            raise ValueError(f"trail demos: drops = {self.drops}, want some from 0 to below 1")
        if self.episodes <= _HELD_OUT:
            raise ValueError(f"trail demos: {self.episodes} episodes, want more than {_HELD_OUT}")


@dataclass(frozen=True, slots=True)
class TrailStart:
    """Practice in recall, then `steps` optimizer steps of about `step_tokens` tokens, from the checkpoint `start`.

    `kept`: rows of the second practice for every demonstrated episode, lest it be forgotten.
    """

    seed: int = 0
    start: Path = SHIPPED
    steps: int = 1200
    step_tokens: int = 2500
    observed: float = 0.05
    world: WorldConfig = field(default_factory=lambda: WorldConfig(conflicts=0.1, missing=0.05))
    trails: TrailConfig = TRAILS
    main: Limits = WINDOW
    demos: TrailDemos = field(default_factory=TrailDemos)
    repeat: Practice = field(default_factory=Practice)
    recall: Practice = field(default_factory=lambda: Practice(300, handles=320, pairs=0.5, lr=LrSchedule(2e-3, 20)))
    kept: int = 6
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(LrSchedule(2e-3, 30, 1200, "cosine", 0.03)))
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens"):
            _want(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        _want("observed", self.observed, 0 <= self.observed <= 1, "a share from 0 to 1")
        _want("kept", self.kept, self.kept >= 0, "0 or more")


def cold_start_trails() -> TrailStart:
    """From the shipped model to one that follows trails, with summaries that forget now and then."""
    return TrailStart()


def fit_trails(recipe: TrailStart, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Records demonstrations, fits the model, saves `OUT/policy`. Returns its losses."""
    between = {PRACTICE: recipe.repeat.steps + recipe.recall.steps}
    return fitted(recipe, _fit, out, between=between, clean=clean, console=console)


def _fit(recipe: TrailStart, run: RunDir, progress: Progress) -> dict[str, Any]:
    began = perf_counter()
    tokenizer, model = load_tokenizer(recipe.start), load_checkpoint(recipe.start)[0]
    rollouts = trio.run(record, recipe, HermesChat(tokenizer, terse_tools=True), lambda _: progress.advance(DEMOS))
    rng, handles = random.Random(recipe.seed), handle_tokens(tokenizer)
    rng.shuffle(rollouts)
    demos = [Demo(renumbered(r.trace, rng, handles)) for r in rollouts]
    practised = practice_rows(tokenizer, recipe.recall, recipe.kept * len(demos), rng)
    held_out, data = examples_of(demos[:_HELD_OUT]), examples_of([*demos[_HELD_OUT:], *practised], recipe.observed)
    for practice in (recipe.repeat, recipe.recall):
        recalled = practise(model, tokenizer, practice, recipe.seed, lambda: progress.advance(PRACTICE))
    chosen = map(torch.tensor, epochs(data.rows.length_S, recipe.step_tokens, recipe.seed))
    tokens = fit_steps(recipe, model, data, chosen, run, progress)
    save(model, tokenizer, run.path / "policy", 0)
    scores = [trail_scores(r.task, r.table)["score"] for r in rollouts]
    return {
        "loss": sft_loss(model, recipe.sft, held_out),
        "practice_loss": recalled,
        "tokens": tokens,
        "episodes": len(demos) - _HELD_OUT,
        "demonstrated_score": sum(scores) / len(scores),
        "wall_seconds": perf_counter() - began,
        "seed": recipe.seed,
    }


async def record(recipe: TrailStart, chat: HermesChat, done: Callable[[Rollout], None] | None = None) -> list[Rollout]:
    """The demonstrations, each a whole episode of the scripted follower on a training task."""
    world, mix = build_world(recipe.world, CACHE), recipe.demos
    counts: Sequence[tuple[System, int]] = (
        ("compaction", mix.compaction),
        ("full_window", mix.full_window),
        ("truncation", mix.truncation),
    )
    tasks = TrailSet(world, recipe.trails).draw("train", sum(n for _, n in counts), derive(recipe.seed, "demos"))
    systems: list[System] = [system for system, n in counts for _ in range(n)]
    jobs: list[Job] = []
    for k, (task, system) in enumerate(zip(tasks, systems, strict=True)):
        style = SummaryStyle(drop=mix.drops[k % len(mix.drops)])
        limits = limits_of(replace(recipe.main, seconds=3600.0), system)
        harness = agent(world, chat, scripted(chat, follow(style, derive(recipe.seed, "style", k))), limits)
        jobs.append(Job(harness, task, derive(recipe.seed, k), Budget(limits.steps, limits.context, limits.seconds)))
    return await gather(jobs, done=done)
