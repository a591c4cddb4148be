"""Forks asked for on the page: one thing changed at one turn, the branch run on, and recorded beside the run.

    RUN/forks/branches.rollouts   the branches     branches.jsonl   of each its parent, agent, turn and edit

Not here: what a fork is (`swarm.fork`), and the engines of a run (`recipes.debug.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from recipes.episodes import json_lines
from swarm.chat import Chat
from swarm.chat_layout import read_turn
from swarm.fork import Branch, Edit, ForkError, tree
from swarm.records import RecordFile, write
from swarm.terms import Budget
from swarm.types import Rollout, Trace, Turn

FOLDER, NAME = "forks", "branches"


class Asked(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A fork as the page asks for it: `Asked("iteration_0007:3", "main", 2, results={0: "none"})`.

    `say`: the whole text of the turn, calls included; see `swarm.fork.Edit` for the others.
    """

    id: str
    agent: str
    turn: int
    say: str | None = None
    results: dict[int, str] = {}
    prompt: str | None = None
    critical_steps: int | None = None
    temperature: float | None = None
    seed: int | None = None


class Opened(Protocol):
    """A run that can be forked, as `recipes.debug.run.Debugger` is; its `fork` takes as long as the branch runs."""

    @property
    def languages(self) -> Callable[[Trace], Chat]: ...

    def fork(self, rollout: Rollout, agent: str, turn: int, edit: Edit) -> Branch: ...

    def close(self) -> None: ...


class Forks:
    """The forks of a run, whose engines are opened by the first: `Forks(run, lambda: open_run(run))`."""

    def __init__(self, run: Path, opens: Callable[[], Opened]) -> None:
        self.folder = run / FOLDER
        self._opens = opens

    @cached_property
    def _opened(self) -> Opened:
        return self._opens()

    def make(self, asked: Asked, parent: Rollout) -> str:
        """Runs the branch and records it; its id in the list. Raises ForkError, and what the run's engines raise."""
        edit = self._edit(asked, parent)
        branch = self._opened.fork(parent, asked.agent, asked.turn, edit)
        file = self.folder / f"{NAME}.rollouts"
        place = len(RecordFile(file)) if file.exists() else 0
        write(file, [branch.rollout])
        with (self.folder / f"{NAME}.jsonl").open("ab") as lines:
            lines.write(msgspec.json.encode(asked) + b"\n")
        return f"{NAME}:{place}"

    def close(self) -> None:
        """Closes the engines, if any were opened."""
        if "_opened" in self.__dict__:
            self._opened.close()

    def _edit(self, asked: Asked, parent: Rollout) -> Edit:
        trace = next((r.trace for r in tree(parent) if r.trace.agent == asked.agent), None)
        if trace is None or trace.setup is None:
            raise ForkError(f"{asked.agent}: its record cannot be gone on from, want one of the native loop")
        return Edit(
            action=None if asked.say is None else self._turn(trace, asked.say),
            results=asked.results,
            budget=_budget(trace.setup.budget, asked.critical_steps),
            temperature=asked.temperature,
            seed=asked.seed,
            prompt=asked.prompt,
        )

    def _turn(self, trace: Trace, text: str) -> Turn:
        layout = self._opened.languages(trace).layout
        turn = read_turn(text.removesuffix(layout.end), layout.read)
        if turn.malformed:
            raise ForkError(f"{trace.agent}: what it is to say does not read: {turn.malformed[0]}")
        return turn


def made_of(run: Path, id: str) -> Mapping[str, Any] | None:
    """What a branch was made of, None for any other rollout."""
    name, _, number = id.rpartition(":")
    lines = run / FOLDER / f"{NAME}.jsonl"
    if name != NAME or not lines.exists():
        return None
    known = json_lines(lines, dict[str, Any])
    return known[int(number)] if int(number) < len(known) else None


def _budget(was: Budget, critical_steps: int | None) -> Budget | None:
    return None if critical_steps is None else Budget(critical_steps, was.tokens, was.seconds)
