"""The pictures of a comparison, from plain data: results.json and the metrics of the runs.

Colours, markers and panels are those of `recipes.plots`; a strong line is a mean over seeds, a faint one a
seed. Equal input gives equal files. Not here: computing what is shown (`recipes.compare.numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from recipes import plots
from recipes.compare.words import GROUP_NAMES, bounded_words, opponent_of
from recipes.plots import DPI, INK, SHARE, STYLES, Metrics, column, dress, legend, new_figure, smooth

Curves = Mapping[str, Sequence[Metrics]]
"""Group → the lines of metrics of each of its seeds."""
_COLOURS: Mapping[str, str] = {
    "swarm": STYLES["swarm"][1],
    "single_agent": STYLES["single_agent_ppo"][1],
    "serial_collapse": STYLES["single_agent"][1],
    "serial_collapse_parl": STYLES["swarm"][1],
    "spurious": STYLES["single_agent"][1],
    "spurious_finish": STYLES["swarm"][1],
}
_MAIN = ("single_agent", "swarm")
_PANELS: Mapping[str, tuple[str, str, tuple[float, float | None]]] = {
    "item_f1": ("Item-F1", "item-F1", SHARE),
    "critical_steps": ("Critical steps", "critical steps an episode", (0.0, None)),
    "width": ("Width", "subagents at once", (0.0, None)),
    "spawn_rate": ("Spawn rate", "share of episodes that spawn", SHARE),
    "finish_rate": ("Finish rate", "share of assignments", SHARE),
    "spurious_rate": ("Spurious rate", "share of assignments", SHARE),
}
"""Metric → title, unit and limits of its panel."""
_ABLATIONS = (
    ("Serial collapse", ("serial_collapse", "serial_collapse_parl"), ("spawn_rate", "width", "item_f1")),
    ("Spurious work", ("spurious", "spurious_finish"), ("spurious_rate", "finish_rate", "item_f1")),
)


def draw_all(results: Mapping[str, Any], curves: Curves, folder: Path) -> list[str]:
    """Writes every picture that has data, and gives the names of the files: `["results-overview.png", ...]`."""
    headline = results["headline"]
    drawn = {
        "results-overview.png": _overview(headline, curves) if headline else None,
        "results-steps.png": _steps(headline) if headline else None,
        "results-sweep.png": _sweep(headline) if headline else None,
        "results-sizes.png": _sizes(headline) if headline else None,
        "results-learning.png": _learning(curves) if headline else None,
        "results-ablations.png": _ablations(curves),
    }
    for name, figure in drawn.items():
        (folder / name).unlink(missing_ok=True)
        if figure is not None:
            figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
    return [name for name, figure in drawn.items() if figure is not None]


# --- figures ---------------------------------------------------------------------------


def _overview(headline: Mapping[str, Any], curves: Curves) -> Figure:
    figure, axes = new_figure(2, 2, 12.0, 8.4)
    _panel(axes[0], curves, _MAIN, "item_f1", "Learning")
    sweep(axes[1], headline)
    steps_to_target(axes[2], headline)
    plots.by_size(axes[3], headline, "item_f1", "item-F1", "Quality by table size")
    return figure


def _steps(headline: Mapping[str, Any]) -> Figure:
    figure, (axis,) = new_figure(1, 1, 8.4, 4.8)
    steps_to_target(axis, headline)
    return figure


def _sweep(headline: Mapping[str, Any]) -> Figure:
    figure, (axis,) = new_figure(1, 1, 7.2, 4.6)
    sweep(axis, headline)
    return figure


def _sizes(headline: Mapping[str, Any]) -> Figure:
    figure, (left, right) = new_figure(1, 2, 12.0, 4.6)
    plots.by_size(left, headline, "item_f1", "item-F1", "Quality by table size")
    plots.by_size(right, headline, "critical_steps", "critical steps an episode", "Latency by table size")
    return figure


def _learning(curves: Curves) -> Figure:
    figure, axes = new_figure(2, 3, 14.0, 7.6)
    for axis, key in zip(axes, _PANELS, strict=True):
        _panel(axis, curves, _MAIN if key in ("item_f1", "critical_steps") else ("swarm",), key)
    return figure


def _ablations(curves: Curves) -> Figure | None:
    rows = [row for row in _ABLATIONS if any(name in curves for name in row[1])]
    if not rows:
        return None
    figure, axes = new_figure(len(rows), 3, 14.0, 3.9 * len(rows))
    panels = [(what, groups, key) for what, groups, keys in rows for key in keys]
    for axis, (what, groups, key) in zip(axes, panels, strict=True):
        _panel(axis, curves, groups, key, f"{what}: {_PANELS[key][0][0].lower()}{_PANELS[key][0][1:]}")
    return figure


# --- panels ----------------------------------------------------------------------------


def _panel(axis: Axes, curves: Curves, groups: Sequence[str], key: str, title: str = "") -> None:
    """A metric of the training rollouts over the iterations, a colour a group."""
    usual, unit, limits = _PANELS[key]
    dress(axis, title or usual, "iteration", unit)
    for name in groups:
        seeds = [column(rows, f"rollout/{key}") for rows in curves.get(name, ())]
        for x, y in seeds:
            axis.plot(x, smooth(y), color=_COLOURS[name], linewidth=0.9, alpha=0.35)
        x, y = mean_curve(seeds)
        if x:
            words = f"{GROUP_NAMES[name]} ({len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'})"
            axis.plot(x, smooth(y), color=_COLOURS[name], linewidth=2.2, label=words)
    axis.set_ylim(*limits)
    legend(axis)


def mean_curve(seeds: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """The mean over seeds at each x that all of them have: `[([1, 2], [.1, .3]), ([1], [.3])]` → `([1], [.2])`."""
    found = [dict(zip(x, y, strict=True)) for x, y in seeds]
    common = sorted(set[float]().union(*found).intersection(*found)) if found else []
    return common, [sum(f[x] for f in found) / len(found) for x in common]


def sweep(axis: Axes, headline: Mapping[str, Any]) -> None:
    """Mean item-F1 against mean critical steps, seeds together; each seed faint."""
    plots.sweep(axis, headline)
    for report in headline["sweep_seeds"].values():
        for system, points in report.items():
            points = sorted(points, key=lambda p: p["critical_steps"])
            x, y = [p["critical_steps"] for p in points], [p["item_f1"] for p in points]
            axis.plot(x, y, color=plots.style(system, list(headline["sweep"]))[1], linewidth=0.8, alpha=0.35)


def steps_to_target(axis: Axes, headline: Mapping[str, Any]) -> None:
    """Critical steps to a mean item-F1: a bar the mean, a dot a seed; the ratio above, K2.5's below it."""
    dress(axis, "Critical steps to reach a quality (in brackets: Kimi K2.5)", "target item-F1", "critical steps (log)")
    opponent = opponent_of(headline)
    rows = headline["steps_to_target"][opponent]
    for offset, system, key in ((-0.18, opponent, "single_agent"), (0.18, "swarm", "swarm")):
        _bars(axis, rows, offset, key, *plots.style(system, [])[:2])
    if any(r[k]["bound"] == "at_least" for r in rows for k in _MAIN):
        axis.bar([0], [0], color="white", edgecolor=INK, hatch="///", label="target not reached")
    for i, row in enumerate(rows):
        top = max([s[k]["value"] or 0.0 for s in row["seeds"] for k in _MAIN])
        text = f"{_ratio_text(row['ratio'])}\n({row['k25']:.1f}×)"
        axis.annotate(text, (i, top or 1.0), (0, 4), textcoords="offset points", ha="center", color=INK, fontsize=9)
    axis.set_xticks(range(len(rows)), [f"{100 * r['target']:.0f} %" for r in rows])
    if any(r[k]["value"] for r in rows for k in _MAIN):
        axis.set_yscale("log", base=2)
        axis.set_ylim(top=axis.get_ylim()[1] * 3.5)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]], offset: float, key: str, name: str, colour: str) -> None:
    """Hatched where the mean is only a lower bound."""
    whole = [(i + offset, r[key]["value"]) for i, r in enumerate(rows) if r[key]["value"] and _reached(r[key])]
    bound = [(i + offset, r[key]["value"]) for i, r in enumerate(rows) if r[key]["value"] and not _reached(r[key])]
    axis.bar([0], [0], color=colour, label=name)  # the legend's, also where no bar is whole
    axis.bar([x for x, _ in whole], [y for _, y in whole], 0.34, color=colour)
    axis.bar([x for x, _ in bound], [y for _, y in bound], 0.34, color="white", edgecolor=colour, hatch="///")
    dots = [(i + offset, s[key]["value"]) for i, r in enumerate(rows) for s in r["seeds"] if s[key]["value"]]
    axis.scatter([x for x, _ in dots], [y for _, y in dots], s=14, color="white", edgecolors=INK, zorder=3)


def _reached(measured: Mapping[str, Any]) -> bool:
    return measured["bound"] != "at_least"


def _ratio_text(ratio: Mapping[str, Any]) -> str:
    return "not reached" if ratio["value"] is None else bounded_words(ratio, ".1f", "×")
