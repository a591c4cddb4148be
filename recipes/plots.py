"""The report's pictures, from plain data: the report's dict and the lines of metrics.jsonl.

One colour a system in every picture (Okabe and Ito's palette, which colour-blind readers can
tell apart), with a marker of its own, so that grey print works too. Equal input gives equal
files. Not here: computing what is shown (`recipes.episodes`, `recipes.report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

STYLES: dict[str, tuple[str, str, str]] = {
    "single_agent": ("single agent", "#D55E00", "s"),
    "single_agent_ppo": ("single agent, PPO", "#CC79A7", "D"),
    "cold_start": ("cold start", "#E69F00", "^"),
    "swarm": ("swarm, PARL", "#0072B2", "o"),
    "floor": ("floor (script)", "#999999", "v"),
    "ceiling": ("ceiling (script)", "#009E73", "P"),
}
"""System → its name in pictures and tables, colour and marker."""
_SPARE = (("#56B4E9", "X"), ("#000000", "*"), ("#8C6D1F", "h"), ("#7A68A6", "p"))
INK, _FAINT, DPI = "#222222", "#DDDDDD", 130
SHARE = (0.0, 1.03)  # a hair above 1, so that a line at 1 can be seen
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_HELD_OUT = {"width": "parallelism"}  # the name of the mean, where it is not the rollout's

Metrics = Sequence[Mapping[str, Any]]


def style(system: str, systems: Sequence[str]) -> tuple[str, str, str]:
    """(name, colour, marker) of a system; one that is not known takes the next spare pair."""
    if system in STYLES:
        return STYLES[system]
    others = sorted(s for s in systems if s not in STYLES)
    return (system.replace("_", " "), *_SPARE[others.index(system) % len(_SPARE)])


def draw_all(report: Mapping[str, Any], metrics: Metrics, folder: Path) -> list[str]:
    """Writes every picture that has data, and gives the names of the files: `["overview.png", ...]`."""
    drawn = {
        "overview.png": _overview(report, metrics),
        "learning.png": _learning(metrics),
        "proxies.png": _proxies(metrics),
        "sweep.png": _alone(sweep, report, bool(report["sweep"])),
        "steps_to_target.png": _alone(steps_to_target, report, bool(report["steps_to_target"])),
        "by_rows.png": _by_rows(report),
    }
    for name, figure in drawn.items():
        (folder / name).unlink(missing_ok=True)
        if figure is not None:
            figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
    return [name for name, figure in drawn.items() if figure is not None]


# --- figures ---------------------------------------------------------------------------


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def _alone(draw: Any, report: Mapping[str, Any], data: bool) -> Figure | None:
    if not data:
        return None
    figure, (axis,) = new_figure(1, 1, 7.2, 4.6)
    draw(axis, report)
    return figure


def _overview(report: Mapping[str, Any], metrics: Metrics) -> Figure | None:
    learnt = _phases(metrics)
    if not (learnt or report["systems"]):
        return None
    figure, axes = new_figure(2, 2, 12.0, 8.4)
    learning_overview(axes[0], learnt)
    sweep(axes[1], report)
    steps_to_target(axes[2], report)
    by_size(axes[3], report, "item_f1", "item-F1", "Quality by table size")
    return figure


def _learning(metrics: Metrics) -> Figure | None:
    learnt = _phases(metrics)
    if not learnt:
        return None
    figure, axes = new_figure(2, 3, 14.0, 7.6)
    panels = (
        ("item_f1", "item-F1", "Outcome", SHARE),
        ("critical_steps", "critical steps an episode", "Latency", None),
        ("width", "subagents at once", "How wide", None),
        ("spawn_rate", "share of episodes that spawn", "How often", SHARE),
    )
    for axis, (key, unit, title, limits) in zip(axes, panels, strict=False):
        dress(axis, title, "iteration", unit)
        _curves(axis, learnt, key)
        axis.set_ylim(*(limits or (0.0, None)))
    dress(axes[4], "Does the parallel work count?", "iteration", "share of assignments")
    _named(axes[4], learnt, (("finish_rate", "finished", _GREEN), ("spurious_rate", "spurious", _RED)), "rollout/")
    axes[4].set_ylim(*SHARE)
    dress(axes[5], "Auxiliary rewards fall to 0", "iteration", "weight λ")
    lambdas = (("lambda_parallel", "λ1 · r_parallel", _BLUE), ("lambda_finish", "λ2 · r_finish", _ORANGE))
    _named(axes[5], learnt, lambdas, "reward/")
    axes[5].set_ylim(bottom=0.0)
    return figure


def _proxies(metrics: Metrics) -> Figure | None:
    learnt = _phases(metrics)
    if not learnt:
        return None
    figure, (left, right) = new_figure(1, 2, 12.0, 4.6)
    dress(left, "Proxies beside the truth", "iteration", "share, or item-F1")
    names = (
        ("item_f1", "item-F1 (the truth)", INK),
        ("spawn_rate", "spawn rate", _BLUE),
        ("finish_rate", "finish rate", _GREEN),
        ("spurious_rate", "spurious rate", _RED),
    )
    _named(left, learnt, names, "rollout/")
    left.set_ylim(*SHARE)
    dress(right, "Does width buy quality?", "subagents at once (mean of an iteration)", "item-F1")
    rows = [r for rows in learnt.values() for r in rows if "rollout/width" in r]
    x, y = [r["rollout/width"] for r in rows], [r["rollout/item_f1"] for r in rows]
    dots = right.scatter(x, y, c=[r["iteration"] for r in rows], cmap="cividis", s=36, edgecolors="white")
    figure.colorbar(dots, ax=right, label="iteration")
    return figure


def _by_rows(report: Mapping[str, Any]) -> Figure | None:
    if not report["by_rows"]:
        return None
    figure, (left, right) = new_figure(1, 2, 12.0, 4.6)
    by_size(left, report, "item_f1", "item-F1", "Quality by table size")
    by_size(right, report, "critical_steps", "critical steps an episode", "Latency by table size")
    return figure


# --- panels ----------------------------------------------------------------------------


def learning_overview(axis: Axes, learnt: Mapping[str, Metrics]) -> None:
    """Item-F1 and the share of episodes that spawn, over the iterations."""
    dress(axis, "Learning", "iteration", "share, or item-F1")
    names = (("item_f1", "item-F1", INK), ("spawn_rate", "episodes that spawn", _BLUE))
    _named(axis, learnt, (*names, ("spurious_rate", "spurious assignments", _RED)), "rollout/")
    axis.set_ylim(*SHARE)


def sweep(axis: Axes, report: Mapping[str, Any]) -> None:
    """Mean item-F1 against the mean critical steps used, a line a system, a dot a budget."""
    dress(axis, "Quality for the steps spent (wide tables)", "critical steps an episode (log)", "item-F1")
    axis.set_xscale("log", base=2)
    for system, points in report["sweep"].items():
        name, colour, marker = style(system, list(report["sweep"]))
        points = sorted(points, key=lambda p: p["critical_steps"])
        x, y = [p["critical_steps"] for p in points], [p["item_f1"] for p in points]
        axis.plot(x, y, color=colour, marker=marker, label=name, linewidth=2, markersize=6)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_ylim(*SHARE)
    legend(axis)


def steps_to_target(axis: Axes, report: Mapping[str, Any]) -> None:
    """Critical steps to a mean item-F1, single agent and swarm, with the ratio above: K2.5's figure 8."""
    dress(axis, "Critical steps to reach a quality", "target item-F1", "critical steps (log)")
    rows = report["steps_to_target"]
    for offset, system in ((-0.18, "single_agent"), (0.18, "swarm")):
        name, colour, _ = style(system, [])
        seen = [(i, r[system]) for i, r in enumerate(rows) if r[system] is not None]
        axis.bar([0], [0], color=colour, label=name)  # the legend's, also where no bar is whole
        axis.bar([i + offset for i, _ in seen], [v for _, v in seen], 0.34, color=colour)
        bound = [(i, r[f"{system}_lower_bound"]) for i, r in enumerate(rows) if f"{system}_lower_bound" in r]
        axis.bar(
            [i + offset for i, _ in bound], [v for _, v in bound], 0.34, color="white", edgecolor=colour, hatch="///"
        )
    for i, row in enumerate(rows):
        _ratio(axis, i, row)
    axis.set_xticks(range(len(rows)), [f"{100 * r['target']:.0f} %" for r in rows])
    if has_bars(axis):
        axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.margins(y=0.2)
    if any("ratio_lower_bound" in r for r in rows):
        axis.bar([0], [0], color="white", edgecolor=INK, hatch="///", label="target not reached")
    legend(axis, above=True)


def _ratio(axis: Axes, i: int, row: Mapping[str, Any]) -> None:
    tops = [row.get(k) for k in ("single_agent", "swarm", "single_agent_lower_bound")]
    text = "not reached" if row["swarm"] is None else ""
    if row["ratio"] is not None:
        text = f"{row['ratio']:.1f}×"
    elif "ratio_lower_bound" in row:
        text = f"> {row['ratio_lower_bound']:.1f}×"
    top = max((t for t in tops if t), default=1.0)
    axis.annotate(text, (i, top), (0, 4), textcoords="offset points", ha="center", weight="bold", color=INK)


def by_size(axis: Axes, report: Mapping[str, Any], key: str, unit: str, title: str) -> None:
    """One summary value for each band of table sizes, a line a system; item-F1 with its 95 % interval."""
    dress(axis, title, "rows of the wanted table", unit)
    bands = list(report["by_rows"])
    systems = list(report["systems"])
    for k, system in enumerate(systems):
        name, colour, marker = style(system, systems)
        seen = [(i, report["by_rows"][b].get(system)) for i, b in enumerate(bands)]
        good = [(i, s) for i, s in seen if s and s[key] is not None]
        x = [i + 0.05 * (k - (len(systems) - 1) / 2) for i, _ in good]
        y = [s[key] for _, s in good]
        axis.plot(x, y, color=colour, marker=marker, label=name, linewidth=1.8, markersize=6)
        if key == "item_f1":
            low, high = zip(*(s["item_f1_ci"] for _, s in good), strict=True) if good else ((), ())
            axis.vlines(x, low, high, color=colour, linewidth=1.4, alpha=0.6)
    axis.set_xticks(range(len(bands)), [b.replace("-", "–") for b in bands])
    axis.set_ylim(*(SHARE if key == "item_f1" else (0.0, None)))
    legend(axis)


# --- curves ----------------------------------------------------------------------------


def _phases(metrics: Metrics) -> dict[str, Metrics]:
    """The lines with rollouts, by phase; the critic's warm-up belongs to no curve of the policy."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in metrics:
        if "rollout/item_f1" in row and "iteration" in row:
            found.setdefault(str(row.get("phase", "")), []).append(row)
    return dict(found)


def _phase_style(phase: str, k: int) -> tuple[str, str]:
    if "single" in phase:
        return STYLES["single_agent_ppo"][0], STYLES["single_agent_ppo"][1]
    return phase, STYLES["swarm"][1] if k == 0 else _SPARE[k % len(_SPARE)][0]


def _curves(axis: Axes, learnt: Mapping[str, Metrics], key: str) -> None:
    """A metric of the rollouts, a line a phase; held-out evaluations as dots in the same colour."""
    for k, (phase, rows) in enumerate(learnt.items()):
        name, colour = _phase_style(phase, k)
        x, y = column(rows, f"rollout/{key}")
        axis.plot(x, y, color=colour, linewidth=0.9, alpha=0.35)
        axis.plot(x, smooth(y), color=colour, linewidth=2, label=f"{name} (training tasks)")
        x, y = column(rows, f"eval/{_HELD_OUT.get(key, key)}")
        if x:
            axis.plot(x, y, color=colour, marker="o", linestyle="none", label=f"{name} (held-out)")
    legend(axis)


def _named(axis: Axes, learnt: Mapping[str, Metrics], names: Sequence[tuple[str, str, str]], prefix: str) -> None:
    """Several metrics of the first phase that has them, a colour each."""
    rows = next(iter(learnt.values()), [])
    for k, (key, name, colour) in enumerate(names):
        x, y = column(rows, prefix + key)
        axis.plot(x, y, color=colour, linewidth=0.9, alpha=0.35)
        line = smooth(y) if prefix == "rollout/" else y
        dashes = "-" if k == 0 or prefix == "rollout/" else (0, (4, 4))  # the λ often lie on each other
        axis.plot(x, line, color=colour, linewidth=2, linestyle=dashes, label=name)
    legend(axis)


def column(rows: Metrics, key: str) -> tuple[list[float], list[float]]:
    seen = [(r["iteration"], r[key]) for r in rows if r.get(key) is not None]
    return [x for x, _ in seen], [y for _, y in seen]


def smooth(values: Sequence[float], reach: int = 2) -> list[float]:
    """A centred running mean over 2·reach + 1 values, over fewer at the ends."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def dress(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axis.set_xlabel(x, color=INK)
    axis.set_ylabel(y, color=INK)
    axis.grid(color=_FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def has_bars(axis: Axes) -> bool:
    """Whether a bar is drawn that one can see: a logarithmic axis needs one."""
    return any(isinstance(p, Rectangle) and p.get_height() > 0 for p in axis.patches)


def legend(axis: Axes, *, above: bool = False) -> None:
    """A legend where there is room; `above` the bars, in one line, where there is none among them."""
    if above and has_bars(axis):
        axis.set_ylim(top=2 * axis.get_ylim()[1])
        axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper left")
    elif axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9)
    else:
        axis.annotate("no data", (0.5, 0.5), xycoords="axes fraction", ha="center", color="#888888")
