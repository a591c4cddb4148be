"""Metrics, rollouts, pictures and checkpoints to Weights & Biases; the only file that imports wandb.

    run ── log, rollouts, pictures, model ──▶ a queue of at most 64 ──▶ wandb, in a thread, each call with a deadline

A copy for dashboards: all that it gets is in the run folder, so nothing here may stop or slow a run. What does not
fit into the queue is left out and counted; a failure or a call that is late gives one line, and the run goes on
without. Not here: what the numbers mean (`recipes.metric_names`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import trio
import wandb
from rich.console import Console
from rich.markup import escape

from swarm.engine.settle import running
from swarm.types import CheckpointRef, Rollout

T = TypeVar("T")
Mode = Literal["offline", "online", "disabled"]

VIEW = "http://127.0.0.1:8421/#/rollout"
"""Where `swarm-rl view` shows a rollout, unless it was told another port."""
COLUMNS = ("rollout", "task", "domain", "status", "reward", "critical_steps", "total_steps", "subagents", "tokens")
_PROJECT = "swarm-rl"
_FAILURES = (wandb.Error, OSError, RuntimeError, ValueError, TypeError)
_BACKLOG = 64
_INIT_SECONDS, _CALL_SECONDS, _FINISH_SECONDS, _HURRY_SECONDS = 30.0, 30.0, 60.0, 5.0


def mode_of(asked: Mode, environment: Mapping[str, str]) -> Mode:
    """What the recipe asks for; "offline" is online when WANDB_API_KEY is set. WANDB_MODE has the last word."""
    named = environment.get("WANDB_MODE")
    if asked == "disabled" or named == "disabled":
        return "disabled"
    if named == "online" or named == "offline":
        return named
    return "online" if environment.get("WANDB_API_KEY") else asked


def run_id(run: Path) -> str:
    """The id that this run folder has at wandb, drawn once: a resumed run goes on in the same curves."""
    path = run / "wandb.id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


@asynccontextmanager
async def tracking(
    run: Path, mode: Mode, recipe: Mapping[str, Any], console: Console | None = None
) -> AsyncGenerator[Tracker]:
    """`async with tracking(run, "offline", to_json(recipe)) as tracker: tracker.log({"rollout/item_f1": .6}, 3)`.

    The end waits for what is still in the queue, a minute at most, a few seconds after an error.
    """
    mode = mode_of(mode, os.environ)
    tracker = Tracker(run, mode, console or Console())
    if mode == "disabled":
        yield tracker
        return
    begin = partial(_begin, run, mode, dict(recipe))
    async with running(partial(tracker.drive, begin)):
        code, seconds = 1, _HURRY_SECONDS
        try:
            yield tracker
            code, seconds = 0, _FINISH_SECONDS
        finally:
            with trio.CancelScope(deadline=trio.current_time() + seconds, shield=True):
                await tracker.close(code)


class Tracker:
    """What a run tells its dashboard; every method returns at once. See `tracking`."""

    def __init__(self, run: Path, mode: Mode, console: Console) -> None:
        self._run, self._console = run, console
        self._dead = mode == "disabled"
        self._left_out = 0
        self._code = 0
        self._ended = trio.Event()
        self._send, self._receive = trio.open_memory_channel[Callable[[Any], object]](_BACKLOG)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Adds the numbers among the metrics at a step; steps never fall."""
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        self._put(lambda run: run.log(numbers, step=step))

    def rollouts(self, record: Path, rollouts: Sequence[Rollout], step: int) -> None:
        """Adds a table of an iteration's rollouts, each with its address in the viewer; `record` is their file."""
        parts = sorted({name for r in rollouts if r.reward for name in r.reward.parts})
        rows: Any = [_row(f"{record.stem}:{k}", r, parts) for k, r in enumerate(rollouts)]
        columns: Any = [*COLUMNS, *(f"reward/{name}" for name in parts), "view"]
        self._put(lambda run: run.log({"rollouts": wandb.Table(columns=columns, data=rows)}, step=step))

    def pictures(self, folder: Path) -> None:
        """Adds the pictures of a report."""
        files = sorted(folder.glob("*.png"))
        self._put(lambda run: run.log({f"report/{f.stem}": wandb.Image(str(f)) for f in files}) if files else None)

    def model(self, name: str, folder: Path, sha256: str, made_from: Mapping[str, CheckpointRef]) -> None:
        """Adds a checkpoint by reference, nothing being copied; `made_from` has its start and subagents, by role."""
        self._put(lambda run: _log_model(run, name, folder, sha256, made_from))

    async def drive(self, begin: Callable[[], Any]) -> None:
        """The background task."""
        try:
            run = await _within(_INIT_SECONDS, begin)
            async for act in self._receive:
                await _within(_CALL_SECONDS, partial(act, run))
            await _within(_FINISH_SECONDS, partial(run.finish, exit_code=self._code))
        except _FAILURES as error:
            self._say(f"wandb is left out of this run: {' '.join(str(error).split())[:200]}")
        finally:
            self._dead = True
            self._ended.set()

    async def close(self, code: int) -> None:
        """Returns when all that was told has been passed on."""
        if self._left_out:
            self._say(f"wandb was slow: {self._left_out} entries are only in the run folder")
        self._code = code
        self._send.close()
        await self._ended.wait()

    def _put(self, act: Callable[[Any], object]) -> None:
        if self._dead:
            return
        try:
            self._send.send_nowait(act)
        except trio.WouldBlock:
            self._left_out += 1

    def _say(self, words: str) -> None:
        self._console.print(f"[yellow]{escape(words)}[/yellow]", highlight=False)


async def _within(seconds: float, act: Callable[[], T]) -> T:
    """Runs a blocking call; one that is late is left to itself. Raises TimeoutError then."""
    with trio.move_on_after(seconds):
        return await trio.to_thread.run_sync(act, abandon_on_cancel=True)
    raise TimeoutError(f"no answer within {seconds:g} s")


def _begin(run: Path, mode: Mode, recipe: Mapping[str, Any]) -> Any:
    """Quiet, quick to start, no advertisement, and no look at the code or the machine."""
    os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=5,
    )
    return wandb.init(
        project=_PROJECT,
        name=run.name,
        id=run_id(run),
        resume="allow",
        mode="online" if mode == "online" else "offline",
        dir=str(run),
        config=dict(recipe),
        settings=settings,
    )


def _row(id: str, r: Rollout, parts: Sequence[str]) -> list[Any]:
    reward = r.reward.total if r.reward else None
    known = r.reward.parts if r.reward else {}
    numbers = [reward, r.ledger.critical_steps, r.total_steps, len(r.children), r.ledger.tokens_sampled]
    scores = [known.get(name) for name in parts]
    return [id, r.task.id, r.task.domain, r.trace.status, *numbers, *scores, f"{VIEW}/{id}"]


def _log_model(run: Any, name: str, folder: Path, sha256: str, made_from: Mapping[str, CheckpointRef]) -> None:
    """A run that is online tells what it used as well; offline that is in the artifact's metadata alone."""
    told = {role: {"path": str(ref.path), "sha256": ref.sha256} for role, ref in made_from.items()}
    if not run.offline:
        for role, ref in made_from.items():
            run.use_artifact(_artifact(ref.path.name, ref.path, {"sha256": ref.sha256, "role": role}))
    run.log_artifact(_artifact(name, folder, {"sha256": sha256, "made_from": told}))


def _artifact(name: str, folder: Path, metadata: dict[str, Any]) -> wandb.Artifact:
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    artifact = wandb.Artifact(clean, "model", metadata=metadata)
    artifact.add_reference(folder.absolute().as_uri(), checksum=False)
    return artifact
