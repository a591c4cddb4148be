"""What a study of compaction shows: means of each system with intervals, differences by task, learning curves.

    truncation, untrained, full_window   the weights that training starts from; intervals over tasks
    chained, copied, decayed             trained, several seeds each; intervals over seeds

Not here: reading folders and the page (`recipes.compaction.report`), and running anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from scipy.special import stdtrit

from recipes.compaction.episodes import TrailEpisode
from recipes.episodes import interval

Metrics = Sequence[Mapping[str, Any]]
Group = Mapping[int, Sequence[TrailEpisode]]
"""Seed → the episodes of its run."""

FORMS = ("chained", "copied", "decayed")
"""Forms of the advantage that a study may train with."""
START: tuple[Literal["truncation", "untrained", "full_window"], ...] = ("truncation", "untrained", "full_window")
"""The systems that are not trained: the weights that training starts from."""
ORDER = ("truncation", "untrained", *FORMS, "full_window")
"""The systems in the order of every table."""
KEYS = ("score", "success", "compactions", "steps", "tokens", "transcript")
"""The means of an episode that are reported."""
CURVES = ("score", "success", "compactions", "summary_tokens", "critical_steps")
"""Metrics of the training rollouts."""
BANDS: tuple[tuple[str, float], ...] = (
    ("0", 0),
    ("1-4", 4),
    ("5-8", 8),
    ("9-12", 12),
    ("13-16", 16),
    ("17+", math.inf),
)
"""How often a context was rewritten: name, largest number."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run of a study: `Finished("chained", 0, episodes, metrics, 412.0)`; seconds of wall clock."""

    form: str
    seed: int
    episodes: Sequence[TrailEpisode]
    metrics: Metrics
    seconds: float | None


def build(start: Sequence[TrailEpisode], runs: Sequence[Finished], missing: Sequence[str] = ()) -> dict[str, Any]:
    """The content of report.json.

    `start`: the episodes of the systems that are not trained, by their `system`; `missing`: what the study still
    wants, in words.
    """
    untrained = _by_system(start)
    trained: dict[str, Group] = {}
    for form in FORMS:
        if group := {r.seed: r.episodes for r in runs if r.form == form}:
            trained[form] = group
    groups: dict[str, Group] = {**{s: {-1: found} for s, found in untrained.items()}, **trained}
    groups = {s: groups[s] for s in ORDER if s in groups}
    base = untrained.get("untrained", [])
    compared = {s: g for s, g in groups.items() if s != "untrained" and base}
    return {
        "study": "compaction",
        "systems": {s: of_seeds(g) if s in trained else of_tasks(g[-1]) for s, g in groups.items()},
        "minus_untrained": {s: difference(g, {seed: base for seed in g}) for s, g in compared.items()},
        "between_forms": {f"{a}_minus_{b}": difference(trained[a], trained[b]) for a, b in combinations(trained, 2)},
        "by_trails": _banded(groups, lambda e: f"{e.trails:d}"),
        "by_compactions": _banded(groups, _band),
        "learning": {form: learning([r.metrics for r in runs if r.form == form]) for form in trained},
        "wall_seconds": {f"{r.form}-{r.seed}": r.seconds for r in runs},
        "missing": list(missing),
    }


def _by_system(episodes: Iterable[TrailEpisode]) -> dict[str, Sequence[TrailEpisode]]:
    found: dict[str, list[TrailEpisode]] = defaultdict(list)
    for e in episodes:
        found[e.system].append(e)
    return dict(found)


# --- systems ---------------------------------------------------------------------------


def of_tasks(episodes: Sequence[TrailEpisode]) -> dict[str, Any]:
    """A system without training: means over tasks, `ci` the 95 % bootstrap over tasks, None without episodes."""
    by_task = [_by_task(episodes, key) for key in KEYS]
    cells = [_cell([_mean(found.values())], interval(list(found.values()))) for found in by_task]
    return {"trained": False, "seeds": [], "ci_over": "tasks", **_counts([episodes])} | dict(
        zip(KEYS, cells, strict=True)
    )


def of_seeds(group: Group) -> dict[str, Any]:
    """A trained system: the mean over seeds of each seed's mean over tasks, with the smallest and largest of them.

    `ci` is the 95 % t interval over seeds; of one seed, which has none, the bootstrap over tasks, and `ci_over`
    says so.
    """
    cells: dict[str, Any] = {}
    for key in KEYS:
        by_seed = [_by_task(episodes, key) for episodes in group.values()]
        values = [_mean(found.values()) for found in by_seed]
        over_tasks = interval(list(_by_task(_pooled(group), key).values()))
        cells[key] = _cell(values, t_interval(values) if len(group) > 1 else over_tasks) | {"ci_tasks": over_tasks}
    over = "seeds" if len(group) > 1 else "tasks"
    return {"trained": True, "seeds": list(group), "ci_over": over, **_counts(group.values()), **cells}


def _cell(values: Sequence[float | None], ci: list[float] | None) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    whole = len(known) == len(values)
    return {
        "mean": _mean(known) if whole else None,
        "ci": ci if whole else None,
        "min": min(known, default=None),
        "max": max(known, default=None),
        "values": list(values),
    }


def _counts(groups: Iterable[Sequence[TrailEpisode]]) -> dict[str, Any]:
    episodes = [e for group in groups for e in group]
    good = [e for e in episodes if not e.failed]
    return {"tasks": len({e.task for e in good}), "episodes": len(good), "failed": len(episodes) - len(good)}


def t_interval(values: Sequence[float | None]) -> list[float] | None:
    """[low, high] = mean ± t(n−1, 0.975)·s/√n, Student's 95 % interval; None for fewer than two values, or a gap."""
    known = [v for v in values if v is not None]
    n = len(known)
    if n < 2 or n < len(values):
        return None
    mean = sum(known) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in known) / (n - 1))
    reach = float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n)
    return [mean - reach, mean + reach]


# --- differences -----------------------------------------------------------------------


def difference(ours: Group, base: Group) -> dict[str, Any]:
    """Score of `ours` minus `base` by task, over the seeds and tasks that both have.

    `ci`: 95 % bootstrap over tasks of the differences, each a mean over seeds; `values`: a difference a seed;
    `ci_seeds`: their t interval; `clear`: all of these lie on one side of 0. `difference` is None where nothing is
    in common.
    """
    seeds = [s for s in ours if s in base]
    by_seed = [_gains(ours[s], base[s]) for s in seeds]
    by_task = defaultdict[str, list[float]](list)
    for gains in by_seed:
        for task, gain in gains.items():
            by_task[task].append(gain)
    gains = [sum(found) / len(found) for _, found in sorted(by_task.items())]
    values = [_mean(found.values()) for found in by_seed]
    ci, ci_seeds = interval(gains), t_interval(values)
    return {
        "difference": _mean(gains),
        "ci": ci,
        "tasks": len(gains),
        "seeds": [s for s in seeds if s >= 0],
        "values": values,
        "ci_seeds": ci_seeds,
        "clear": _one_side([*(ci or [0.0]), *(ci_seeds or []), *(v or 0.0 for v in values)]),
    }


def _gains(ours: Sequence[TrailEpisode], base: Sequence[TrailEpisode]) -> dict[str, float]:
    a, b = _by_task(ours, "score"), _by_task(base, "score")
    return {task: score - b[task] for task, score in a.items() if task in b}


def _one_side(values: Sequence[float]) -> bool:
    return all(v > 0 for v in values) or all(v < 0 for v in values)


# --- where it matters ------------------------------------------------------------------


def _banded(groups: Mapping[str, Group], band: Callable[[TrailEpisode], str]) -> dict[str, dict[str, Any]]:
    """Band → system → mean score of its episodes, 95 % bootstrap over tasks, and how many episodes there are."""
    found: dict[str, dict[str, list[TrailEpisode]]] = defaultdict(lambda: defaultdict(list))
    for system, group in groups.items():
        for e in _pooled(group):
            if not e.failed:
                found[band(e)][system].append(e)
    names = sorted(found, key=lambda name: int(name.split("-")[0].rstrip("+")))
    return {name: {s: _banded_cell(es) for s, es in found[name].items()} for name in names}


def _banded_cell(episodes: Sequence[TrailEpisode]) -> dict[str, Any]:
    scores = list(_by_task(episodes, "score").values())
    return {"score": _mean(scores), "ci": interval(scores), "episodes": len(episodes)}


def _band(e: TrailEpisode) -> str:
    return next(name for name, most in BANDS if e.compactions <= most)


def _pooled(group: Group) -> list[TrailEpisode]:
    return [e for episodes in group.values() for e in episodes]


def _by_task(episodes: Iterable[TrailEpisode], key: str) -> dict[str, float]:
    """Mean a task, of the episodes that did not fail: tasks, not trials, are the independent draws."""
    found: dict[str, list[float]] = defaultdict(list)
    for e in episodes:
        if not e.failed:
            found[e.task].append(float(getattr(e, key)))
    return {task: sum(values) / len(values) for task, values in sorted(found.items())}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


# --- learning --------------------------------------------------------------------------


def learning(seeds: Sequence[Metrics]) -> dict[str, Any]:
    """Key → its curve over the iterations that all seeds have: the mean over seeds, the smallest, the largest.

    The training rollouts' keys are those of `CURVES`; `held_out` is the score of the short evaluations.
    """
    names = {key: f"rollout/{key}" for key in CURVES} | {"held_out": "eval/score"}
    return {key: curve([_column(rows, name) for rows in seeds]) for key, name in names.items()}


def curve(seeds: Sequence[Mapping[int, float]]) -> dict[str, list[Any]]:
    """`[{1: .1, 2: .3}, {1: .3}]` → `{"iteration": [1], "mean": [.2], "low": [.1], "high": [.3]}`."""
    common = sorted(set[int]().union(*seeds).intersection(*seeds)) if seeds else []
    columns = [[found[i] for found in seeds] for i in common]
    return {
        "iteration": common,
        "mean": [sum(values) / len(values) for values in columns],
        "low": [min(values) for values in columns],
        "high": [max(values) for values in columns],
    }


def _column(rows: Metrics, name: str) -> dict[int, float]:
    return {int(r["iteration"]): float(r[name]) for r in rows if r.get(name) is not None and "iteration" in r}
