"""The main job: a policy that fills tables, alone or as an orchestrator of frozen subagents, trained with PARL.

The loop is `recipes.ppo_run`. Here is what it works on: tasks, rewards, metrics, evaluation, report.
Not here: how systems are compared (`recipes.evaluate`).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from recipes.config import Recipe
from recipes.evaluate import Block, blocks_of, closing, episodes_of, quick
from recipes.ppo_run import Kind, Scores, run_ppo
from recipes.report import print_table, write_report
from recipes.session import Session, session
from rewards.parl import Spawning, parl, spawning
from rewards.table import table_scores
from swarm.loop import Harness
from swarm.seeds import derive
from swarm.types import Rollout, ServingEngine, Task


def train(recipe: Recipe, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports; see `run_ppo`."""
    return run_ppo(recipe, out, TABLES, clean=clean, console=console)


@dataclass(frozen=True, slots=True)
class TableJob:
    """A `Job` on tables, with or without subagents. `frozen_sha256` is of the subagents' weights as they were served
    at the start, by role."""

    session: Session
    frozen_sha256: Mapping[str, str]
    blocks: Sequence[Block]

    @property
    def engine(self) -> ServingEngine:
        return self.session.engine

    def draw(self, iteration: int) -> tuple[list[Task], list[int]]:
        recipe = self.session.recipe
        seed = derive(recipe.seed, "tasks", iteration)
        drawn = self.session.tasks.draw("train", recipe.episodes // recipe.group, seed, rows=recipe.tasks.rows)
        rng = random.Random(derive(seed, "budgets"))
        low, high = (math.log(b) for b in recipe.tasks.budget)
        budgets = [round(math.exp(rng.uniform(low, high))) for _ in drawn]
        return [t for t in drawn for _ in range(recipe.group)], [b for b in budgets for _ in range(recipe.group)]

    def harness(self) -> Harness:
        return self.session.harness()

    def rewarded(self, raw: Sequence[Rollout], step: int) -> tuple[list[Rollout], Scores, str]:
        config = self.session.recipe.parl
        scores = [table_scores(r.task, r.table) for r in raw]
        rollouts = [parl(r, score, config, step) for r, score in zip(raw, scores, strict=True)]
        lambdas = config.lambdas(step)
        m = rollout_metrics(rollouts, scores)
        line = (
            f"item-F1 {m['rollout/item_f1']:.3f}, {m['rollout/critical_steps']:.1f} critical steps, "
            f"width {m['rollout/width']:.1f}, spawned in {m['rollout/spawn_rate']:.0%}"
        )
        return rollouts, {**m, "reward/lambda_parallel": lambdas[0], "reward/lambda_finish": lambdas[1]}, line

    async def quick(self) -> Scores:
        return await quick(self.session, self.harness(), self.session.recipe.evaluation.during)

    async def closing(self, run: Path, advance: Callable[[int], None], skip: Callable[[int], None]) -> None:
        await closing(self.session, run, self.blocks, advance, skip)

    async def checksums(self) -> Mapping[str, str]:
        return {"policy": await self.engine.checksum(), **await self.session.checksums()}

    async def tend(self) -> Scores:
        metrics = await self.session.engines.rebalance()
        for name, served in (await self.session.checksums()).items():
            before = self.frozen_sha256[name]
            if served != before:
                raise RuntimeError(f"the frozen subagent {name!r} changed: sha256 {before[:12]}, now {served[:12]}")
        return dict(metrics)

    def summary(self, step: int) -> dict[str, Any]:
        recipe = self.session.recipe
        return {
            "lambda_final": list(recipe.parl.lambdas(step)) if recipe.spawn else [0.0, 0.0],
            # Checked against what is served after every iteration, the last one included.
            "frozen_sha256": {"before": self.frozen_sha256[""], "after": self.frozen_sha256[""]},
            "roles_sha256": {name: sha for name, sha in self.frozen_sha256.items() if name},
        }


@asynccontextmanager
async def _open(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> AsyncGenerator[TableJob]:
    async with session(recipe, tokenizer) as s:
        yield TableJob(s, await s.checksums(), blocks_of(s))


def _report(out: Path, console: Console) -> dict[str, Any]:
    report = write_report(out)
    print_table(report, console)
    console.print(f"report: {out / 'report' / 'report.md'}")
    return report


TABLES: Kind[Recipe] = Kind(_open, episodes_of, _report)


def rollout_metrics(rollouts: Sequence[Rollout], scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the rollouts that did not fail, under `rollout/`; events by kind under `count/`."""
    kept = [(r, sc, spawning(r)) for r, sc in zip(rollouts, scores, strict=True) if not r.failed]
    n = max(1, len(kept))
    counts = Counter[str]()
    for r, _, _ in kept:
        counts.update({kind: c for kind, c in r.ledger.counts.items() if kind != "calls"})
        counts[f"status_{r.trace.status}"] += 1
    assigned = sum(sp.assigned for _, _, sp in kept)
    useful = sum(sp.useful for _, _, sp in kept)
    spawners: list[Spawning] = [sp for _, _, sp in kept if sp.width]
    return {
        "rollout/item_f1": sum(sc["item_f1"] for _, sc, _ in kept) / n,
        "rollout/row_f1": sum(sc["row_f1"] for _, sc, _ in kept) / n,
        "rollout/success": sum(sc["success"] for _, sc, _ in kept) / n,
        "rollout/reward": sum(r.reward.total for r, _, _ in kept if r.reward) / n,
        "rollout/critical_steps": sum(r.ledger.critical_steps for r, _, _ in kept) / n,
        "rollout/total_steps": sum(r.total_steps for r, _, _ in kept) / n,
        "rollout/width": sum(sp.width for _, _, sp in kept) / n,
        "rollout/spawn_rate": len(spawners) / n,
        "rollout/finish_rate": useful / max(1, assigned),
        "rollout/spurious_rate": 1 - useful / assigned if assigned else 0.0,
        "rollout/tokens_main": sum(r.ledger.tokens_sampled for r, _, _ in kept) / n,
        "count/failed": len(rollouts) - len(kept),
        **{f"count/{kind}": c for kind, c in sorted(counts.items())},
    }
