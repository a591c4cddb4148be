"""Metrics to Weights & Biases; the only file that imports wandb.

A copy for dashboards: what counts is metrics.jsonl in the run folder, so nothing here may stop
a run. A failure gives one warning line and the run goes on without.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import wandb
from rich.console import Console
from rich.markup import escape

Mode = Literal["offline", "online", "disabled"]

_PROJECT = "swarm-rl"
_FAILURES = (wandb.Error, OSError, RuntimeError, ValueError)
_INIT_SECONDS = 20.0


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


class Tracker:
    """`with Tracker(run, "offline", to_json(recipe)) as tracker: tracker.log({"rollout/item_f1": .6}, 3)`."""

    def __init__(self, run: Path, mode: Mode, recipe: Mapping[str, Any], console: Console | None = None) -> None:
        self._run, self._recipe, self._console = run, recipe, console or Console()
        self._mode: Mode = mode_of(mode, os.environ)
        self._wandb: wandb.Run | None = None

    def __enter__(self) -> Tracker:
        if self._mode == "disabled":
            return self
        try:
            self._wandb = wandb.init(
                project=_PROJECT,
                name=self._run.name,
                id=run_id(self._run),
                resume="allow",
                mode=self._mode,
                dir=str(self._run),
                config=dict(self._recipe),
                settings=_settings(),
            )
        except _FAILURES as error:
            self._give_up(error)
        return self

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Adds the numbers among the metrics at a step; steps never fall."""
        if self._wandb is None:
            return
        try:
            self._wandb.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=step)
        except _FAILURES as error:
            self._give_up(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wandb is None:
            return
        try:
            self._wandb.finish(exit_code=0 if kind is None else 1)
        except _FAILURES as failure:
            self._give_up(failure)

    def _give_up(self, error: BaseException) -> None:
        self._wandb = None
        reason = " ".join(str(error).split())[:200]
        self._console.print(f"[yellow]wandb is left out of this run:[/yellow] {escape(reason)}", highlight=False)


def _settings() -> wandb.Settings:
    """Quiet, quick to start, and no look at the code or the machine."""
    return wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=5,
    )
