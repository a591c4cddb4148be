"""Rollouts side by side: what each was worth and cost, and the answers row by row against the gold table.

    print(compare({"recorded": a, "warm": b}))      as a table; in a notebook it shows itself

Rows are matched by their keys; cells are equal when they are but for case and spaces. Verifiers may be milder: the
reward says what they found. Not here: making branches (`swarm.fork`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from swarm.replay import tree
from swarm.types import Rollout, Table, Task

MARKS = {"right": "✓", "wrong": "≠", "missing": "–", "extra": "+"}
_COLOURS = {"right": "green", "wrong": "red", "missing": "yellow", "extra": "magenta"}
_CSS = {"right": "#1a7f37", "wrong": "#cf222e", "missing": "#9a6700", "extra": "#8250df", "": "inherit"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rollout came to. Steps and seconds are those of its root agent, tokens and agents those of the tree.

    `reward` is its total, None without one; `parts` those with a weight.
    """

    name: str
    status: str
    reward: float | None
    parts: Mapping[str, float]
    critical_steps: int
    total_steps: int
    seconds: float
    agents: int
    sampled: int
    prompt: int
    rows: int
    right: int


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the gold table, or one that it has not: what each rollout handed in for it, and how that stands.

    `cells` and `stands` have one entry a rollout; a row that was not handed in has no cells and is "missing", or ""
    where it is not wanted.
    """

    gold: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    stands: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.cells)) > 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """`outcomes` in the order that was given, `rows` those of the gold table first. `task` is that of all."""

    task: Task
    outcomes: tuple[Outcome, ...]
    rows: tuple[Row, ...]

    @property
    def changed(self) -> tuple[Row, ...]:
        """The rows in which the answers differ."""
        return tuple(row for row in self.rows if row.differs)

    def lines(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Name and values of each number, as they are shown."""
        outcomes = self.outcomes
        yield "status", tuple(o.status for o in outcomes)
        yield "reward", tuple("none" if o.reward is None else f"{o.reward:.3f}" for o in outcomes)
        for part in dict.fromkeys(name for o in outcomes for name in o.parts):
            yield f"  {part}", tuple(f"{o.parts[part]:g}" if part in o.parts else "" for o in outcomes)
        for name in ("critical_steps", "total_steps", "agents"):
            yield name.replace("_", " "), tuple(str(getattr(o, name)) for o in outcomes)
        yield "seconds", tuple(f"{o.seconds:.1f}" for o in outcomes)
        yield "tokens sampled", tuple(f"{o.sampled:,}" for o in outcomes)
        yield "tokens of prompts", tuple(f"{o.prompt:,}" for o in outcomes)
        wanted = len(self.task.gold)
        yield "rows right", tuple(f"{o.right} of {wanted}, {o.rows} given" for o in outcomes)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        numbers = RichTable(box=SIMPLE_HEAD)
        numbers.add_column("")
        for o in self.outcomes:
            numbers.add_column(o.name, justify="right")
        for name, values in self.lines():
            numbers.add_row(name, *(Text(v) for v in values))
        yield numbers
        if not self.changed:
            yield Text("the answers have the same rows")
            return
        rows = RichTable(box=SIMPLE_HEAD, title="rows that differ", title_justify="left")
        for heading in (" | ".join(self.task.columns), *(o.name for o in self.outcomes)):
            rows.add_column(heading, overflow="fold")
        for row in self.changed:
            pairs = zip(row.cells, row.stands, strict=True)
            rows.add_row(Text(" | ".join(row.gold)), *(Text(_cell(c, s), style=_COLOURS.get(s, "")) for c, s in pairs))
        yield rows

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(o.name)}</th>" for o in self.outcomes)
        numbers = "".join(_html_row(name, [(v, "") for v in values]) for name, values in self.lines())
        rows = "".join(
            _html_row(" | ".join(row.gold), [(_cell(c, s), s) for c, s in zip(row.cells, row.stands, strict=True)])
            for row in self.changed
        )
        columns = escape(" | ".join(self.task.columns))
        below = f"<tr><th>{columns}</th>{head}</tr>{rows}" if rows else ""
        return f"<table><tr><th></th>{head}</tr>{numbers}{below}</table>"


def compare(rollouts: Mapping[str, Rollout]) -> Comparison:
    """Rollouts of one task by name. Raises ValueError for none, or for several tasks."""
    tasks = {r.task.id: r.task for r in rollouts.values()}
    if len(tasks) != 1:
        raise ValueError(f"compare: tasks {sorted(tasks)}, want rollouts of one task")
    [task] = tasks.values()
    outcomes = tuple(outcome(name, r) for name, r in rollouts.items())
    return Comparison(task, outcomes, tuple(_rows(task, [r.table for r in rollouts.values()])))


def outcome(name: str, rollout: Rollout) -> Outcome:
    """The numbers of one rollout."""
    trace, ledger, reward = rollout.trace, rollout.ledger, rollout.reward
    agents = list(tree(rollout))
    return Outcome(
        name=name,
        status=f"{trace.status}: {trace.error}" if trace.error else trace.status,
        reward=reward.total if reward else None,
        parts={k: v for k, v in reward.parts.items() if reward.weights.get(k)} if reward else {},
        critical_steps=ledger.critical_steps,
        total_steps=rollout.total_steps,
        seconds=ledger.seconds,
        agents=len(agents),
        sampled=sum(a.ledger.tokens_sampled for a in agents),
        prompt=sum(a.ledger.tokens_prompt for a in agents),
        rows=len(rollout.table),
        right=sum(row.stands[0] == "right" for row in _rows(rollout.task, [rollout.table])),
    )


def _rows(task: Task, tables: list[Table]) -> Iterator[Row]:
    found = [{_key(row, task.keys): row for row in table} for table in tables]
    wanted = {_key(row, task.keys): row for row in task.gold}
    for key, gold in wanted.items():
        cells = tuple(table.get(key, ()) for table in found)
        yield Row(gold, cells, tuple(_stand(c, gold) for c in cells))
    for key in dict.fromkeys(k for table in found for k in table if k not in wanted):
        cells = tuple(table.get(key, ()) for table in found)
        yield Row((), cells, tuple("extra" if c else "" for c in cells))


def _stand(cells: tuple[str, ...], gold: tuple[str, ...]) -> str:
    if not cells:
        return "missing"
    return "right" if _key(cells, len(gold)) == _key(gold, len(gold)) and len(cells) == len(gold) else "wrong"


def _key(row: tuple[str, ...], columns: int) -> tuple[str, ...]:
    return tuple(" ".join(c.split()).casefold() for c in row[:columns])


def _cell(cells: tuple[str, ...], stands: str) -> str:
    return f"{MARKS.get(stands, '')} {' | '.join(cells)}".strip()


def _html_row(name: str, values: list[tuple[str, str]]) -> str:
    cells = "".join(f'<td style="color:{_CSS[stands]}">{escape(text)}</td>' for text, stands in values)
    return f"<tr><th>{escape(name)}</th>{cells}</tr>"
