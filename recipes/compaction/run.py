"""Compaction-aware RL of a single agent on trails: one run of one way to keep a context.

The loop is `recipes.ppo_run`. The reward is the share of trails whose value is right; nothing is paid for
summaries as such: each is a turn like any other, trained in the segment that wrote it.
Not here: the comparison over seeds and forms (`recipes.compaction.study`), the cold start (`recipes.compaction.start`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import trio
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from envs.trails import TrailConfig, TrailSet
from envs.world import World, WorldConfig, build_world
from recipes.cast.roles import Weights
from recipes.compaction import episodes
from recipes.compaction.episodes import FILE, TrailEpisode
from recipes.compaction.start import TRAILS, WINDOW
from recipes.compaction.systems import FULL, System, agent, limits_of
from recipes.config import SHIPPED, Limits, Training
from recipes.engines import Engines, open_engines
from recipes.ppo_run import Kind, Scores, run_ppo
from recipes.publish.rules import Publish, check_best
from recipes.session import CACHE, load_tokenizer, roll_out, threads_of
from rewards.trails import trail_scores
from swarm.chat import Chat, chat_of
from swarm.loop import Harness
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.ppo import PPOConfig
from swarm.seeds import derive
from swarm.types import Cast, Reward, Rollout, ServingEngine, Task

SCOUT = SHIPPED.with_name("scout-1m")
"""The shipped model that follows trails; `swarm-rl train cold_start_trails` makes one."""
StartSystem = Literal["truncation", "untrained", "full_window"]
START_SYSTEMS: dict[str, System] = {
    "truncation": "truncation",
    "untrained": "compaction",
    "full_window": "full_window",
}
"""The systems of the weights that training starts from, and how each keeps its context."""
_SEED = 1_000_033
"""Held-out tasks of the closing evaluation: the same for every run, system and seed."""


@dataclass(frozen=True, slots=True)
class TrailEvaluation:
    """The closing evaluation has `tasks` held-out tasks, the short one during training `during` others."""

    tasks: int = 128
    during: int = 32

    def __post_init__(self) -> None:
        for name in ("tasks", "during"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation: {name} = {getattr(self, name)}, want 1 or more")


@dataclass(frozen=True, slots=True)
class Compaction(Training):
    """A PPO run of a single agent on trails. `system` is how the trained policy keeps its context; `main` has the
    small window, of which `full_window` makes a large one."""

    system: System = "compaction"
    world: WorldConfig = field(default_factory=lambda: WorldConfig(conflicts=0.1, missing=0.05))
    trails: TrailConfig = TRAILS
    main: Limits = WINDOW
    evaluation: TrailEvaluation = field(default_factory=TrailEvaluation)
    publish: Publish = field(default_factory=lambda: Publish(best="eval/score"))

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        self.check_temperature(self.main)
        check_best(self.publish, ("eval/score", "eval/success"))


def compaction_run() -> Compaction:
    """One run of the compaction recipe: a single agent with a small window learns to write summaries.

    λ adapts to a rollout's length, 1 − 1/(1.5 L), as CompactionRL (arXiv 2607.05378) takes it, for every form alike.
    The learning rate is a third of the main job's: recall, which summaries live on, does not survive larger steps.
    """
    ppo = PPOConfig(lr=1e-4, advantage=AdvantageConfig(lam_alpha=1.5), temperature=WINDOW.temperature)
    return Compaction(start=SCOUT, iterations=12, episodes=32, ppo=ppo)


def run_compaction(
    recipe: Compaction, out: Path, *, clean: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Trains, evaluates on held-out tasks and reports; see `run_ppo`."""
    return run_ppo(recipe, out, TRAIL_RUNS, clean=clean, console=console)


@dataclass(frozen=True, slots=True)
class TrailJob:
    """A `Job` on trails."""

    recipe: Compaction
    world: World
    tasks: TrailSet
    chat: Chat
    engine: ServingEngine
    engines: Engines

    def draw(self, iteration: int) -> tuple[list[Task], list[int]]:
        recipe = self.recipe
        drawn = self.tasks.draw("train", recipe.episodes // recipe.group, derive(recipe.seed, "tasks", iteration))
        tasks = [t for t in drawn for _ in range(recipe.group)]
        return tasks, [recipe.main.steps] * len(tasks)

    def harness(self) -> Harness:
        return agent(self.world, self.chat, self.engine, limits_of(self.recipe.main, self.recipe.system))

    async def rewarded(self, raw: Sequence[Rollout], step: int) -> tuple[list[Rollout], Scores, str]:
        scored = [trail_scores(r.task, r.table) for r in raw]
        rollouts = [_rewarded(r, s["score"]) for r, s in zip(raw, scored, strict=True)]
        m = trail_metrics(rollouts, scored)
        line = (
            f"score {m['rollout/score']:.3f}, {m['rollout/compactions']:.1f} compactions, "
            f"{m['rollout/summary_tokens']:.0f} tokens a summary"
        )
        return rollouts, m, line

    async def quick(self) -> Scores:
        tasks = self.tasks.draw("heldout", self.recipe.evaluation.during, _SEED + 1)
        found = await self._evaluated(self.harness(), "quick", tasks, lambda n: None)
        kept = [e for e in found if not e.failed]
        return {f"eval/{k}": sum(getattr(e, k) for e in kept) / max(1, len(kept)) for k in ("score", "success")}

    def recipe_cast(self, iteration: int) -> Mapping[str, Weights]:
        return {}

    async def recast(self, cast: Cast) -> None:
        """There are no subagents."""

    async def closing(self, run: Path, advance: Callable[[int], None], skip: Callable[[int], None]) -> None:
        tasks = self.tasks.draw("heldout", self.recipe.evaluation.tasks, _SEED)
        if len(episodes.read(run / FILE)) == len(tasks):
            skip(len(tasks))
            return
        name = self.recipe.ppo.advantage.form if self.recipe.system == "compaction" else self.recipe.system
        episodes.write(run / FILE, await self._evaluated(self.harness(), name, tasks, advance))

    async def checksums(self) -> Mapping[str, str]:
        return {"policy": await self.engine.checksum()}

    async def tend(self) -> Scores:
        """There is nothing frozen here, and one engine."""
        return {}

    def summary(self, step: int) -> dict[str, Any]:
        return {"system": self.recipe.system, "form": self.recipe.ppo.advantage.form}

    async def _evaluated(
        self, harness: Harness, name: str, tasks: Sequence[Task], advance: Callable[[int], None]
    ) -> list[TrailEpisode]:
        # One seed for all systems: those that see the same context draw the same tokens.
        steps, at_once = [self.recipe.main.steps] * len(tasks), self.recipe.at_once
        rollouts = await roll_out(harness, tasks, steps, derive(_SEED, "rollouts"), at_once, lambda _: advance(1))
        return [episodes.of(name, r, trail_scores(r.task, r.table)) for r in rollouts]


def _rewarded(rollout: Rollout, score: float) -> Rollout:
    return rollout if rollout.failed else replace(rollout, reward=Reward({"performance": score}, {"performance": 1.0}))


def trail_metrics(rollouts: Sequence[Rollout], scored: Sequence[dict[str, float]]) -> Scores:
    """Means over the rollouts that did not fail, under `rollout/`; `summary_tokens` is that of a summary."""
    kept = [(r, s) for r, s in zip(rollouts, scored, strict=True) if not r.failed]
    n = max(1, len(kept))
    counts: dict[str, int] = {}
    for r, _ in kept:
        for kind, c in (*r.ledger.counts.items(), (f"status_{r.trace.status}", 1)):
            counts[kind] = counts.get(kind, 0) + c
    summaries = max(1, counts.get("compactions", 0))
    return {
        "rollout/score": sum(s["score"] for _, s in kept) / n,
        "rollout/success": sum(s["success"] for _, s in kept) / n,
        "rollout/compactions": (counts.get("compactions", 0) + counts.get("truncations", 0)) / n,
        "rollout/summary_tokens": counts.get("summary_tokens", 0) / summaries,
        "rollout/critical_steps": sum(r.ledger.critical_steps for r, _ in kept) / n,
        "rollout/tokens": sum(r.ledger.tokens_sampled for r, _ in kept) / n,
        "count/failed": len(rollouts) - len(kept),
        **{f"count/{kind}": c for kind, c in sorted(counts.items()) if kind not in ("calls", "summary_tokens")},
    }


@asynccontextmanager
async def _open(recipe: Compaction, tokenizer: PreTrainedTokenizerFast) -> AsyncGenerator[TrailJob]:
    threads = threads_of(recipe)
    torch.set_num_threads(threads)
    world = build_world(recipe.world, CACHE)
    tasks = TrailSet(world, recipe.trails)
    limit = max(FULL, recipe.judging.longest)
    async with open_engines(recipe, (recipe.start,), limit, threads) as engines:
        yield TrailJob(recipe, world, tasks, chat_of(tokenizer), engines.each[0], engines)


def _report(out: Path, console: Console) -> dict[str, Any]:
    kept = [e for e in episodes.read(out / FILE) if not e.failed]
    means = {k: sum(getattr(e, k) for e in kept) / max(1, len(kept)) for k in ("score", "success", "compactions")}
    console.print(
        f"{out}: held-out score {means['score']:.3f}, all right {means['success']:.3f}, "
        f"{means['compactions']:.1f} rewrites, {len(kept)} tasks"
    )
    return {**means, "tasks": len(kept)}


TRAIL_RUNS: Kind[Compaction] = Kind(_open, lambda recipe: recipe.evaluation.tasks, _report)


def evaluate_start(
    recipe: Compaction, system: StartSystem, out: Path, done: Callable[[int], None] = lambda n: None
) -> list[TrailEpisode]:
    """The weights that training starts from on the held-out tasks of the closing evaluation, written to `out`
    (a file); what is there already is not run again.
    """
    if len(found := episodes.read(out)) == recipe.evaluation.tasks:
        return found
    found = trio.run(_evaluate_start, replace(recipe, system=START_SYSTEMS[system]), system, done)
    out.parent.mkdir(parents=True, exist_ok=True)
    episodes.write(out, found)
    return found


async def _evaluate_start(recipe: Compaction, name: str, done: Callable[[int], None]) -> list[TrailEpisode]:
    async with _open(recipe, load_tokenizer(recipe.start)) as job:
        tasks = job.tasks.draw("heldout", recipe.evaluation.tasks, _SEED)
        return await job._evaluated(job.harness(), name, tasks, done)
