"""The verifier of deep-search tasks: the share of trails whose value stands beside their letter.

Not here: tables of many columns (`rewards.table`).
"""

from __future__ import annotations

from rewards.table import canonical
from swarm.types import Table, Task


def trail_scores(task: Task, table: Table) -> dict[str, float]:
    """A `TableScore`: score, the share of trails whose row is right, and success (1.0 or 0.0).

    The first row of a letter is its answer: a second guess gains nothing and costs nothing. Values are compared in
    their canonical form (`rewards.table.canonical`). A row for a letter that no trail has is a wrong one: 3 right
    of 4 letters for 3 trails score 0.75; so is one that has more than a letter and a value.
    """
    rows: dict[str, tuple[str, ...]] = {}
    for letter, *cells in filter(None, table):
        rows.setdefault(canonical(letter), tuple(map(canonical, cells)))
    gold = {canonical(letter): (canonical(value),) for letter, value in task.gold}
    score = sum(rows.get(letter) == value for letter, value in gold.items()) / len(rows.keys() | gold.keys())
    return {"score": score, "success": float(score == 1.0)}
