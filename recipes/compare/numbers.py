"""What several seeds of a recipe show together: spreads, gains by task, steps to a quality, ablations.

The single agent here is one that had the same PPO as the swarm (`single_agent_ppo`); `single_agent` stays what
the swarm's training began with, without subagents. Not here: reading run folders (`recipes.compare.command`), and the
means of one run (`recipes.episodes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from recipes.episodes import Episode, paired, steps_to_target, summary, sweep_points
from recipes.report import WIDE, ReportError, build, ordered

CURES = (("serial_collapse", "serial_collapse_parl", "collapsed"), ("spurious", "spurious_finish", "spurious"))
"""(failing group, cured group, the failure)."""
K25_RATIOS = (3.0, 3.0, 3.2, 3.7, 4.5)
"""Time of the single agent over the swarm's at 30 to 70 % item-F1, Kimi K2.5 (arXiv 2602.02276), figure 8."""
WANTED_GAIN = 0.063
"""Item-F1 of the swarm minus the single agent's on wide tables that a run should reach."""
ROUNDING = 1e-9
"""Sums of floats may miss a wanted number by this much."""
SMALL = 4
"""Rows up to which a table counts as small."""
SIZES: tuple[tuple[str, int, float], ...] = (("all", 1, math.inf), ("wide", WIDE, math.inf), ("small", 1, SMALL))
COLLAPSED, SPURIOUS, ENDS = 0.05, 0.5, 5
"""Spawn rate below which a policy has collapsed, spurious rate above which its spawning is spurious, and the
number of iterations at either end of training that both are read from."""
CURVES = ("item_f1", "spawn_rate", "width", "critical_steps", "finish_rate", "spurious_rate")
CLOSING = ("item_f1", "spawn_rate", "parallelism", "critical_steps", "finish_rate", "spurious_rate")

Bound = Literal["exact", "at_least", "at_most"]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run folder, read: `load(Path("runs/wide_search-1"))`."""

    path: Path
    recipe: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    episodes: Sequence[Episode]
    summary: Mapping[str, Any]


# --- swarm against single agent --------------------------------------------------------


def headline(swarm: Sequence[Run], single: Sequence[Run]) -> dict[str, Any]:
    """The swarm's runs beside the single agent's; a pair is two runs of one seed."""
    by_seed = {run.recipe["seed"]: _renamed(run) for run in single}
    pairs = [(run, by_seed[run.recipe["seed"]]) for run in swarm if run.recipe["seed"] in by_seed]
    if single and not pairs:
        raise ReportError("groups swarm and single_agent: no seed in common, want runs of the same seeds")
    others = list(by_seed.values())
    seeds = sorted({run.recipe["seed"] for run in (*swarm, *others)})
    reports = {s: build([e for r in (*swarm, *others) if r.recipe["seed"] == s for e in r.episodes], {}) for s in seeds}
    pooled = build([e for r in (*swarm, *others) for e in r.episodes], {})
    opponents = {"single_agent_ppo": pairs, "single_agent": [(run, run) for run in swarm]}
    opponents = {name: found for name, found in opponents.items() if found}
    return {
        "seeds": seeds,
        "pairs": [run.recipe["seed"] for run, _ in pairs],
        "systems": {s: _over_seeds(s, reports) for s in ordered(pooled["systems"])},
        "by_rows": pooled["by_rows"],
        "gain": {name: {size: _gain(name, found, *at) for size, *at in SIZES} for name, found in opponents.items()},
        "steps_to_target": {name: _targets(name, found) for name, found in opponents.items()},
        "sweep": pooled["sweep"],
        "sweep_seeds": {str(s): report["sweep"] for s, report in reports.items()},
    }


def _renamed(run: Run) -> Run:
    """A single agent's run under the name that it has beside the swarm's; its scripts are left to the swarm's runs."""
    mine = [replace(e, system="single_agent_ppo") for e in run.episodes if e.system == "single_agent"]
    return replace(run, episodes=mine)


def _over_seeds(system: str, reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    found = {seed: r["systems"][system] for seed, r in reports.items() if system in r["systems"]}
    numbers = [k for k in next(iter(found.values())) if k != "item_f1_ci"]
    return {"seeds": list(found), **{k: spread([values[k] for values in found.values()]) for k in numbers}}


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Over seeds: mean, standard error (None of one value), smallest, largest; all None if a seed has no value."""
    known = [float(v) for v in values if v is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "se": None, "low": None, "high": None, "values": list(values)}
    n, mean = len(known), sum(known) / len(known)
    se = math.sqrt(sum((v - mean) ** 2 for v in known) / (n - 1) / n) if n > 1 else None
    return {"mean": mean, "se": se, "low": min(known), "high": max(known), "values": known}


def _gain(opponent: str, pairs: Sequence[tuple[Run, Run]], low: float, high: float) -> dict[str, Any]:
    """Item-F1 of the swarm minus the opponent's on tables of `low` to `high` rows, by task; `ci` is over tasks."""

    def pick(run: Run, system: str) -> list[Episode]:
        return [e for e in run.episodes if e.system == system and not e.sweep and low <= e.rows <= high]

    ours, base = [pick(a, "swarm") for a, _ in pairs], [pick(b, opponent) for _, b in pairs]
    each = [paired(a, b)["difference"] for a, b in zip(ours, base, strict=True)]
    pooled = paired((e for es in ours for e in es), (e for es in base for e in es))
    return {**spread(each), "ci": pooled["ci"], "tasks": pooled["tasks"]}


# --- steps to a quality ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A number that may only be known to be at least or at most `value`; None: not known at all."""

    value: float | None
    bound: Bound = "exact"


def _targets(opponent: str, pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, Any]]:
    """For each target the steps and ratios of every pair of runs, their means, and K2.5's ratio."""
    tables = [_pair_targets(_swept(base, opponent), _swept(ours, "swarm")) for ours, base in pairs]
    out: list[dict[str, Any]] = []
    for k25, rows in zip(K25_RATIOS, zip(*tables, strict=True), strict=True):
        means = {name: mean_of([row[name] for row in rows]) for name in ("single_agent", "swarm", "ratio")}
        ratio = means["ratio"]
        out.append(
            {
                "target": rows[0]["target"],
                **{name: asdict(m) for name, m in means.items()},
                "k25": k25,
                "met": ratio.value is not None and ratio.bound != "at_most" and ratio.value >= k25 - ROUNDING,
                "seeds": [
                    {"seed": ours.recipe["seed"], **{k: asdict(row[k]) for k in means}}
                    for (ours, _), row in zip(pairs, rows, strict=True)
                ],
            }
        )
    return out


def _swept(run: Run, system: str) -> list[Episode]:
    return [e for e in run.episodes if e.system == system and e.sweep]


def _pair_targets(single: Sequence[Episode], swarm: Sequence[Episode]) -> list[dict[str, Any]]:
    """`steps_to_target` of one pair, each number with what is known of it."""
    first_single, first_swarm = _smallest(single), _smallest(swarm)
    out: list[dict[str, Any]] = []
    for row in steps_to_target(single, swarm):
        a = _steps(row["single_agent"], row.get("single_agent_lower_bound"), first_single)
        b = _steps(row["swarm"], None, first_swarm)
        out.append({"target": row["target"], "single_agent": a, "swarm": b, "ratio": ratio_of(a, b)})
    return out


def _smallest(episodes: Sequence[Episode]) -> float | None:
    """Mean steps at the sweep's smallest point."""
    return min((p.critical_steps for p in sweep_points(episodes)), default=None)


def _steps(value: float | None, lower: float | None, first: float | None) -> Measured:
    """A target that the sweep's first point meets may be met by fewer steps."""
    if value is None:
        return Measured(lower, "at_least") if lower is not None else Measured(None)
    return Measured(value, "at_most" if value == first else "exact")


def ratio_of(single: Measured, swarm: Measured) -> Measured:
    """How many times the swarm's steps the single agent needs. Two upper bounds say nothing of it."""
    if single.value is None or not swarm.value or (single.bound == swarm.bound == "at_most"):
        return Measured(None)
    return Measured(single.value / swarm.value, "at_least" if swarm.bound == "at_most" else single.bound)


def mean_of(measured: Sequence[Measured]) -> Measured:
    """The mean, a bound if any of them is; None if one is not known, or the bounds point to both sides."""
    values = [m.value for m in measured if m.value is not None]
    bounds: list[Bound] = sorted({m.bound for m in measured if m.bound != "exact"})
    if not values or len(values) < len(measured) or len(bounds) > 1:
        return Measured(None)
    return Measured(sum(values) / len(values), bounds[0] if bounds else "exact")


# --- ablations -------------------------------------------------------------------------


def ablation(runs: Sequence[Run]) -> dict[str, Any]:
    """First and last iterations of training, the closing evaluation, and in how many seeds what went wrong."""
    spawn = [_end(run, "spawn_rate", last=True) for run in runs]
    spurious_rates = [_end(run, "spurious_rate", last=True) for run in runs]
    closing = [summary(e for e in run.episodes if e.system == "swarm" and not e.sweep) for run in runs]
    alone = [summary(e for e in run.episodes if e.system == "single_agent" and not e.sweep) for run in runs]
    return {
        "seeds": [run.recipe["seed"] for run in runs],
        "first": {k: spread([_end(run, k, last=False) for run in runs]) for k in CURVES},
        "last": {k: spread([_end(run, k, last=True) for run in runs]) for k in CURVES},
        "held_out": {k: spread([s[k] for s in closing]) for k in CLOSING},
        "held_out_alone": {"item_f1": spread([s["item_f1"] for s in alone])},
        "collapsed": sum(rate < COLLAPSED for rate in spawn),
        "spurious": sum(s > SPURIOUS and p >= COLLAPSED for s, p in zip(spurious_rates, spawn, strict=True)),
    }


def _end(run: Run, key: str, *, last: bool) -> float:
    """Mean of a rollout metric over the first or the last iterations."""
    rows = run.metrics[-ENDS:] if last else run.metrics[:ENDS]
    return sum(float(row[f"rollout/{key}"]) for row in rows) / len(rows)


def cure(ablations: Mapping[str, Any], failing: str, cured: str, failure: str) -> dict[str, Any]:
    """`met`: every seed of the one group fails, none of the other does."""
    a, b = ablations[failing], ablations[cured]
    met = a[failure] == len(a["seeds"]) and b[failure] == 0
    return {"failing": failing, "cured": cured, "failure": failure, "met": met}
