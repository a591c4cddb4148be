"""The rollouts of a run as a list: a short row each, found without building a single rollout tree.

    rollouts/*.rollouts ─ frames from where it stopped ─▶ Row, Row, …        refresh(), again and again
                        ─ one frame by its place ───────▶ Rollout            load("iteration_0007:12")

A file that grows is read on, so a list follows a run that trains; one that was cut or replaced begins a new
`generation` of the whole list. Not here: what is shown of a rollout (`recipes.view_rollout`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct as Layout
from typing import BinaryIO

import msgspec
import zstandard
from msgspec import Struct

from swarm.records import RecordError
from swarm.types import Ledger, Reward, Rollout

_HEAD = Layout("<II")
_MAGIC = len(b"SWARMREC1\n")
_LARGEST = 1 << 30
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
_ROLLOUT = msgspec.msgpack.Decoder(Rollout)


@dataclass(slots=True)
class _File:
    """How far a record file was read: where its frames begin, where the next one would, and which file it was."""

    inode: int
    end: int
    starts: list[int]


class Index:
    """The list of a folder's rollouts: `for _ in index.refresh(): …; index.rows`.

    `generation` counts how often the list began anew. `damaged`: files that are no record, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self.generation = 0
        self.damaged: dict[str, str] = {}
        self._files: dict[str, _File] = {}

    def refresh(self) -> Iterator[None]:
        """Reads what was added, and stops after every row, so that whoever waits may do something else."""
        paths = sorted(self.folder.glob("*.rollouts"))
        if any(self._replaced(name) for name in self._files):
            self.rows, self._files, self.damaged = [], {}, {}
            self.generation += 1
        for path in paths:
            if path.stem not in self.damaged:
                yield from self._read_on(path)

    def load(self, id: str) -> Rollout:
        """The whole rollout of a row. Raises KeyError where there is none, RecordError where it does not read."""
        name, _, number = id.rpartition(":")
        file = self._files[name]
        if not number.isdecimal() or int(number) >= len(file.starts):
            raise KeyError(id)
        path = self.folder / f"{name}.rollouts"
        with path.open("rb") as f:
            f.seek(file.starts[int(number)])
            payload = _frame(f)
        if payload is None:
            raise RecordError(f"{path}: rollout {number} is gone, want the file as it was listed")
        try:
            return _ROLLOUT.decode(payload)
        except msgspec.DecodeError as e:
            raise RecordError(f"{path}: rollout {number} is none of this version: {e}") from e

    def _replaced(self, name: str) -> bool:
        try:
            stat = (self.folder / f"{name}.rollouts").stat()
        except FileNotFoundError:
            return True
        return stat.st_ino != self._files[name].inode or stat.st_size < self._files[name].end

    def _read_on(self, path: Path) -> Iterator[None]:
        """The rows of the frames that are whole, from the first that was not."""
        stat = path.stat()
        file = self._files.get(path.stem) or _File(stat.st_ino, _MAGIC, [])
        if stat.st_size <= file.end:
            return
        with path.open("rb") as f:
            f.seek(file.end)
            while (payload := _frame(f)) is not None:
                try:
                    row = row_of(path.stem, len(file.starts), payload)
                except msgspec.DecodeError as e:
                    self.damaged[path.stem] = str(e)
                    return
                file.starts.append(file.end)
                file.end = f.tell()
                self._files[path.stem] = file
                self.rows.append(row)
                yield


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


def _frame(file: BinaryIO) -> bytes | None:
    """What the frame at a file's place holds, or None where it is not whole: it may still be under way."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    packed = file.read(length) if length <= _LARGEST else b""
    if len(packed) != length or zlib.crc32(packed) != crc:
        return None
    return zstandard.ZstdDecompressor().decompress(packed)
