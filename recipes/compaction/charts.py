"""The pictures of a study of compaction, from report.json's content.

One colour and marker a system in every picture, as in `recipes.plots`. Equal input gives equal files.
Not here: computing what is shown (`recipes.compaction.numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.plots import DPI, INK, SHARE, dress, legend, new_figure, smooth

STYLES: Mapping[str, tuple[str, str, str]] = {
    "truncation": ("truncation", "#D55E00", "s"),
    "untrained": ("compaction (untrained)", "#E69F00", "^"),
    "chained": ("trained (chained)", "#0072B2", "o"),
    "copied": ("trained (copied)", "#CC79A7", "D"),
    "decayed": ("trained (decayed)", "#56B4E9", "X"),
    "full_window": ("full window", "#009E73", "P"),
}
"""System → its name in pictures and tables, colour and marker."""
_FEW = 5
"""Points of fewer episodes are noise, and are not drawn."""
_PANELS = (
    ("score", "Score", "share of trails right", SHARE),
    ("success", "Success", "share of tasks all right", SHARE),
    ("compactions", "Compactions", "an episode", (0.0, None)),
    ("summary_tokens", "Length of a summary", "tokens", (0.0, None)),
    ("critical_steps", "Critical steps", "an episode", (0.0, None)),
)


def draw_all(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes every picture that has data, and gives the names of the files: `["overview.png", ...]`."""
    systems, learnt = bool(report["systems"]), _learnt(report)
    drawn = {
        "overview.png": _overview(report) if systems else None,
        "systems.png": _systems(report) if systems else None,
        "learning.png": _learning(report) if learnt else None,
        "by_difficulty.png": _by_difficulty(report) if systems else None,
    }
    for name, figure in drawn.items():
        (folder / name).unlink(missing_ok=True)
        if figure is not None:
            figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
    return [name for name, figure in drawn.items() if figure is not None]


def _learnt(report: Mapping[str, Any]) -> bool:
    return any(curves["score"]["iteration"] for curves in report["learning"].values())


# --- figures ---------------------------------------------------------------------------


def _overview(report: Mapping[str, Any]) -> Figure:
    figure, axes = new_figure(2, 2, 12.0, 8.4)
    bars(axes[0], report, "score", "Held-out tasks", "score")
    learning(axes[1], report, *_PANELS[0])
    banded(axes[2], report["by_trails"], "Score by the number of trails", "trails of a task")
    banded(axes[3], report["by_compactions"], "Score by the number of rewrites", "rewrites of the context")
    return figure


def _systems(report: Mapping[str, Any]) -> Figure:
    figure, axes = new_figure(1, 3, 15.0, 4.6)
    bars(axes[0], report, "score", "Score", "share of trails right")
    bars(axes[1], report, "success", "Success", "share of tasks all right")
    bars(axes[2], report, "tokens", "Tokens", "sampled an episode", (0.0, None))
    return figure


def _learning(report: Mapping[str, Any]) -> Figure:
    figure, axes = new_figure(2, 3, 14.0, 7.6)
    for axis, panel in zip(axes, _PANELS, strict=False):
        learning(axis, report, *panel)
    held_out(axes[-1], report)
    return figure


def _by_difficulty(report: Mapping[str, Any]) -> Figure:
    figure, (left, right) = new_figure(1, 2, 12.0, 4.6)
    banded(left, report["by_trails"], "Score by the number of trails", "trails of a task")
    banded(right, report["by_compactions"], "Score by the number of rewrites", "rewrites of the context")
    return figure


# --- panels ----------------------------------------------------------------------------


def bars(
    axis: Axes,
    report: Mapping[str, Any],
    key: str,
    title: str,
    unit: str,
    limits: tuple[float, float | None] = SHARE,
) -> None:
    """A bar a system with its mean above it, its 95 % interval as a line, a dot a seed."""
    dress(axis, title, "", unit)
    shown = [(s, v[key]) for s, v in report["systems"].items() if v[key]["mean"] is not None]
    for i, (system, value) in enumerate(shown):
        axis.bar([i], [value["mean"]], 0.68, color=STYLES[system][1])
        low, high = value["ci"] or (value["mean"], value["mean"])
        axis.vlines([i], [low], [high], color=INK, linewidth=1.6)
        if report["systems"][system]["trained"]:
            dots = value["values"]
            axis.scatter([i] * len(dots), dots, s=16, color="white", edgecolors=INK, linewidths=0.8, zorder=3)
        text = f"{value['mean']:.2f}" if limits is SHARE else f"{value['mean']:.0f}"
        top = max(high, value["max"])
        axis.annotate(text, (i, top), (0, 4), textcoords="offset points", ha="center", color=INK)
    axis.set_xticks(range(len(shown)), [STYLES[s][0].replace(" ", "\n") for s, _ in shown])
    axis.tick_params(axis="x", labelsize=8)
    # The interval over few seeds may be wider than what the score can be.
    axis.set_ylim(0.0, 1.08 if limits is SHARE else limits[1])
    axis.margins(y=0.15)


def learning(
    axis: Axes, report: Mapping[str, Any], key: str, title: str, unit: str, limits: tuple[float, float | None]
) -> None:
    """A metric of the training rollouts: a line the mean over seeds, a band from the smallest to the largest."""
    dress(axis, f"{title} in training", "iteration", unit)
    for form, curves in report["learning"].items():
        seen, (name, colour, _) = curves[key], STYLES[form]
        if not seen["iteration"]:
            continue
        low, high, mean = (smooth(seen[end], 1) for end in ("low", "high", "mean"))
        axis.fill_between(seen["iteration"], low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(seen["iteration"], mean, color=colour, linewidth=2, label=name)
    axis.set_ylim(*limits)
    _whole(axis)
    legend(axis)


def held_out(axis: Axes, report: Mapping[str, Any]) -> None:
    """The short evaluations on held-out tasks: a dot the mean over seeds, a line from the smallest to the largest."""
    dress(axis, "Score on held-out tasks", "iteration", "share of trails right")
    for form, curves in report["learning"].items():
        seen, (name, colour, marker) = curves["held_out"], STYLES[form]
        if seen["iteration"]:
            axis.plot(seen["iteration"], seen["mean"], color=colour, marker=marker, linewidth=1.2, label=name)
            axis.vlines(seen["iteration"], seen["low"], seen["high"], color=colour, linewidth=1.2, alpha=0.6)
    axis.set_ylim(*SHARE)
    _whole(axis)
    legend(axis)


def banded(axis: Axes, bands: Mapping[str, Mapping[str, Any]], title: str, unit: str) -> None:
    """Mean score for each band, a line a system, with its 95 % interval over tasks."""
    dress(axis, title, unit, "score")
    systems = [s for s in STYLES if any(s in found for found in bands.values())]
    for k, system in enumerate(systems):
        name, colour, marker = STYLES[system]
        offset = 0.03 * (k - (len(systems) - 1) / 2)
        cells = [(i + offset, found[system]) for i, found in enumerate(bands.values()) if system in found]
        x, y, ends = _points(cells)
        axis.plot(x, y, color=colour, marker=marker, label=name, linewidth=1.8, markersize=6)
        axis.vlines(x, [low for low, _ in ends], [high for _, high in ends], color=colour, linewidth=1.4, alpha=0.6)
    axis.set_xticks(range(len(bands)), [name.replace("-", "–") for name in bands])
    axis.set_ylim(*SHARE)
    # Below the axis: lines of six systems leave no room among them.
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _whole(axis: Axes) -> None:
    """Iterations are whole numbers."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _points(
    cells: Sequence[tuple[float, Mapping[str, Any]]],
) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Places, means and interval ends of the cells that have enough episodes."""
    good = [(x, c) for x, c in cells if c["episodes"] >= _FEW]
    return [x for x, _ in good], [c["score"] for _, c in good], [(c["ci"][0], c["ci"][1]) for _, c in good]
