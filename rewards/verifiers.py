"""Verifiers by rule, and how a batch of rollouts is verified, whoever verifies it.

    item_f1            cells of the table handed in, its rows matched by their keys        rewards.table
    strict, official   the WideSearch scorers on the same table                            rewards.widesearch
    exact              all of the gold table and nothing else, or 0                        here
    numeric            cells of the columns of numbers, right within a tolerance           here
    set                which rows were found, by their keys                                here
    trails             the share of trails whose value is right                            rewards.trails

A question of one column may be answered in plain lines, one value a line. Not here: a generative judge
(`rewards.judge`), and what a score is worth (`rewards.parl`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import trio

from rewards.table import by_key, canonical, f1, table_scores
from rewards.trails import trail_scores
from rewards.widesearch.official import score_official
from rewards.widesearch.strict import score_strict
from rewards.widesearch.tasks import widesearch_scores
from swarm.checks import want
from swarm.types import Rollout, Table, Task
from swarm.verdicts import TableScore, Verdict, Verifier

NOT_VERIFIED = Verdict({}, "rollout: it failed, so that there is nothing to score")
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:e[+-]?\d{1,3})?%?", re.ASCII | re.I)


@dataclass(frozen=True, slots=True)
class Rule:
    """A `Verifier` in plain Python, which never waits: `Rule(table_scores, "item_f1", without_rows)`.

    `misfit` says in a few words why a task cannot be scored so, nothing where it can.
    """

    score: TableScore
    main: str
    misfit: Callable[[Task], str]

    def fits(self, task: Task) -> str:
        return self.misfit(task)

    async def __call__(self, rollout: Rollout) -> Verdict:
        return Verdict(self.score(rollout.task, handed_in(rollout)))


def handed_in(rollout: Rollout) -> Table:
    """The rollout's table; where only one column is asked for and there is no table, the lines of its answer."""
    if rollout.table or len(rollout.task.columns) != 1:
        return rollout.table
    return tuple((_BULLET.sub("", line).strip(),) for line in rollout.answer.splitlines() if line.strip())


# --- scores ----------------------------------------------------------------------------


def exact_scores(task: Task, table: Table) -> dict[str, float]:
    """A `TableScore`: exact, 1.0 where the distinct rows are those of `task.gold` in any order, else 0.0.

    Cells are compared in their canonical form; a row with a cell too many is a wrong one.
    """
    return {"exact": float(_rows(task, table) == _rows(task, task.gold))}


def set_scores(task: Task, table: Table) -> dict[str, float]:
    """A `TableScore`: set_precision, set_recall and set_f1 of the keys, each counted once."""
    found, gold = by_key(task, table).keys(), by_key(task, task.gold).keys()
    precision, recall = _share(len(found & gold), len(found)), _share(len(found & gold), len(gold))
    return {"set_f1": f1(precision, recall), "set_precision": precision, "set_recall": recall}


@dataclass(frozen=True, slots=True)
class Numeric:
    """A `TableScore` of numbers: r is right for g where |r − g| ≤ max(`relative`·|g|, `absolute`).

    numeric_precision, numeric_recall and numeric_f1 are over the cells of the columns that hold numbers in the gold
    table, keys apart, in rows matched as in `table_scores`; a cell that is no number must be equal. Where one value
    is asked for, over that. "4,023", "4.023e3" and "12 %" are numbers, "about 7" is none. Raises ValueError.
    """

    relative: float = 0.01
    absolute: float = 0.0

    def __post_init__(self) -> None:
        for name in ("relative", "absolute"):
            value = getattr(self, name)
            want("numeric", name, value, 0 <= value < math.inf, "0 or more")

    def __call__(self, task: Task, table: Table) -> dict[str, float]:
        columns = number_columns(task)
        if len(task.columns) == 1:
            pairs = [(row[0], task.gold[0][0]) for row in table[:1]]
            found, gold = len(table), len(task.gold)
        else:
            rows, wanted = by_key(task, table), by_key(task, task.gold)
            pairs = [
                (row[c] or "", wanted[key][c] or "") for key, row in rows.items() if key in wanted for c in columns
            ]
            found, gold = len(rows) * len(columns), len(wanted) * len(columns)
        right = sum(self.near(a, b) for a, b in pairs)
        precision, recall = _share(right, found), _share(right, gold)
        return {"numeric_f1": f1(precision, recall), "numeric_precision": precision, "numeric_recall": recall}

    def near(self, found: str, gold: str) -> bool:
        """Whether one cell is right."""
        r, g = number(found), number(gold)
        if r is None or g is None:
            return canonical(found) == canonical(gold)
        return abs(r - g) <= max(self.relative * abs(g), self.absolute)


def number(text: str) -> float | None:
    """The number that a whole cell is, a percentage in hundredths; None for anything else."""
    bare = text.strip().replace(" %", "%")
    if not _NUMBER.fullmatch(bare):
        return None
    value = float(bare.rstrip("%").replace(",", ""))
    return value / 100 if bare.endswith("%") else value if math.isfinite(value) else None


def number_columns(task: Task) -> list[int]:
    """The columns, keys apart, that hold a number in the gold table; the only one, where one is asked for."""
    columns = range(task.keys, len(task.columns)) if len(task.columns) > 1 else range(1)
    return [c for c in columns if any(number(row[c]) is not None for row in task.gold)]


def _rows(task: Task, table: Table) -> set[tuple[str, ...]]:
    header = tuple(map(canonical, task.columns))
    rows = {tuple(map(canonical, row)) for row in table}
    return {row for row in rows if row != header and any(row)}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# --- what fits -------------------------------------------------------------------------


def without_gold(task: Task) -> str:
    """Why nothing can be compared with the gold table."""
    if not task.gold:
        return "it has no gold table"
    odd = next((len(row) for row in task.gold if len(row) != len(task.columns)), 0)
    if odd or not 1 <= task.keys <= len(task.columns):
        return (
            f"a gold row of {odd or len(task.columns)} cells, {task.keys} of them keys, for {len(task.columns)} columns"
        )
    return ""


def without_rows(task: Task) -> str:
    """Why the finding of rows cannot be scored: where the question names them, their keys would score for nothing."""
    return without_gold(task) or ("the question names its rows" if task.names else "")


def without_numbers(task: Task) -> str:
    """Why numbers cannot be compared."""
    if missing := without_gold(task):
        return missing
    if len(task.columns) == 1 and len(task.gold) > 1:
        return f"it asks for a list of {len(task.gold)}, want one value or a table with keys"
    return "" if number_columns(task) else "its gold table has no column of numbers beside its keys"


def without_names(task: Task) -> str:
    """Why the share of right trails cannot be told."""
    if missing := without_gold(task):
        return missing
    return "" if task.names and len(task.columns) == 2 else "it has no trails, whose letters stand in the question"


def unfit_for_widesearch(task: Task) -> str:
    """Why the WideSearch scorers cannot read it: names that they fold, or a pipe in a cell."""
    if missing := without_rows(task):
        return missing
    folded = {"".join(name.lower().split(" ")) for name in task.columns}
    if len(folded) < len(task.columns):
        return f"columns {list(task.columns)} are the same to the scorer but for case and spaces"
    return "a gold cell holds a pipe" if any("|" in cell for row in task.gold for cell in row) else ""


RULES: Mapping[str, Rule] = {
    "item_f1": Rule(table_scores, "item_f1", without_rows),
    "strict": Rule(widesearch_scores(score_strict), "f1_by_item", unfit_for_widesearch),
    "official": Rule(widesearch_scores(score_official), "f1_by_item", unfit_for_widesearch),
    "exact": Rule(exact_scores, "exact", without_gold),
    "numeric": Rule(Numeric(), "numeric_f1", without_numbers),
    "set": Rule(set_scores, "set_f1", without_rows),
    "trails": Rule(trail_scores, "score", without_names),
}
"""The verifiers that need nothing but a task."""


# --- batches ---------------------------------------------------------------------------


async def verified(
    verifier: Verifier, rollouts: Sequence[Rollout], *, at_once: int = 32, done: Callable[[], None] | None = None
) -> list[Verdict]:
    """A verdict a rollout, in their order, at most `at_once` being made at a time; `done` hears of each.

    A rollout that failed is not shown to the verifier: `NOT_VERIFIED`. Raises ValueError for an `at_once` below 1.
    """
    want("verified", "at_once", at_once, at_once >= 1, "at least 1")
    verdicts = [NOT_VERIFIED] * len(rollouts)
    waiting = iter(enumerate(rollouts))

    async def work() -> None:
        for k, rollout in waiting:
            if not rollout.failed:
                verdicts[k] = await verifier(rollout)
            if done is not None:
                done()

    async with trio.open_nursery() as nursery:
        for _ in range(min(at_once, len(rollouts))):
            nursery.start_soon(work)
    return verdicts


def failures(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts have no score, by the kind with which their error begins: `{"judge_unparsed": 2}`."""
    return dict(sorted(Counter(v.error.partition(":")[0] for v in verdicts if v.error).items()))
