"""One evaluated rollout a line, and the plain summaries that the report is made of.

An `Episode` is what remains of a rollout once it is scored: numbers only. Not here: running
anything, and the recorded rollouts themselves (`swarm.records`).
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from rewards.parl import Spawning
from swarm.types import Rollout

T = TypeVar("T")

BANDS: tuple[tuple[str, int, float], ...] = (
    ("1-4", 1, 4),
    ("5-9", 5, 9),
    ("10-24", 10, 24),
    ("25-49", 25, 49),
    ("50-80", 50, 80),
    ("81+", 81, math.inf),
)
"""Table sizes: name, smallest and largest number of rows."""
TARGETS = (0.3, 0.4, 0.5, 0.6, 0.7)
_MEANS = ("item_f1", "row_f1", "success", "critical_steps", "total_steps", "tokens", "tokens_main", "seconds")
_RESAMPLES = 1000


class EpisodesError(ValueError):
    """A line of a file of JSON lines does not read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One system on one task: `Episode("swarm", "airport-12", "airport", rows=52, ..., item_f1=.81, ...)`.

    `sweep`: run for the sweep of budgets, not for the main table. `width`: most subagents at once.
    `assigned` counts every assignment, the `refused` ones included. `tokens`: sampled by all agents
    of the tree, `tokens_main` by the first alone. `failed`: the infrastructure's fault, in no mean.
    `seconds`: wall clock of the first agent.
    """

    system: str
    task: str
    domain: str
    rows: int
    columns: int
    budget: int
    sweep: bool
    item_f1: float
    row_f1: float
    success: float
    critical_steps: int
    total_steps: int
    width: int
    assigned: int
    useful: int
    refused: int
    tokens: int
    tokens_main: int
    status: str
    failed: bool
    seconds: float


def of(
    system: str, rollout: Rollout, scores: Mapping[str, float], spawning: Spawning, budget: int, sweep: bool
) -> Episode:
    """The episode of a scored rollout. `scores` needs item_f1, row_f1 and success unless the rollout failed."""
    known = {"item_f1": 0.0, "row_f1": 0.0, "success": 0.0, **scores} if rollout.failed else scores
    return Episode(
        system=system,
        task=rollout.task.id,
        domain=rollout.task.domain,
        rows=len(rollout.task.gold),
        columns=len(rollout.task.columns),
        budget=budget,
        sweep=sweep,
        item_f1=float(known["item_f1"]),
        row_f1=float(known["row_f1"]),
        success=float(known["success"]),
        critical_steps=rollout.ledger.critical_steps,
        total_steps=rollout.total_steps,
        width=spawning.width,
        assigned=spawning.assigned,
        useful=spawning.useful,
        refused=spawning.refused,
        tokens=_tokens(rollout),
        tokens_main=rollout.ledger.tokens_sampled,
        status=rollout.trace.status,
        failed=rollout.failed,
        seconds=rollout.ledger.seconds,
    )


def _tokens(rollout: Rollout) -> int:
    return rollout.ledger.tokens_sampled + sum(_tokens(c) for c in rollout.children)


# --- files -----------------------------------------------------------------------------


def write(path: Path, episodes: Iterable[Episode]) -> None:
    """Replaces the file as a whole: a crash leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in episodes))
    os.replace(part, path)


def append(path: Path, episodes: Iterable[Episode]) -> None:
    """Adds lines; what a crash left of an unfinished line is cut off first."""
    lines = b"".join(msgspec.json.encode(e) + b"\n" for e in episodes)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(lines)


def read(path: Path) -> list[Episode]:
    """All whole lines of the file. Raises `EpisodesError`; OSError if the file is not there."""
    return json_lines(path, Episode)


def json_lines(path: Path, of_type: type[T]) -> list[T]:
    """Every line as a value of the type; a last line without its end was being written, and is dropped."""
    decoder = msgspec.json.Decoder(of_type)
    out: list[T] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            out.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EpisodesError(f"{path}, line {number}: {error}") from error
    return out


# --- summaries -------------------------------------------------------------------------


def summary(episodes: Iterable[Episode]) -> dict[str, Any]:
    """Means over the episodes that did not fail, None where there are none.

    `spawn_rate`: share of episodes with an accepted spawn; `parallelism`: mean width; `finish_rate`:
    Σ useful / Σ assigned, `spurious_rate` its complement (0 when nothing was assigned);
    `item_f1_ci`: 95 % bootstrap interval over tasks; steps and tokens are an episode's.
    """
    seen = list(episodes)
    good = [e for e in seen if not e.failed]
    assigned, useful = sum(e.assigned for e in good), sum(e.useful for e in good)
    finish = useful / assigned if assigned else 0.0
    return {
        **{name: _mean([float(getattr(e, name)) for e in good]) for name in _MEANS},
        "parallelism": _mean([float(e.width) for e in good]),
        "spawn_rate": _mean([float(e.assigned > e.refused) for e in good]),
        "finish_rate": finish if good else None,
        "spurious_rate": (1.0 - finish if assigned else 0.0) if good else None,
        "item_f1_ci": interval(list(_by_task(good).values())),
        "tasks": len({e.task for e in good}),
        "episodes": len(good),
        "failed": len(seen) - len(good),
    }


def by_rows(episodes: Iterable[Episode]) -> dict[str, dict[str, Any]]:
    """A summary for each band of table sizes that has episodes, from small to large."""
    found: dict[str, list[Episode]] = {name: [] for name, _, _ in BANDS}
    for e in episodes:
        found[next(name for name, lo, hi in BANDS if e.rows <= hi)].append(e)
    return {name: summary(group) for name, group in found.items() if group}


def paired(ours: Iterable[Episode], base: Iterable[Episode]) -> dict[str, Any]:
    """Mean item-F1 of `ours` minus `base` over the tasks that both have, with its 95 % interval."""
    a, b = (_by_task(e for e in group if not e.failed) for group in (ours, base))
    gains = [a[task] - b[task] for task in a if task in b]
    return {"difference": _mean(gains), "ci": interval(gains), "tasks": len(gains)}


def interval(values: Sequence[float], resamples: int = _RESAMPLES) -> list[float] | None:
    """[low, high] of the 95 % percentile bootstrap of the mean; the same values give the same interval."""
    if not values:
        return None
    values_N = np.sort(np.asarray(values, dtype=np.float64))
    draws_RN = np.random.default_rng(0).integers(0, len(values_N), (resamples, len(values_N)))
    low, high = np.percentile(values_N[draws_RN].mean(1), [2.5, 97.5])
    return [float(low), float(high)]


def _by_task(episodes: Iterable[Episode]) -> dict[str, float]:
    """Mean item-F1 a task: tasks, not trials, are the independent draws."""
    scores: dict[str, list[float]] = defaultdict(list)
    for e in episodes:
        scores[e.task].append(e.item_f1)
    return {task: sum(values) / len(values) for task, values in sorted(scores.items())}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- the sweep of budgets --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One budget of a sweep: the mean critical steps that were used, and the mean item-F1."""

    budget: int
    critical_steps: float
    item_f1: float


def sweep_points(episodes: Iterable[Episode]) -> list[Point]:
    """One point a budget, from small to large."""
    groups: dict[int, list[Episode]] = defaultdict(list)
    for e in episodes:
        if not e.failed:
            groups[e.budget].append(e)
    return [
        Point(b, sum(e.critical_steps for e in es) / len(es), sum(e.item_f1 for e in es) / len(es))
        for b, es in sorted(groups.items())
    ]


def steps_at(points: Sequence[Point], target: float) -> float | None:
    """Critical steps at which the running maximum of item-F1, joined by straight lines, meets the target.

    None if no budget reaches it. A target that the smallest budget meets costs that budget's
    steps: an upper bound, so a sweep should begin with a budget that is too small.
    """
    before: tuple[float, float] | None = None
    for steps, f1 in sorted((p.critical_steps, p.item_f1) for p in points):
        if f1 >= target:
            if before is None:
                return steps
            x, y = before
            return x + (steps - x) * (target - y) / (f1 - y)
        before = (steps, f1 if before is None else max(f1, before[1]))
    return None


def steps_to_target(
    episodes_single: Iterable[Episode], episodes_swarm: Iterable[Episode], targets: Sequence[float] = TARGETS
) -> list[dict[str, Any]]:
    """What figure 8 of Kimi K2.5 (arXiv 2602.02276) shows in time, in critical steps.

    For each target the steps of both systems (`steps_at`) and `ratio`, single agent over swarm.
    None where a target is not reached; if only the single agent misses it, its largest mean
    steps stand in as `single_agent_lower_bound`, and `ratio_lower_bound` is made of them.
    """
    single, swarm = sweep_points(episodes_single), sweep_points(episodes_swarm)
    return [_compared(target, single, swarm) for target in targets]


def _compared(target: float, single: Sequence[Point], swarm: Sequence[Point]) -> dict[str, Any]:
    a, b = steps_at(single, target), steps_at(swarm, target)
    row: dict[str, Any] = {"target": target, "single_agent": a, "swarm": b, "ratio": a / b if a and b else None}
    if a is None and b and single:
        most = max(p.critical_steps for p in single)
        row |= {"single_agent_lower_bound": most, "ratio_lower_bound": most / b}
    return row
