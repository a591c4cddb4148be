"""One PPO run, from a recipe to a run folder: the one training loop, whatever the policy is trained on.

    collector   draw tasks ─▶ rollouts (engine: policy) ─▶ reward ──┐ a queue of at most
                     ▲                                              │ `max_staleness` batches
    learner     weights to engine ◀─ update ◀─ drop what is stale ◀─┘

A batch is begun when all but `ppo.max_staleness` of the updates before it are done: with 0 the two take
turns, with more they overlap, and a rollout may go on across an update of the weights, its tokens keeping
their versions. With 0, everything that an iteration depends on is in its checkpoint or derived from the
seed and its number, so a run that was killed goes on as if it had not been.

Not here: what the work is (a `Job`: `recipes.train`, `recipes.compaction.run`), and the update (`swarm.rl`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import trio
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerFast

from recipes.cast.book import CastBook
from recipes.cast.roles import Weights
from recipes.config import Training
from recipes.learning import Learning, open_learner
from recipes.named import resolve
from recipes.overrides import to_json
from recipes.progress import Progress
from recipes.publish.rules import Shelf, due
from recipes.remote import Rolling, open_workers, publish, requests_of
from recipes.session import load_checkpoint, load_tokenizer, roll_out, warn_of_bf16
from recipes.track import Tracker, tracking
from swarm.checkpoint import save
from swarm.cluster import Cluster
from swarm.engine.probe import verify
from swarm.records import write as write_records
from swarm.rl.credit import path_of
from swarm.rl.credit import write as write_credit
from swarm.rl.distill import check_tokenizer
from swarm.rl.ppo import Metrics
from swarm.rundir import RunDir
from swarm.seeds import derive
from swarm.states import latest, load_state, save_state
from swarm.types import Cast, CheckpointRef, Rollout, Task

R = TypeVar("R", bound=Training)
Scores = dict[str, float]


class Job(Rolling, Protocol):
    """The work: which tasks, how they are run, what they are worth, and how the policy is evaluated."""

    def draw(self, iteration: int) -> tuple[list[Task], list[int]]:
        """The tasks of an iteration, and their budgets of critical steps; rollouts of one task stand together."""
        ...

    async def rewarded(self, raw: Sequence[Rollout], step: int) -> tuple[list[Rollout], Scores, str]:
        """The rollouts with their rewards at an optimizer step, metrics (`rollout/`, `count/`) and a line to show."""
        ...

    async def quick(self) -> Scores:
        """A short evaluation for the learning curve, under `eval/`."""
        ...

    def recipe_cast(self, iteration: int) -> Mapping[str, Weights]:
        """Who the recipe has take over at an iteration, counted from 1; all of its cast for 0."""
        ...

    async def closing(self, run: Path, advance: Callable[[int], None], skip: Callable[[int], None]) -> None:
        """The evaluation after training, `run/policy` being the trained weights; into files of the run folder."""
        ...

    async def tend(self) -> Scores:
        """What is done to the engines before they get new weights: shares follow the queues. Metrics (`serving/`).

        Raises RuntimeError where one no longer serves the frozen weights that it began with.
        """
        ...

    def summary(self, step: int) -> dict[str, Any]:
        """What else the run's summary.json says."""
        ...


@dataclass(frozen=True, slots=True)
class Kind(Generic[R]):
    """A kind of run: how its job is opened, how many episodes its closing evaluation has, how its report is made."""

    open: Callable[[R, PreTrainedTokenizerFast], AbstractAsyncContextManager[Job]]
    evaluations: Callable[[R], int]
    report: Callable[[Path, Console], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Collected:
    """A batch of rewarded rollouts, and what was measured of them."""

    rollouts: list[Rollout]
    scores: Scores
    line: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Run(Generic[R]):
    """The parts of a run that its two tasks share. `slots` lets in one batch more than may be stale. Without
    `workers`, rollouts are made here."""

    recipe: R
    job: Job
    shelf: Shelf
    casts: CastBook
    workers: Cluster | None
    learner: Learning
    run: RunDir
    progress: Progress
    tracker: Tracker
    console: Console
    slots: trio.Semaphore


def run_ppo(
    recipe: R, out: Path, kind: Kind[R], *, clean: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Trains, evaluates and reports; goes on where a killed run was. Returns the report.

    A run that is done is not run again: its report is shown.
    """
    console = console or Console()
    recipe = _found(recipe)
    with RunDir(out, to_json(recipe), clean=clean) as run:
        if run.done:
            console.print(f"{out} is done; --clean trains anew.")
            return kind.report(out, console)
        warn_of_bf16(recipe.ppo.bf16, console)
        report = trio.run(_tracked, recipe, run, kind, console)
        run.finish(json.loads((out / "summary.json").read_text()))
        return report


def _found(recipe: R) -> R:
    """The recipe with the folders of the checkpoints that it starts and learns from, where it has names."""
    teachers = tuple(replace(t, path=resolve(str(t.path))) for t in recipe.ppo.distill.teachers)
    ppo = replace(recipe.ppo, distill=replace(recipe.ppo.distill, teachers=teachers))
    return replace(recipe, start=resolve(str(recipe.start)), ppo=ppo)


async def _tracked(recipe: R, run: RunDir, kind: Kind[R], console: Console) -> dict[str, Any]:
    """Trains and reports, and tells the tracker."""
    async with tracking(run.path, recipe.wandb, to_json(recipe), console) as tracker:
        trained, made_from = await _train(recipe, run, kind, console, tracker)
        report = kind.report(run.path, console)
        tracker.pictures(run.path / "report")
        tracker.model(f"{run.path.name}-policy", trained.path, trained.sha256, made_from)
    return report


async def _train(
    recipe: R, run: RunDir, kind: Kind[R], console: Console, tracker: Tracker
) -> tuple[CheckpointRef, dict[str, CheckpointRef]]:
    """The trained policy, and what it was made from: `start`, and those who played in the last cast."""
    for teacher in recipe.ppo.distill.teachers:
        check_tokenizer(recipe.start, teacher.path)
    policy, start_sha = load_checkpoint(recipe.start)
    tokenizer = load_tokenizer(recipe.start)
    shelf = Shelf(recipe.publish, run.path, to_json(recipe), tokenizer)
    shelf.check()
    started = perf_counter()
    phases = {"start": 1, "ppo": recipe.iterations * recipe.episodes, "evaluation": kind.evaluations(recipe)}
    with (
        open_learner(recipe, policy) as learner,
        Progress(console, phases, {"start": 10.0, "ppo": 0.12, "evaluation": 0.1}) as progress,
    ):
        progress.begin("start")
        at, before, best = _resume(run, learner)
        async with open_workers(kind.open, recipe) as workers, kind.open(recipe, tokenizer) as job:
            await _publish(recipe, job, workers, learner)
            progress.begin("ppo")
            progress.skip("ppo", at * recipe.episodes)
            slots = trio.Semaphore(1 + recipe.ppo.max_staleness)
            casts = CastBook(run.path, job.recipe_cast)
            parts = _Run(recipe, job, shelf, casts, workers, learner, run, progress, tracker, console, slots)
            await _iterations(parts, at, before - started, best)
            cast = await trio.to_thread.run_sync(casts.at, recipe.iterations)
            await job.recast(cast)
            trained = save(policy, tokenizer, run.path / "policy", learner.updates, learner.weights())
            progress.begin("evaluation")
            await job.closing(run.path, partial(progress.advance, "evaluation"), partial(progress.skip, "evaluation"))
            more = job.summary(learner.step)
    spent = {"start_sha256": start_sha, "wall_seconds": before + perf_counter() - started, "seed": recipe.seed}
    (run.path / "summary.json").write_text(json.dumps({**more, **spent}, indent=1) + "\n")
    players = {f"subagent {role or 'of any role'}": mixture[0][0] for role, mixture in cast.items()}
    return trained, {"start": CheckpointRef(recipe.start, start_sha), **players}


def _resume(run: RunDir, learner: Learning) -> tuple[int, float, float | None]:
    """Iterations that are behind us, seconds, the best score so far; what was logged past the checkpoint is dropped."""
    folder = latest(run.path / "checkpoints")
    if folder is None:
        run.rewind(0)
        return 0, 0.0, None
    state = load_state(folder)
    learner.load_state_dict(state["learner"])
    run.rewind(state["iteration"])
    return state["iteration"], state["seconds"], state.get("best")


async def _iterations(parts: _Run[R], at: int, offset: float, best: float | None) -> None:
    """All iterations from `at` on. `offset` + the clock is the time that the run has taken."""
    send, receive = trio.open_memory_channel[_Collected](parts.recipe.ppo.max_staleness)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_collect_all, parts, at, send)
        for k in range(at, parts.recipe.iterations):
            metrics = await _learn(parts, k, await receive.receive())
            if _due(k, parts.recipe, parts.recipe.quick_every):
                metrics |= await parts.job.quick()
            parts.run.log(metrics)
            parts.tracker.log(metrics, k)
            best = await _shelve(parts, k + 1, metrics, best)
            if _due(k, parts.recipe, parts.recipe.checkpoint_every):
                spent = {"iteration": k + 1, "seconds": offset + perf_counter()}
                state = {"learner": parts.learner.state_dict(), "best": best, **spent}
                save_state(parts.run.path / "checkpoints" / f"step_{k + 1:06d}", state)
            parts.slots.release()


async def _shelve(parts: _Run[R], iteration: int, metrics: Mapping[str, Any], best: float | None) -> float | None:
    """Publishes what the recipe's rules say of this iteration. Returns the best score so far."""
    learner = parts.learner
    names, best = due(parts.recipe.publish, iteration, parts.recipe.iterations, metrics, best)
    if names:
        put = partial(parts.shelf.put, names, iteration, metrics, learner.policy, learner.weights(), learner.updates)
        # In a thread of its own, like an update.
        stored = await trio.to_thread.run_sync(put)
        parts.console.print(f"iteration {iteration} published: {escape(', '.join(stored.names))}", highlight=False)
    return best


def _due(k: int, recipe: Training, every: int) -> bool:
    return (k + 1) % every == 0 or k + 1 == recipe.iterations


async def _collect_all(parts: _Run[R], at: int, send: trio.MemorySendChannel[_Collected]) -> None:
    """The batches of all iterations, one after another, each begun when a slot is free."""
    recipe, job = parts.recipe, parts.job
    for k in range(at, recipe.iterations):
        await parts.slots.acquire()
        tasks, budgets = job.draw(k)
        cast = await trio.to_thread.run_sync(parts.casts.at, k + 1)
        await job.recast(cast)
        began = perf_counter()
        seed = derive(recipe.seed, "iteration", k)
        raw = await _raw(parts, tasks, budgets, seed, cast)
        rollouts, scores, line = await job.rewarded(raw, parts.learner.step)
        await send.send(_Collected(rollouts, scores, line, perf_counter() - began))


async def _raw(parts: _Run[R], tasks: Sequence[Task], budgets: Sequence[int], seed: int, cast: Cast) -> list[Rollout]:
    """The rollouts of a batch, by the workers where there are any."""
    harness = parts.job.harness()

    def done(_: Rollout) -> None:
        parts.progress.advance("ppo")

    if parts.workers is None:
        return await roll_out(harness, tasks, budgets, seed, parts.recipe.at_once, done)
    return await parts.workers.roll_out(requests_of(harness.budget, tasks, budgets, seed, cast), done)


async def _learn(parts: _Run[R], k: int, collected: _Collected) -> dict[str, Any]:
    """One update, and the new weights to the engine; returns the iteration's metrics."""
    learner, began = parts.learner, perf_counter()
    # In a thread of its own: the collector goes on meanwhile, if it may.
    update = await trio.to_thread.run_sync(learner.learn, collected.rollouts)
    learned = perf_counter()
    serving = await parts.job.tend()
    drift = await _publish(parts.recipe, parts.job, parts.workers, learner)
    published = perf_counter()
    records = parts.run.path / "rollouts" / f"iteration_{k + 1:04d}.rollouts"
    records.unlink(missing_ok=True)
    write_records(records, collected.rollouts)
    parts.tracker.rollouts(records, collected.rollouts, k)
    if learner.credit is not None:
        write_credit(path_of(records), learner.credit)
    parts.progress.note(collected.line)
    for alarm in update.alarms:
        parts.console.print(f"[yellow]iteration {k + 1}: {escape(alarm)}[/yellow]", highlight=False)
    return {
        "phase": "ppo",
        "step": k + 1,
        "iteration": k + 1,
        "optimizer_step": learner.step,
        **collected.scores,
        **_train_metrics(update),
        "time/rollout": collected.seconds,
        **serving,
        "serving/probe_drift": drift,
        "time/train": learned - began,
        "time/publish": published - learned,
        **_worker_metrics(parts.workers),
    }


async def _publish(recipe: Training, job: Job, workers: Cluster | None, learner: Learning) -> float:
    """The learner's weights to the engines, and how far, in nats, what the one here then says is from the learner.

    Workers must serve what is served here: by checksum, not by a probe of each.
    """
    policy, version = learner.policy, learner.updates
    await job.engine.update(learner.weights(), version)
    drift = await verify(job.engine, policy, policy.config.vocab_size, version, recipe.serving.probe_bound)
    if workers is not None:
        await publish(workers, learner.weights(), version, await job.checksums())
    return drift


def _worker_metrics(workers: Cluster | None) -> dict[str, float]:
    """Totals since the start, but for those that are up."""
    return {} if workers is None else {f"workers/{k}": v for k, v in asdict(workers.stats).items()}


def _train_metrics(m: Metrics) -> dict[str, float]:
    flat = asdict(m)
    policy, left_out, alarms = flat.pop("policy") or {}, flat.pop("left_out"), flat.pop("alarms")
    return {
        **{f"train/{k}": v for k, v in flat.items()},
        **{f"train/policy_{k}": v for k, v in policy.items()},
        **{f"count/left_out_{k}": v for k, v in left_out.items()},
        "count/alarms": len(alarms),
    }
