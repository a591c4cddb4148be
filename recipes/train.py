"""The main job: a policy that fills tables, alone or as an orchestrator of frozen subagents, trained with PARL.

The loop is `recipes.ppo_run`. Here is what it works on: tasks, rewards, metrics, evaluation, report.
Not here: how systems are compared (`recipes.evaluate`).
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from recipes.cast.book import shown
from recipes.cast.roles import Weights
from recipes.config import Recipe
from recipes.evaluate import Block, blocks_of, closing, episodes_of, quick
from recipes.grid.verifying import fitting, verifiers_of
from recipes.harnesses import trained
from recipes.ppo_run import Kind, Scores, run_ppo
from recipes.report import print_table, write_report
from recipes.session import Session, session
from rewards.parl import Spawning, parl, spawning
from rewards.table import table_scores
from rewards.verifiers import failures, verified
from swarm.seeds import derive
from swarm.types import Cast, Rollout, Runner, ServingEngine, Task
from swarm.verdicts import Verdict, Verifier


def train(recipe: Recipe, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports; see `run_ppo`."""
    return run_ppo(recipe, out, TABLES, clean=clean, console=console)


@dataclass(frozen=True, slots=True)
class TableJob:
    """A `Job` on tables, with or without subagents, by `runner` and for what `verifier` scores. `served` has the sha256
    of the frozen weights as they were when their engine was new, by their checkpoint."""

    session: Session
    runner: Runner
    verifier: Verifier
    blocks: Sequence[Block]
    served: dict[str, str]

    @property
    def engine(self) -> ServingEngine:
        return self.session.engine

    def draw(self, iteration: int) -> tuple[list[Task], list[int]]:
        recipe = self.session.recipe
        seed = derive(recipe.seed, "tasks", iteration)
        drawn = fitting(
            "table",
            lambda n: self.session.tasks.draw("train", n, seed, rows=recipe.tasks.rows),
            recipe.episodes // recipe.group,
            {recipe.verifier: self.verifier},
        )
        rng = random.Random(derive(seed, "budgets"))
        low, high = (math.log(b) for b in recipe.tasks.budget)
        budgets = [round(math.exp(rng.uniform(low, high))) for _ in drawn]
        return [t for t in drawn for _ in range(recipe.group)], [b for b in budgets for _ in range(recipe.group)]

    def harness(self) -> Runner:
        return self.runner

    async def rewarded(self, raw: Sequence[Rollout], step: int) -> tuple[list[Rollout], Scores, str]:
        return await rewarded(self.session.recipe, self.verifier, raw, step)

    async def quick(self) -> Scores:
        return await quick(self.session, self.harness(), self.session.recipe.evaluation.during)

    async def closing(self, run: Path, advance: Callable[[int], None], skip: Callable[[int], None]) -> None:
        await closing(self.session, run, self.blocks, advance, skip)

    async def checksums(self) -> Mapping[str, str]:
        return {"policy": await self.engine.checksum(), **await self.session.checksums()}

    def recipe_cast(self, iteration: int) -> Mapping[str, Weights]:
        return self.session.recipe.cast(iteration) if self.session.recipe.spawn else {}

    async def recast(self, cast: Cast) -> None:
        if await self.session.recast(cast):
            for name, served in (await self.session.checksums()).items():
                self.served.setdefault(name, served)

    async def tend(self) -> Scores:
        metrics = await self.session.engines.rebalance()
        for name, served in (await self.session.checksums()).items():
            before = self.served.setdefault(name, served)
            if served != before:
                raise RuntimeError(f"the frozen subagent {name!r} changed: sha256 {before[:12]}, now {served[:12]}")
        return dict(metrics)

    def summary(self, step: int) -> dict[str, Any]:
        recipe, opening = self.session.recipe, self.session.opening
        # Checked against what is served after every iteration, the last one included.
        first = next(sum for name, sum in self.served.items() if name.startswith(opening[""][0][0].sha256))
        return {
            "lambda_final": list(recipe.parl.lambdas(step)) if recipe.spawn else [0.0, 0.0],
            "frozen_sha256": {"before": first, "after": first},
            "served_sha256": self.served,
            "roster": {role: shown(mixture) for role, mixture in self.session.roster.cast.items()},
        }


@asynccontextmanager
async def _open(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> AsyncGenerator[TableJob]:
    async with session(recipe, tokenizer) as s, trained(s) as runner:
        verifiers = await verifiers_of([recipe.verifier], recipe.judging, s.engines)
        job = TableJob(s, runner, verifiers[recipe.verifier], blocks_of(s), await s.checksums())
        job.draw(0)  # tasks that the world lacks, or the verifier misfits, are refused before anything is trained
        yield job


def _report(out: Path, console: Console) -> dict[str, Any]:
    report = write_report(out)
    print_table(report, console)
    console.print(f"report: {out / 'report' / 'report.md'}")
    return report


TABLES: Kind[Recipe] = Kind(_open, episodes_of, _report)


async def rewarded(
    recipe: Recipe, verifier: Verifier, raw: Sequence[Rollout], step: int
) -> tuple[list[Rollout], Scores, str]:
    """See `Job.rewarded`. A rollout that the verifier has no score of has no reward, and is left out of the loss."""
    verdicts = await verified(verifier, raw, at_once=recipe.judging.at_once)
    pairs = list(zip(raw, verdicts, strict=True))
    rollouts = [parl(r, v.scores.get(verifier.main), recipe.parl, step) for r, v in pairs]
    scores = [v.scores if "row_f1" in v.scores else table_scores(r.task, r.table) for r, v in pairs]
    lambdas = recipe.parl.lambdas(step)
    tables = rollout_metrics(rollouts, scores)
    judged = {k: v for k, v in verdict_metrics(verdicts).items() if k.replace("verdict/", "rollout/") not in tables}
    m = {**judged, **tables, **harness_metrics(rollouts, scores)}
    line = (
        f"item-F1 {m['rollout/item_f1']:.3f}, {m['rollout/critical_steps']:.1f} critical steps, "
        f"width {m['rollout/width']:.1f}, spawned in {m['rollout/spawn_rate']:.0%}"
    )
    return rollouts, {**m, "reward/lambda_parallel": lambdas[0], "reward/lambda_finish": lambdas[1]}, line


def rollout_metrics(rollouts: Sequence[Rollout], scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
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
        "rollout/reward": mean_reward(r for r, _, _ in kept),
        "rollout/critical_steps": sum(r.ledger.critical_steps for r, _, _ in kept) / n,
        "rollout/total_steps": sum(r.total_steps for r, _, _ in kept) / n,
        "rollout/width": sum(sp.width for _, _, sp in kept) / n,
        "rollout/spawn_rate": len(spawners) / n,
        "rollout/finish_rate": useful / max(1, assigned),
        "rollout/spurious_rate": 1 - useful / assigned if assigned else 0.0,
        "rollout/tokens_main": sum(r.ledger.tokens_sampled for r, _, _ in kept) / n,
        **_by_checkpoint(c for r, _, _ in kept for c in r.children),
        "count/failed": len(rollouts) - len(kept),
        **{f"count/{kind}": c for kind, c in sorted(counts.items())},
    }


def _by_checkpoint(children: Iterable[Rollout]) -> dict[str, float]:
    """How many subagents each checkpoint served, and the share of them that handed in a table, under `served/` and the
    first digits of its sha256."""
    by: dict[str, list[bool]] = defaultdict(list)
    for child in children:
        by[child.trace.checkpoint[:8]].append(bool(child.table))
    shares = {f"served/{sha}/table_rate": sum(found) / len(found) for sha, found in sorted(by.items())}
    return {**{f"served/{sha}/rollouts": len(found) for sha, found in sorted(by.items())}, **shares}


def mean_reward(rollouts: Iterable[Rollout]) -> float:
    """Over those that have one; 0 where none has."""
    totals = [r.reward.total for r in rollouts if r.reward is not None]
    return sum(totals) / max(1, len(totals))


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Means of the verifier's scores, under `verdict/`; and how many rollouts that did not fail have none, by kind,
    under `count/no_verdict_`."""
    scores: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        for name, score in verdict.scores.items():
            scores[name].append(score)
    missed = {kind: n for kind, n in failures(verdicts).items() if kind != "rollout"}
    return {
        **{f"verdict/{name}": sum(found) / len(found) for name, found in scores.items()},
        **{f"count/no_verdict_{kind}": n for kind, n in missed.items()},
    }


def harness_metrics(rollouts: Sequence[Rollout], scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over each harness's rollouts that did not fail, under `harness/NAME/`; nothing where none was drawn."""
    groups: dict[str, list[tuple[Rollout, Mapping[str, float]]]] = defaultdict(list)
    for r, score in zip(rollouts, scores, strict=True):
        if r.harness and not r.failed:
            groups[r.harness].append((r, score))
    metrics: dict[str, float] = {}
    for name, group in sorted(groups.items()):
        n = len(group)
        metrics |= {
            f"harness/{name}/reward": mean_reward(r for r, _ in group),
            f"harness/{name}/item_f1": sum(score["item_f1"] for _, score in group) / n,
            f"harness/{name}/critical_steps": sum(r.ledger.critical_steps for r, _ in group) / n,
            f"harness/{name}/rollouts": n,
        }
    return metrics
