"""The WideSearch scorers on our own tasks: every column scored by exact match, keys as the task has them.

Not here: the benchmark's own instances (`rewards.widesearch.dataset`), whose columns have pipelines of their own.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import lru_cache
from io import StringIO
from typing import Any

from rewards.table import canonical
from rewards.widesearch.spec import Scores, column_name
from swarm.types import Table, Task
from swarm.verdicts import TableScore

_EXACT = {"preprocess": ["norm_str"], "metric": ["exact_match"], "criterion": None}

Scorer = Callable[[str, dict[str, Any], str], Scores]
"""`score_official` or `score_strict`: the text of a gold file, an evaluation, a response."""


def widesearch_scores(score: Scorer) -> TableScore:
    """A `TableScore` of the seven values of a scorer, by their names: score, f1_by_item, f1_by_row, …"""

    def scores(task: Task, table: Table) -> dict[str, float]:
        gold_csv, evaluation = _gold(task.columns, task.gold, task.keys)
        return score(gold_csv, evaluation, markdown(task.columns, table)).as_json()

    return scores


def markdown(columns: tuple[str, ...], table: Table) -> str:
    """A table as it would be answered, its header once; nothing where there are no rows."""
    header = tuple(map(canonical, columns))
    rows = [row for row in table if tuple(map(canonical, row)) != header]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (columns, ("---",) * len(columns), *rows)]
    return "\n".join(["```markdown", *(f"| {line} |" for line in lines), "```"]) if rows else ""


@lru_cache(maxsize=1024)
def _gold(columns: tuple[str, ...], gold: Table, keys: int) -> tuple[str, dict[str, Any]]:
    names = [column_name(name) for name in columns]
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *gold])
    pipelines = {name: _EXACT for name in names}
    return text.getvalue(), {"required": names, "unique_columns": names[:keys], "eval_pipeline": pipelines}
