"""The rollouts of a run as a list: a short row each, found without building a single rollout tree.

    rollouts/*.rollouts ─ frames from where it stopped ─▶ Row, Row, …        refresh(), again and again
                        ─ one frame by its place ───────▶ Rollout            load("iteration_0007:12")

A file that grows is read on, so a list follows a run that trains; one that was cut or replaced begins a new
`generation` of the whole list. Not here: what is shown of a rollout (`recipes.view.rollout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zstandard
from msgspec import Struct

from swarm.records import SUFFIX, RecordError, RecordFile
from swarm.types import Ledger, Reward, Rollout

_BEGINNING = 18
_NUMBER = re.compile(r"(\d+)$")


class Row(Struct, frozen=True, array_like=True):
    """One rollout in the list; on the wire an array in the order of these fields.

    `id` is `FILE:INDEX`, `iteration` the number at the end of the file's name (0 without one). `reward` is None where
    there is none. `agents`: subagents of the whole tree; `width`: most subagents at once of the first agent; `tokens`:
    sampled in the whole tree; `contexts`: windows of the first agent. `wanted`, `rows`: of the gold table, handed in.
    """

    id: str
    iteration: int
    index: int
    task: str
    domain: str
    query: str
    wanted: int
    rows: int
    status: str
    failed: bool
    error: str
    reward: float | None
    parts: dict[str, float]
    critical_steps: int
    total_steps: int
    agents: int
    width: int
    tokens: int
    seconds: float
    contexts: int
    harness: str


class _Task(Struct):
    id: str
    query: str
    domain: str
    gold: tuple[msgspec.Raw, ...] = ()


class _Trace(Struct):
    status: str
    segments: tuple[msgspec.Raw, ...] = ()
    error: str = ""


class _Tree(Struct):
    """What a row is made of: a rollout whose tokens, tables and texts are skipped over."""

    task: _Task
    trace: _Trace
    ledger: Ledger
    table: tuple[msgspec.Raw, ...] = ()
    children: tuple[_Tree, ...] = ()
    reward: Reward | None = None
    harness: str = ""


_TREE = msgspec.msgpack.Decoder(_Tree)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A record file as it was when it was last read, and its beginning, by which another one is told."""

    beginning: bytes
    file: RecordFile


class Index:
    """The list of the rollouts in some folders: `for _ in index.refresh(): …; index.rows`.

    `generation` counts how often the list began anew. `damaged`: what cannot be read, by file, with the reason.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.rows: list[Row] = []
        self.generation = 0
        self.damaged: dict[str, str] = {}
        self._seen: dict[str, _Seen] = {}
        self._listed: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def refresh(self) -> Iterator[None]:
        """Reads what was added, and stops after every row, so that whoever waits may do something else."""
        if any(self._replaced(name) for name in self._seen):
            self.rows, self._seen, self._listed, self._sizes, self.damaged = [], {}, {}, {}, {}
            self.generation += 1
        for folder in self.folders:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                yield from self._read_on(path)

    def __contains__(self, id: str) -> bool:
        name, _, number = id.rpartition(":")
        return number.isdecimal() and int(number) < self._listed.get(name, 0)

    def load(self, id: str) -> Rollout:
        """The whole rollout of a row. Raises KeyError where there is none, RecordError where it does not read."""
        if id not in self:
            raise KeyError(id)
        name, _, number = id.rpartition(":")
        return self._seen[name].file[int(number)]

    def _replaced(self, name: str) -> bool:
        seen = self._seen[name]
        path = seen.file.path
        try:
            return path.stat().st_size < seen.file.whole or _beginning(path) != seen.beginning
        except FileNotFoundError:
            return True

    def _read_on(self, path: Path) -> Iterator[None]:
        """The rows of the frames that were not there, or not whole, when the file was last read."""
        name, size = path.stem, path.stat().st_size
        if self._sizes.get(name) == size:
            return
        self._sizes[name] = size
        try:
            file = RecordFile(path)
            if len(file):
                self._seen[name] = _Seen(_beginning(path), file)
            for k in range(self._listed.get(name, 0), len(file)):
                self.rows.append(row_of(name, k, file.unpacked(k)))
                self._listed[name] = k + 1
                yield
        except (RecordError, msgspec.DecodeError, zstandard.ZstdError) as e:
            self.damaged[name] = str(e)


def _beginning(path: Path) -> bytes:
    """Up to the checksum of the first rollout, which no other has."""
    with path.open("rb") as f:
        return f.read(_BEGINNING)


def row_of(name: str, index: int, payload: bytes) -> Row:
    """The row of a frame of the file `name`. Raises msgspec.DecodeError where it holds no rollout."""
    tree = _TREE.decode(payload)
    number = _NUMBER.search(name)
    return Row(
        id=f"{name}:{index}",
        iteration=int(number[1]) if number else 0,
        index=index,
        task=tree.task.id,
        domain=tree.task.domain,
        query=tree.task.query,
        wanted=len(tree.task.gold),
        rows=len(tree.table),
        status=tree.trace.status,
        failed=_any_failed(tree),
        error=tree.trace.error,
        reward=tree.reward.total if tree.reward else None,
        parts=dict(tree.reward.parts) if tree.reward else {},
        critical_steps=tree.ledger.critical_steps,
        total_steps=_sum(tree, lambda t: t.ledger.main_steps),
        agents=_sum(tree, lambda t: 1) - 1,
        width=max((len(s.subagents) for s in tree.ledger.stages), default=0),
        tokens=_sum(tree, lambda t: t.ledger.tokens_sampled),
        seconds=round(tree.ledger.seconds, 3),
        contexts=len(tree.trace.segments),
        harness=tree.harness,
    )


def _any_failed(tree: _Tree) -> bool:
    return tree.trace.status == "error" or any(map(_any_failed, tree.children))


def _sum(tree: _Tree, value: Callable[[_Tree], int]) -> int:
    return value(tree) + sum(_sum(child, value) for child in tree.children)
