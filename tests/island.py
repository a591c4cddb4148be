"""A hand-made little world for tests: ten towns on an island, each with its nearest airfield.

Town k has population "1,00k" and latitude "k.50"; its airfield has elevation "20k" and code "Xk".
"""

from __future__ import annotations

from collections.abc import Mapping

from envs.facts import Entity, Fact, Facts, Group
from swarm.types import Table, Task

NAMES = ("Ash", "Birch", "Cedar", "Date", "Elm", "Fir", "Gum", "Hazel", "Ivy", "Juniper")
SUBJECT = "cities in Oak Island"


def island(rows: int = 10) -> Facts:
    """`rows` towns in one list, and a second list of the first three towns."""
    ids = [f"city/{k}" for k in range(rows)]
    titles = [NAMES[k % 10] + " Hill" * (k // 10) for k in range(rows)]
    towns = [
        Entity(
            ids[k],
            "city",
            titles[k],
            (
                Fact("population", f"{1000 + k:,}"),
                Fact("latitude", f"{k}.50"),
                Fact("nearest airport", f"{titles[k]} Field", f"airport/{k}"),
            ),
        )
        for k in range(rows)
    ]
    fields = [
        Entity(
            f"airport/{k}",
            "airport",
            f"{titles[k]} Field",
            (Fact("elevation", str(200 + k)), Fact("code", f"X{k}"), Fact("nearest city", titles[k], ids[k])),
        )
        for k in range(rows)
    ]
    groups = (
        Group(SUBJECT, "city", tuple(ids), "oak"),
        Group("cities in Oak Island North", "city", tuple(ids[:3]), "oak"),
    )
    return Facts({e.id: e for e in towns + fields}, groups)


def item_f1(task: Task, table: Table) -> Mapping[str, float]:
    """Right cells in rows whose key is right, against all cells; each gold row counts once."""
    gold = {row[0]: row for row in task.gold}
    found = {row[0]: row for row in reversed(table)}
    right = sum(a == b for key, row in found.items() if key in gold for a, b in zip(row, gold[key], strict=True))
    cells = len(task.columns) * (len(table) + len(gold))
    return {"item_f1": 2 * right / cells if cells else 0.0}
