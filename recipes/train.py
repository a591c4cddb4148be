"""One PPO run, from a recipe to a run folder. The same loop trains a swarm and a single agent.

    draw tasks ─▶ rollouts (engine: policy, frozen: subagents) ─▶ reward ─▶ learner ─▶ weights to engine
         ▲                                                                                  │
         └────────────────────────────── next iteration ◀───────────────────────────────────┘

Everything that an iteration depends on is in its checkpoint or derived from the seed and its number, so
a run that was killed goes on as if it had not been. Not here: how systems are compared (`recipes.evaluate`).
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import trio
from rich.console import Console

from recipes.config import Recipe
from recipes.evaluate import blocks_of, closing, episodes_of, quick
from recipes.overrides import to_json
from recipes.progress import Progress
from recipes.report import print_table, write_report
from recipes.session import Session, load_checkpoint, load_tokenizer, roll_out, session
from recipes.track import Tracker
from rewards.parl import Spawning, parl, spawning
from rewards.table import table_scores
from swarm.checkpoint import save, weights_sha256
from swarm.records import write as write_records
from swarm.rl.batch import collect
from swarm.rl.learner import Learner
from swarm.rl.ppo import Metrics
from swarm.rundir import RunDir
from swarm.seeds import derive
from swarm.states import latest, load_state, save_state
from swarm.types import Rollout, Task


def train(recipe: Recipe, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports; goes on where a killed run was. Returns the report.

    A run that is done is not run again: its report is shown.
    """
    console = console or Console()
    with RunDir(out, to_json(recipe), clean=clean) as run:
        if run.done:
            console.print(f"{out} is done; --clean trains anew.")
        else:
            trio.run(_train, recipe, run, console)
            run.finish(json.loads((out / "summary.json").read_text()))
        report = write_report(out)
    print_table(report, console)
    console.print(f"report: {out / 'report' / 'report.md'}")
    return report


async def _train(recipe: Recipe, run: RunDir, console: Console) -> None:
    policy, start_sha = load_checkpoint(recipe.start)
    subagent, frozen_sha = load_checkpoint(recipe.subagent)
    tokenizer = load_tokenizer(recipe.start)
    started = perf_counter()
    learner = Learner(policy, recipe.ppo)
    at, before = _resume(run, learner)
    ev = recipe.evaluation
    phases = {"start": 1, "ppo": recipe.iterations * recipe.episodes, "evaluation": episodes_of(recipe)}
    with (
        Progress(console, phases, {"start": 10.0, "ppo": 0.12, "evaluation": 0.1}) as progress,
        Tracker(run.path, recipe.wandb, to_json(recipe), console) as tracker,
    ):
        progress.begin("start")
        async with session(recipe, policy, subagent, tokenizer) as s:
            s.engine.set_weights(policy, learner.updates)
            blocks = blocks_of(s)
            progress.begin("ppo")
            progress.skip("ppo", at * recipe.episodes)
            for k in range(at, recipe.iterations):
                metrics = await _iterate(s, learner, run, k, progress)
                if (k + 1) % ev.every == 0 or k + 1 == recipe.iterations:
                    metrics |= await quick(s, s.harness(), ev.during)
                run.log(metrics)
                tracker.log(metrics, k)
                if (k + 1) % recipe.checkpoint_every == 0 or k + 1 == recipe.iterations:
                    spent = before + perf_counter() - started
                    state = {"learner": learner.state_dict(), "iteration": k + 1, "seconds": spent}
                    save_state(run.path / "checkpoints" / f"step_{k + 1:06d}", state)
            save(policy, tokenizer, run.path / "policy", learner.updates)
            progress.begin("evaluation")
            advance, skip = partial(progress.advance, "evaluation"), partial(progress.skip, "evaluation")
            await closing(s, run.path, blocks, advance, skip)
    after = weights_sha256(subagent)
    if after != frozen_sha:
        raise RuntimeError(f"the frozen subagent changed: sha256 {frozen_sha[:12]} before, {after[:12]} after")
    summary = {
        "lambda_final": list(recipe.parl.lambdas(learner.step)) if recipe.spawn else [0.0, 0.0],
        "frozen_sha256": {"before": frozen_sha, "after": after},
        "start_sha256": start_sha,
        "wall_seconds": before + perf_counter() - started,
        "seed": recipe.seed,
    }
    (run.path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def _resume(run: RunDir, learner: Learner) -> tuple[int, float]:
    """Iterations that are behind us, and seconds; what was logged beyond the checkpoint is dropped."""
    folder = latest(run.path / "checkpoints")
    if folder is None:
        run.rewind(0)
        return 0, 0.0
    state = load_state(folder)
    learner.load_state_dict(state["learner"])
    run.rewind(state["iteration"])
    return state["iteration"], state["seconds"]


async def _iterate(s: Session, learner: Learner, run: RunDir, k: int, progress: Progress) -> dict[str, Any]:
    """One iteration; returns its metrics."""
    recipe = s.recipe
    tasks, budgets = _draw(s, k)
    began = perf_counter()
    seed = derive(recipe.seed, "iteration", k)
    raw = await roll_out(s.harness(), tasks, budgets, seed, recipe.at_once, done=lambda _: progress.advance("ppo"))
    rolled = perf_counter()
    scores = [table_scores(r.task, r.table) for r in raw]
    rollouts = [parl(r, score, recipe.parl, learner.step) for r, score in zip(raw, scores, strict=True)]
    lambdas = recipe.parl.lambdas(learner.step)
    update = learner.update(collect(rollouts))
    s.engine.set_weights(learner.policy, learner.updates)
    records = run.path / "rollouts" / f"iteration_{k + 1:04d}.rollouts"
    records.unlink(missing_ok=True)
    write_records(records, rollouts)
    metrics = {
        "phase": "ppo",
        "step": k + 1,
        "iteration": k + 1,
        "optimizer_step": learner.step,
        **rollout_metrics(rollouts, scores),
        "reward/lambda_parallel": lambdas[0],
        "reward/lambda_finish": lambdas[1],
        **_train_metrics(update),
        "time/rollout": rolled - began,
        "time/train": perf_counter() - rolled,
    }
    progress.note(
        f"item-F1 {metrics['rollout/item_f1']:.3f}, {metrics['rollout/critical_steps']:.1f} critical steps, "
        f"width {metrics['rollout/width']:.1f}, spawned in {metrics['rollout/spawn_rate']:.0%}"
    )
    return metrics


def _draw(s: Session, k: int) -> tuple[list[Task], list[int]]:
    recipe = s.recipe
    seed = derive(recipe.seed, "tasks", k)
    tasks = s.tasks.draw("train", recipe.episodes, seed, rows=recipe.tasks.rows)
    rng = random.Random(derive(seed, "budgets"))
    low, high = (math.log(b) for b in recipe.tasks.budget)
    return tasks, [round(math.exp(rng.uniform(low, high))) for _ in tasks]


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


def _train_metrics(m: Metrics) -> dict[str, float]:
    flat = asdict(m)
    policy = flat.pop("policy") or {}
    left_out = flat.pop("left_out")
    return {
        **{f"train/{k}": v for k, v in flat.items()},
        **{f"train/policy_{k}": v for k, v in policy.items()},
        **{f"count/left_out_{k}": v for k, v in left_out.items()},
    }
