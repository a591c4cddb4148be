"""Whether a task is worth serving, found out by scripted agents that use the real tools.

    oracle     reads everything: must reach item-F1 1.0, else the task cannot be solved
    constant   knows the keys and writes one constant down each column: may gain 0.1 over the keys alone
    serial     reads row by row within the budget: where the task is wide, it must stay at 0.8 or under

The scorer is an argument, so that this asks the same question of every scoring rule. Not here: policies
of an agent's own (these scripts read no prompt and hold no context).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from envs.pages import MISSING, EntityPage, Field
from envs.tasks import Column, constant_guess, usual_values
from envs.tools import access, search
from envs.world import World
from swarm.types import Artifact, Table, Task, ToolResult
from swarm.verdicts import TableScore
from swarm.workspace import Workspace

WIDE = 50
"""Rows from which a task is meant to need several agents."""
MAX_GAIN, MAX_SERIAL = 0.1, 0.8
BUDGET = 40
UNKNOWN = "?"
_FIELD = re.compile(r"([a-zA-Z]) (.+): ")
_EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Item-F1 of each script, and the critical steps that a serial agent needs for all of it."""

    oracle: float
    keys: float
    constant: float
    serial: float
    steps: int
    wide: bool

    @property
    def reason(self) -> str:
        """Why the task is refused; "" where it is accepted."""
        if self.oracle < 1 - _EXACT:
            return f"the oracle reaches {self.oracle:.3f}, want 1"
        if self.constant > self.keys + MAX_GAIN + _EXACT:
            return f"a constant guess gains {self.constant - self.keys:.3f} over keys alone, want at most {MAX_GAIN}"
        if self.wide and self.serial > MAX_SERIAL + _EXACT:
            return f"a serial agent reaches {self.serial:.3f}, want at most {MAX_SERIAL}"
        return ""

    @property
    def ok(self) -> bool:
        return not self.reason


def accept(
    world: World,
    task: Task,
    verifier: TableScore,
    budget: int = BUDGET,
    usual: Mapping[tuple[str, str], str] | None = None,
) -> Acceptance:
    """Runs the scripts on a task; `budget` counts a step a tool call and one for the answer.

    `usual` is `usual_values(world)`, for callers that ask often. The verifier's `item_f1` is used.
    """
    usual = usual_values(world) if usual is None else usual
    everything = explore(world, task)
    in_budget = explore(world, task, budget - 1) if everything.calls >= budget else everything
    guesses = _guesses(world, task, usual)

    def score(table: Table) -> float:
        return verifier(task, table)["item_f1"]

    return Acceptance(
        oracle=score(everything.table),
        keys=score(tuple((row[0], *[UNKNOWN] * (len(row) - 1)) for row in task.gold)),
        constant=score(tuple((row[0], *guesses) for row in task.gold)),
        serial=score(in_budget.table),
        steps=everything.calls + 1,
        wide=len(task.gold) >= WIDE,
    )


def accepted(world: World, verifier: TableScore, budget: int = BUDGET) -> Callable[[Task], bool]:
    """For `TaskSet(world, keep=accepted(world, verifier))`: serves only tasks that pass."""
    usual = usual_values(world)
    return lambda task: accept(world, task, verifier, budget, usual).ok


@dataclass(frozen=True, slots=True)
class Found:
    """What a scripted agent has after some calls: rows, `UNKNOWN` where it did not get to look."""

    table: Table
    calls: int


def explore(world: World, task: Task, calls: int | None = None) -> Found:
    """Searches for the list, reads all of its pages, then row after row, for at most so many calls."""
    reader = _Reader(world, Workspace((Artifact(task.subject, cells={"text": task.query}),)), calls)
    columns = [Column.parse(c) for c in task.columns[1:]]
    entries = _read_list(reader, task.subject)
    rows = [(title, *_read_row(reader, url, columns)) for url, title in entries]
    return Found(tuple(rows), reader.used)


@dataclass(slots=True)
class _Reader:
    """Calls the tools and counts; answers None when no call is left."""

    world: World
    workspace: Workspace
    limit: int | None
    used: int = 0
    seen: dict[str, EntityPage] = field(default_factory=dict[str, EntityPage])

    def spend(self) -> bool:
        if self.limit is not None and self.used >= self.limit:
            return False
        self.used += 1
        return True

    def entity(self, url: str) -> EntityPage | None:
        """The page as its text tells it; a page that was read before costs nothing."""
        if url not in self.seen and self.spend():
            self.seen[url] = _parse(access(self.world, self.workspace, {"url": url}))
        return self.seen.get(url)


def _read_list(reader: _Reader, subject: str) -> list[tuple[str, str]]:
    """(url, title) of the entries of the list called exactly as the subject."""
    if not reader.spend():
        return []
    hits = _artifacts(search(reader.world, reader.workspace, {"query": "#0"}))
    url = next((h.url for h in hits if h.title == subject), "")
    entries: list[tuple[str, str]] = []
    page = 1
    while url and reader.spend():
        result = access(reader.world, reader.workspace, {"url": url, "page": page})
        entries += [(a.url, a.title) for a in _artifacts(result)[1:]]
        if result.parts[1] == f" page {page} of {page}\n" or result.error:
            break
        page += 1
    return entries


def _read_row(reader: _Reader, url: str, columns: list[Column]) -> list[str]:
    page = reader.entity(url)
    return [UNKNOWN if page is None else _cell(reader, page, c) for c in columns]


def _cell(reader: _Reader, page: EntityPage, column: Column) -> str:
    target: EntityPage | None = page
    if column.via:
        link = page.latest(column.via)
        if link is None or not link.link:
            return MISSING
        target = reader.entity(link.link)
    if target is None:
        return UNKNOWN
    found = target.latest(column.name)
    return found.value if found else MISSING


def _parse(result: ToolResult) -> EntityPage:
    """An entity page, read back from the text and the artifacts that an agent would be shown."""
    head = result.parts[0]
    if isinstance(head, str):
        return EntityPage("", "", "", ())
    fields: list[Field] = []
    for part, after in zip(result.parts[1:], (*result.parts[2:], ""), strict=True):
        m = _FIELD.match(part) if isinstance(part, str) else None
        if m:
            fields.append(Field(m[2], head.cells[m[1]], m[1], "" if isinstance(after, str) else after.url))
    return EntityPage(head.url, head.title, "", tuple(fields))


def _artifacts(result: ToolResult) -> list[Artifact]:
    return [p for p in result.parts if isinstance(p, Artifact)]


def _guesses(world: World, task: Task, usual: Mapping[tuple[str, str], str]) -> list[str]:
    """One constant a column: of a linked page's field, or of this family's."""
    guesses: list[str] = []
    for k, text in enumerate(task.columns[1:], start=1):
        column = Column.parse(text)
        families = (f for f, name in usual if name == column.name) if column.via else iter((task.domain,))
        common = usual.get((next(families, task.domain), column.name), MISSING)
        guesses.append(constant_guess((row[k] for row in task.gold), common))
    return guesses
