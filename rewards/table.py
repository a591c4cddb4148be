"""The verifier of our own tasks: item and row F1 of a handed-in table, in plain Python, for thousands of rollouts.

It agrees with `rewards.widesearch.strict` where every column is scored by exact match. Not here: any markdown
(the workspace has already read the rows), any date or tolerance, any judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from swarm.types import Table, Task

# A row in its comparable form; None stands for a cell that was not written, which equals no gold cell.
Row = tuple[str | None, ...]

_NUMERAL = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d*))?", re.ASCII)


def canonical(cell: str) -> str:
    """The form in which cells are compared: case, space and the writing of numbers do not count.

    " New  York" → "new york", "4,023" → "4023", "07.50" → "7.5", "-0" → "0".
    """
    text = " ".join(cell.split()).casefold()
    return _numeral(text) if text[-1:].isdigit() or text.endswith(".") else text


def table_scores(task: Task, table: Table) -> dict[str, float]:
    """A `TableScore`: item_precision, item_recall, item_f1, row_f1 and success (1.0 or 0.0), each from 0 to 1.

    Rows are matched one to one on the first `task.keys` columns, of equal keys the first row counts; each key
    cell of a matched row is worth 1 and each other cell 1 if equal. Precision is over the cells of the
    distinct rows handed in, recall over those of `task.gold`. Rows are cut or padded to the width; what is
    padded scores 0. Blank rows and the header are skipped.
    """
    gold, found = by_key(task, task.gold), by_key(task, table)
    width = len(task.columns)
    items, rows = _true_positives(gold, found, task.keys)
    precision, recall = _ratio(items, len(found) * width), _ratio(items, len(gold) * width)
    row_f1 = f1(_ratio(rows, len(found)), _ratio(rows, len(gold)))
    return {
        "item_f1": f1(precision, recall),
        "item_precision": precision,
        "item_recall": recall,
        "row_f1": row_f1,
        "success": float(rows == len(found) == len(gold) > 0),
    }


def f1(precision: float, recall: float) -> float:
    """2PR / (P + R), 0 when both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _numeral(text: str) -> str:
    m = _NUMERAL.fullmatch(text)
    if not m:
        return text
    whole = m[2].replace(",", "").lstrip("0") or "0"
    fraction = (m[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if m[1] == "-" and number != "0" else number


def by_key(task: Task, table: Iterable[Sequence[str]]) -> Mapping[Row, Row]:
    """The first row of each key, header and blank rows left out, all rows in canonical form and of the task's width."""
    header = tuple(map(canonical, task.columns))
    width = len(header)
    rows: dict[Row, Row] = {}
    for cells in table:
        row = tuple(map(canonical, cells[:width]))
        if row != header and any(row):
            padded = row + (None,) * (width - len(row))
            rows.setdefault(padded[: task.keys], padded)
    return rows


def _true_positives(gold: Mapping[Row, Row], found: Mapping[Row, Row], keys: int) -> tuple[int, int]:
    """Right cells, and rows right as a whole."""
    items = rows = 0
    for key, row in found.items():
        wanted = gold.get(key)
        if wanted is None:
            continue
        right = sum(a == b for a, b in zip(row[keys:], wanted[keys:], strict=True))
        items += keys + right
        rows += keys + right == len(wanted)
    return items, rows


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
