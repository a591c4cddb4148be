"""An answer against the gold table, cell by cell, and which subagent brought which row.

Cells are compared as our own tasks are scored (`rewards.table`); another verifier may be more lenient. Not here:
a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from rewards.table import canonical
from swarm.types import Rollout, Table, Task

Verdict = Literal["right", "partial", "missing", "extra"]
"""right: the whole row; partial: the key, but not every cell; missing: wanted, not handed in; extra: the reverse."""


class Line(Struct, frozen=True, omit_defaults=True):
    """One row, `found` beside `gold` (empty where there is none); `by`: the subagents that brought its key.

    `right` has a truth a cell, of a row that is in both. `again`: a key that an earlier row of the answer has.
    """

    verdict: Verdict
    gold: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()
    by: tuple[int, ...] = ()
    again: bool = False


Key = tuple[str, ...]


def key_of(task: Task, row: Sequence[str]) -> Key:
    """What tells a row from others: its first cells, as they are compared."""
    return tuple(map(canonical, row[: task.keys]))


def compared(rollout: Rollout, brought: Mapping[int, Table]) -> list[Line]:
    """The gold rows in order, then what was handed in besides. `brought`: the tables of the subagents, by lane."""
    task = rollout.task
    found: dict[Key, tuple[str, ...]] = {}
    again: list[tuple[str, ...]] = []
    for row in _rows(task, rollout.table):
        again += [row] if key_of(task, row) in found else []
        found.setdefault(key_of(task, row), row)
    by = _by_key(task, brought)
    wanted = [_line(row, found.get(key_of(task, row), ()), by.get(key_of(task, row), ())) for row in task.gold]
    keys = {key_of(task, row) for row in task.gold}
    extra = [Line("extra", found=row, by=by.get(key, ())) for key, row in found.items() if key not in keys]
    return wanted + extra + [Line("extra", found=row, again=True) for row in again]


def wanted_rows(task: Task, table: Table) -> set[Key]:
    """The keys of the gold table that a table has."""
    return {key_of(task, row) for row in task.gold} & {key_of(task, row) for row in table}


def _rows(task: Task, table: Table) -> list[tuple[str, ...]]:
    """The rows that count: neither blank nor the header, as wide as the gold table."""
    header = tuple(map(canonical, task.columns))
    return [row for row in table if any(row) and tuple(map(canonical, row[: len(header)])) != header]


def _line(gold: tuple[str, ...], found: tuple[str, ...], by: tuple[int, ...]) -> Line:
    if not found:
        return Line("missing", gold, by=by)
    padded = (*found, *("" for _ in gold[len(found) :]))
    right = tuple(canonical(a) == canonical(b) for a, b in zip(padded, gold, strict=False))
    return Line("right" if all(right) else "partial", gold, padded, right, by)


def _by_key(task: Task, brought: Mapping[int, Table]) -> dict[Key, tuple[int, ...]]:
    found: dict[Key, tuple[int, ...]] = {}
    for lane, table in brought.items():
        for key in dict.fromkeys(key_of(task, row) for row in table):
            found[key] = (*found.get(key, ()), lane)
    return found
