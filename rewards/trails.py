"""The verifier of deep-search tasks: the share of trails whose value stands in its place.

Not here: tables of many rows (`rewards.table`).
"""

from __future__ import annotations

from rewards.table import canonical
from swarm.types import Table, Task


def trail_scores(task: Task, table: Table) -> dict[str, float]:
    """A `Verifier`: score, the share of right cells, and success (1.0 or 0.0).

    The first row is the answer: whatever follows it gains nothing and costs nothing, so a second guess is of no
    use. Cells are compared place by place in their canonical form (`rewards.table.canonical`). A cell
    beyond the last trail is a wrong one: 3 right of 4 cells for 3 trails score 0.75.
    """
    gold = task.gold[0]
    row = table[0] if table else ()
    right = sum(canonical(a) == canonical(b) for a, b in zip(row, gold, strict=False))
    score = right / max(len(gold), len(row))
    return {"score": score, "success": float(score == 1.0)}
