"""A run folder as the viewer reads it: recipe, state, metrics, roster, and the list of rollouts; never written to.

Not here: HTTP (`recipes.view.server`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from recipes.cast.book import entries_of
from recipes.named import resolve
from recipes.view.fork import FOLDER, made_of
from recipes.view.index import Index
from recipes.view.lanes import lanes_of
from recipes.view.rollout import shown
from recipes.view.tokens import Credit, credit_of, open_tokenizer, transcript
from swarm.folders import CheckpointError
from swarm.kept import lacks
from swarm.rundir import RunDirError, read_done, read_metrics, read_recipe
from swarm.types import Rollout, ToolResult

_RECENT = 8


class RunView:
    """A run that is looked at: `view = RunView(Path("runs/x")); for _ in view.refresh(): …`.

    Raises RunDirError for a folder that is no run; one that holds runs has them named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = _recipe_of(path)
        self.index = Index(path / "rollouts", path / FOLDER)
        self.metrics: list[dict[str, Any]] = []
        self.ready = False
        self._metrics_seen: tuple[int, int] = (0, 0)
        self._recent: dict[str, Rollout] = {}
        self._tokenizers: dict[tuple[Path, ...], Tokenizer | None] = {}

    def refresh(self) -> Iterator[None]:
        """Reads what is new, and stops now and then for whoever waits. `ready` once all was read that there is."""
        self._read_metrics()
        yield from self.index.refresh()
        self.ready = True

    @property
    def state(self) -> str:
        """done, training, or stopped: what its folder says, and whether the process that wrote there is alive."""
        if (self.path / "done.json").exists():
            return "done"
        return "training" if _alive(self.path / "run.pid") else "stopped"

    def about(self) -> dict[str, Any]:
        """What does not change from second to second."""
        done = read_done(self.path)
        roster = [msgspec.to_builtins(entry) for entry in entries_of(self.path)]
        name = self.path.resolve().name
        return {"name": name, "recipe": self.recipe, "done": done, "roster": roster, "runs": runs_in(self.path)}

    def version(self) -> dict[str, Any]:
        """How much there is to see: what a page is told when it changes."""
        return {
            "generation": self.index.generation,
            "rollouts": len(self.index.rows),
            "metrics": len(self.metrics),
            "state": self.state,
            "ready": self.ready,
            "damaged": self.index.damaged,
        }

    def rollout(self, id: str) -> dict[str, Any]:
        """Raises KeyError, RecordError."""
        rollout = self.load(id)
        found = shown(id, rollout, self._credit(id, rollout))
        return {**found, "fork": lacks(rollout), "made_of": made_of(self.path, id)}

    def agent(self, id: str, lane: int) -> dict[str, Any]:
        """The transcript of one agent of a rollout. Raises KeyError where there is none, RecordError."""
        rollout = self.load(id)
        rollouts = lanes_of(rollout)[1]
        if not 0 <= lane < len(rollouts):
            raise KeyError(lane)
        trace = rollouts[lane].trace
        tokenizer, note = self._tokenizer(trace.checkpoint, lane)
        credit = self._credit(id, rollout) if lane == 0 else None
        came = [[_text(result) for result in act.results] for act in trace.acts]
        windows = transcript(trace, tokenizer, credit)
        return {"lane": lane, "windows": windows, "came": came, "note": note, "credit": bool(credit)}

    def load(self, id: str) -> Rollout:
        """The rollout itself, the last few of which are kept. Raises KeyError, RecordError."""
        if id not in self._recent:
            self._recent[id] = self.index.load(id)
            while len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        return self._recent[id]

    def _credit(self, id: str, rollout: Rollout) -> Credit | None:
        name, _, number = id.rpartition(":")
        return credit_of(self.path / "rollouts" / f"{name}.rollouts", int(number), rollout.trace)

    def _tokenizer(self, checkpoint: str, lane: int) -> tuple[Tokenizer | None, str]:
        """That of the checkpoint which spoke, else the policy's; and what the reader should know of it."""
        policy = (self.path / "policy", *_folders(self.recipe.get("start")))
        own = self._folders_of(checkpoint) if lane else policy
        if tokenizer := self._opened(own):
            return tokenizer, ""
        tokenizer = self._opened(policy)
        if tokenizer is None:
            return None, "No tokenizer is left of this run's checkpoints: tokens are shown as numbers."
        return tokenizer, "This agent's own checkpoint is not here: its tokens are read with the policy's tokenizer."

    def _folders_of(self, checkpoint: str) -> tuple[Path, ...]:
        played = [p for entry in entries_of(self.path) for players in entry.cast.values() for p in players]
        named = (Path(p.path) for p in played if checkpoint and p.sha256 == checkpoint)
        return (*named, *_folders(self.recipe.get("subagent")))

    def _opened(self, folders: tuple[Path, ...]) -> Tokenizer | None:
        if folders not in self._tokenizers:
            self._tokenizers[folders] = open_tokenizer(folders)
        return self._tokenizers[folders]

    def _read_metrics(self) -> None:
        file = self.path / "metrics.jsonl"
        stat = file.stat() if file.exists() else None
        seen = (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)
        if seen != self._metrics_seen:
            self.metrics, self._metrics_seen = read_metrics(self.path), seen


def runs_in(path: Path) -> list[str]:
    """The run folders below a folder, which a study has."""
    return sorted(p.parent.name for p in path.glob("*/recipe.json"))


def _recipe_of(path: Path) -> dict[str, Any]:
    inside = runs_in(path)
    if not (path / "recipe.json").is_file() and inside:
        raise RunDirError(f"{path}: no run, but it holds some: {', '.join(inside[:8])}; want one of them")
    return read_recipe(path)


def _folders(value: object) -> tuple[Path, ...]:
    """A recipe's checkpoint, a folder or a name in the store, where it is one and is there."""
    try:
        return (resolve(value),) if isinstance(value, str) else ()
    except CheckpointError:
        return ()


def _text(result: ToolResult) -> str:
    """What a call gave back, its documents and tables by their titles."""
    return "".join(
        part if isinstance(part, str) else part.title if part.url else f"{len(part.rows)} rows\n"
        for part in result.parts
    )


def _alive(pid_file: Path) -> bool:
    """Whether the process is there that a run folder names as its writer."""
    try:
        os.kill(int(pid_file.read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True
