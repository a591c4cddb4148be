"""A run's roster over time, on file: who played what from which iteration on; and swaps by hand while it trains.

    recipe ─ its cast, its swaps ──┐
    roster.next.json ─ by hand ────┴▶ CastBook.at(k) ─▶ roster.jsonl: {"iteration": 20, "cast": {...}}

An iteration that was begun has its cast on file before its first rollout, so that a run that was killed goes on with
the same, by hash. Not here: engines, and the roster at work (`subagents.roster`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from recipes.cast.roles import Weights, check_weights, label
from recipes.episodes import json_lines
from recipes.named import resolve
from subagents.roster import RosterError
from swarm.checkpoint import frozen_ref
from swarm.folders import CheckpointError, flush
from swarm.store import STORE, Store
from swarm.types import Cast, CheckpointRef, Mixture

FILE, NEXT = "roster.jsonl", "roster.next.json"


class Played(Struct, frozen=True):
    """A checkpoint in a role, as it is on file; `name` is what it was called, in the store or as a folder."""

    path: str
    sha256: str
    weight: float = 1.0
    name: str = ""


class Entry(Struct, frozen=True):
    """The whole cast from an iteration on; `by` says what changed it: recipe, hand."""

    iteration: int
    cast: dict[str, list[Played]]
    by: str = "recipe"


class CastBook:
    """The roster of a run folder: `CastBook(run, recipe_cast).at(20)`.

    `written(k)` are the changes that the recipe has for iteration k, all of the cast for 0.
    """

    def __init__(self, run: Path, written: Callable[[int], Mapping[str, Weights]]) -> None:
        self.run, self.written = run, written
        self._refs: dict[Played, CheckpointRef] = {}

    def at(self, iteration: int) -> Cast:
        """The cast of an iteration, counted from 1; on file when this returns.

        One that was begun before has the cast that it had; else the one before it, changed by the recipe, then by hand.
        Raises CheckpointError where a checkpoint is gone or is another, RosterError for a wrong `roster.next.json`.
        """
        entries = [e for e in entries_of(self.run) if e.iteration <= iteration]
        if entries and entries[-1].iteration == iteration:
            return self._cast(entries[-1].cast)
        cast = entries[-1].cast if entries else _played(self.written(0), self.run)
        asked = asked_of(self.run)
        changed = {**cast, **_played(self.written(iteration), self.run), **asked}
        if changed and (not entries or changed != cast):
            self._append(Entry(iteration, changed, "hand" if asked else "recipe"))
        (self.run / NEXT).unlink(missing_ok=True)
        return self._cast(changed)

    def _cast(self, cast: Mapping[str, Sequence[Played]]) -> Cast:
        """As references, each folder hashed once."""
        for played in {p for players in cast.values() for p in players} - self._refs.keys():
            self._refs[played] = as_played(played)
        return {role: tuple((self._refs[p], p.weight) for p in players) for role, players in cast.items()}

    def _append(self, entry: Entry) -> None:
        path = self.run / FILE
        with path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # what a crash left of a line
            file.seek(0, os.SEEK_END)
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def entries_of(run: Path) -> list[Entry]:
    """What is on file, in order; nothing for a run that has not begun."""
    return json_lines(run / FILE, Entry) if (run / FILE).exists() else []


def asked_of(run: Path) -> dict[str, list[Played]]:
    """The swap by hand that the run will make with its next iteration. Raises RosterError if it does not read."""
    path = run / NEXT
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[Played]])
    except msgspec.DecodeError as e:
        raise RosterError(f"{path}: {e}, want what swarm-rl roster writes") from e


def ask(run: Path, changes: Mapping[str, Weights]) -> None:
    """Has a run make these changes with its next iteration; checkpoints are checked now.

    Asked again before that, roles that are not named stay as they were asked for. Raises CheckpointError for a folder
    that is none.
    """
    for role, weights in changes.items():
        check_weights(f"role {role!r}", weights)
    whole = {**asked_of(run), **_played(changes, run)}
    part = run / f"{NEXT}.part"
    part.write_text(json.dumps(msgspec.to_builtins(whole), indent=1) + "\n")
    flush(part)
    os.replace(part, run / NEXT)


def _played(changes: Mapping[str, Weights], run: Path) -> dict[str, list[Played]]:
    """Paths are absolute, so that a later command finds them from anywhere."""
    return {role: [_found(f, weight, run) for f, weight in weights.items()] for role, weights in changes.items()}


def _found(text: str, weight: float, run: Path) -> Played:
    """One of the store is pinned by the run: it stays though its name moves on."""
    folder, name = resolve(text), text
    if STORE in folder.parents and not Path(text).is_dir():
        ref = Store(STORE).get(text, pin=str(run))
    else:
        ref, name = frozen_ref(folder), label(str(folder))
    return Played(str(ref.path.absolute()), ref.sha256, weight, name)


def last_cast(run: Path) -> Cast:
    """The cast that a run ended with, or has reached; {} where it has none on file. Raises as `CastBook.at` does."""
    entries = entries_of(run)
    return {r: tuple((as_played(p), p.weight) for p in ps) for r, ps in entries[-1].cast.items()} if entries else {}


def as_played(played: Played) -> CheckpointRef:
    """The checkpoint that was played. Raises CheckpointError where the folder is gone or holds another."""
    ref = frozen_ref(resolve(played.path))
    if ref.sha256 != played.sha256:
        seen = f"sha256 {ref.sha256[:12]}, want {played.sha256[:12]}"
        raise CheckpointError(f"{played.path}: {seen} as played in the run before")
    return ref


def shown(mixture: Mixture) -> str:
    """`reader-1m (3f2a91c0)`, of several each with its share."""
    total = sum(weight for _, weight in mixture)
    names = [f"{label(str(ref.path))} ({ref.sha256[:8]})" for ref, _ in mixture]
    if len(names) == 1:
        return names[0]
    return ", ".join(f"{weight / total:.0%} {name}" for name, (_, weight) in zip(names, mixture, strict=True))
