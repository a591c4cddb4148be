"""The numbers of a swap matrix: means of every cell, and what each cast changes, task by task, with intervals.

Not here: running the cells (`recipes.swap.matrix`), and showing them (`recipes.swap.report`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.episodes import Episode, interval, summary
from recipes.swap.matrix import OWN, Cell


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of an episode, None where it has none; `better` is 1 where more is better, -1 where less is."""

    name: str
    words: str
    form: str
    better: int
    of: Callable[[Episode], float | None]


def _finished(e: Episode) -> float | None:
    return e.useful / e.assigned if e.assigned else None


MEASURES = (
    Measure("item_f1", "item-F1", ".3f", 1, lambda e: e.item_f1),
    Measure("finish_rate", "finish rate", ".2f", 1, _finished),
    Measure("critical_steps", "critical steps", ".1f", -1, lambda e: float(e.critical_steps)),
    Measure("tokens", "tokens", ".0f", -1, lambda e: float(e.tokens)),
    Measure("seconds", "seconds", ".2f", -1, lambda e: e.seconds),
)


def matrix(cells: Sequence[Cell], found: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """`{"orchestrators": {name: sha256}, "casts": {name: {role: [...]}}, "cells": [...]}`, a cell a pair of names.

    A cell has `means` (`recipes.episodes.summary`) and, for each measure, its `difference` to the run's own cast
    under the same orchestrator: mean over the tasks that both have, 95 % bootstrap interval, and whether it is worse
    or better beyond that.
    """
    base = {c.orchestrator: e for c, e in zip(cells, found, strict=True) if c.name == OWN}
    return {
        "orchestrators": {c.orchestrator: {"path": str(c.policy.path), "sha256": c.policy.sha256} for c in cells},
        "casts": {c.name: _cast(c) for c in cells},
        "cells": [
            {
                "orchestrator": c.orchestrator,
                "cast": c.name,
                "means": summary(mine),
                "difference": {m.name: difference(mine, base[c.orchestrator], m) for m in MEASURES},
            }
            for c, mine in zip(cells, found, strict=True)
        ],
    }


def difference(mine: Sequence[Episode], base: Sequence[Episode], m: Measure) -> dict[str, Any]:
    """Mean of mine minus base over the tasks that have the number in both: `{"mean", "ci", "tasks", "verdict"}`."""
    a, b = _by_task(mine, m), _by_task(base, m)
    gains = [a[task] - b[task] for task in sorted(a.keys() & b.keys())]
    ci = interval(gains)
    verdict = ""
    if ci is not None:
        low, high = sorted(m.better * x for x in ci)
        verdict = "worse" if high < 0 else "better" if low > 0 else ""
    return {"mean": sum(gains) / len(gains) if gains else None, "ci": ci, "tasks": len(gains), "verdict": verdict}


def _by_task(episodes: Sequence[Episode], m: Measure) -> dict[str, float]:
    """Means over the trials of a task: tasks are the independent draws."""
    values: dict[str, list[float]] = defaultdict(list)
    for e in episodes:
        value = None if e.failed else m.of(e)
        if value is not None:
            values[e.task].append(value)
    return {task: sum(v) / len(v) for task, v in values.items()}


def _cast(cell: Cell) -> Mapping[str, Any]:
    return {
        role: [{"path": str(ref.path), "sha256": ref.sha256, "weight": weight} for ref, weight in mixture]
        for role, mixture in cell.cast.items()
    }
