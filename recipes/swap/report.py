"""A swap matrix shown: a table in the terminal, swap.json, swap.md, and pictures.

Equal numbers give equal files. Not here: the numbers (`recipes.swap.numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from recipes.plots import DPI, INK, dress, new_figure
from recipes.report import replace
from recipes.swap.matrix import OWN
from recipes.swap.numbers import MEASURES, Measure

_GOOD, _BAD, _PLAIN = "#0072B2", "#D55E00", "#777777"
_COLOURS = {"better": _GOOD, "worse": _BAD, "": _PLAIN}
_HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#56B4E9", "#0072B2"])
_MARKS = {"worse": "▼", "better": "▲", "": ""}


def write(numbers: Mapping[str, Any], out: Path) -> list[str]:
    """Writes swap.json, swap.md, heatmap.png and differences.png into `out`; the names of the files."""
    out.mkdir(parents=True, exist_ok=True)
    pictures = {"heatmap.png": heatmap(numbers), "differences.png": differences(numbers)}
    for name, figure in pictures.items():
        figure.savefig(out / name, dpi=DPI, metadata={"Software": None})
    replace(out / "swap.json", msgspec.json.format(msgspec.json.encode(numbers), indent=2) + b"\n")
    replace(out / "swap.md", markdown(numbers).encode())
    return ["swap.json", "swap.md", *pictures]


def table(numbers: Mapping[str, Any]) -> Table:
    """A row a cell; differences beyond their interval are marked."""
    shown = Table(box=SIMPLE_HEAD, caption="▼ worse, ▲ better than the run's own cast, beyond the 95 % interval")
    for heading in ("orchestrator", "subagents"):
        shown.add_column(heading)
    for m in MEASURES:
        shown.add_column(m.words, justify="right")
    shown.add_column("tasks", justify="right")
    for cell in numbers["cells"]:
        marked = {"worse": "red", "better": "green", "": ""}
        values = [f"[{c}]{text}[/]" if (c := marked[verdict]) else text for text, verdict in _values(cell)]
        shown.add_row(cell["orchestrator"], cell["cast"], *values, str(cell["means"]["tasks"]))
    return shown


def markdown(numbers: Mapping[str, Any]) -> str:
    """The page: means and paired differences of every cell, regressions first."""
    lines = ["# Subagents swapped", "", f"Every cell: {_settings(numbers)}. Differences are to the run's own cast"]
    lines += [
        "under the same orchestrator, task by task, with 95 % bootstrap intervals.",
        "",
        "![item-F1](heatmap.png)",
    ]
    worse = [(c, m) for c in numbers["cells"] for m in MEASURES if c["difference"][m.name]["verdict"] == "worse"]
    lines += ["", "Regressions beyond the interval:" if worse else "No regression beyond the interval.", ""]
    for cell, m in worse:
        words = f"{m.words} {_signed(cell['difference'][m.name], m)}"
        lines.append(f"- {cell['orchestrator']} over {cell['cast']}: {words}")
    lines += ["", "| orchestrator | subagents | " + " | ".join(m.words for m in MEASURES) + " |"]
    lines += ["|---|---|" + "---|" * len(MEASURES)]
    for cell in numbers["cells"]:
        signed = [f" ({_signed(cell['difference'][m.name], m)})" if cell["cast"] != OWN else "" for m in MEASURES]
        values = [text + more for (text, _), more in zip(_values(cell), signed, strict=True)]
        lines.append(f"| {cell['orchestrator']} | {cell['cast']} | " + " | ".join(values) + " |")
    lines += ["", "![differences](differences.png)", ""]
    return "\n".join([*lines, *_who(numbers)]) + "\n"


def _who(numbers: Mapping[str, Any]) -> list[str]:
    lines = ["| subagents | role | checkpoint | sha256 | weight |", "|---|---|---|---|---|"]
    for name, cast in numbers["casts"].items():
        for role, players in cast.items():
            for p in players:
                where = f"{p['path']} | `{p['sha256'][:12]}` | {p['weight']:g}"
                lines.append(f"| {name} | {role or '(everybody)'} | {where} |")
    return lines


def heatmap(numbers: Mapping[str, Any]) -> Figure:
    """Item-F1 of every cell; a cell's second line is its difference to the run's own cast."""
    names, casts = list(numbers["orchestrators"]), list(numbers["casts"])
    by = {(c["orchestrator"], c["cast"]): c for c in numbers["cells"]}
    figure, (axis,) = new_figure(1, 1, 2.8 + 1.5 * len(casts), 1.6 + 0.8 * len(names))
    values = [[by[o, c]["means"]["item_f1"] or 0.0 for c in casts] for o in names]
    axis.imshow(values, cmap=_HEAT, vmin=0.0, vmax=1.0, aspect="auto")
    for y, o in enumerate(names):
        for x, c in enumerate(casts):
            d = by[o, c]["difference"]["item_f1"]
            second = "" if c == OWN else f"\n{_signed(d, MEASURES[0])}"
            ink = "white" if values[y][x] > 0.6 else INK
            axis.text(x, y, f"{values[y][x]:.3f}{second}", ha="center", va="center", color=ink, fontsize=9)
    axis.set_xticks(range(len(casts)), casts, rotation=20, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_title(f"item-F1, {_settings(numbers)}", loc="left", fontsize=11, color=INK)
    return figure


def differences(numbers: Mapping[str, Any]) -> Figure:
    """What each cast changes, with intervals: a panel a measure, a row a cell that is not the run's own."""
    cells = [c for c in numbers["cells"] if c["cast"] != OWN]
    figure, axes = new_figure(1, len(MEASURES), 3.2 * len(MEASURES), 1.4 + 0.4 * max(1, len(cells)))
    several = len(numbers["orchestrators"]) > 1
    for k, (axis, m) in enumerate(zip(axes, MEASURES, strict=True)):
        _forest(axis, cells, m)
        labels = [f"{c['orchestrator']} over {c['cast']}" if several else c["cast"] for c in cells]
        axis.set_yticks(range(len(cells)), labels if k == 0 else [""] * len(cells))
        axis.invert_yaxis()
    return figure


def _forest(axis: Axes, cells: Sequence[Mapping[str, Any]], m: Measure) -> None:
    dress(axis, m.words, "difference", "")
    axis.axvline(0.0, color=INK, linewidth=0.8)
    for y, cell in enumerate(cells):
        d = cell["difference"][m.name]
        if d["ci"] is not None:
            colour = _COLOURS[d["verdict"]]
            axis.plot(d["ci"], [y, y], color=colour, linewidth=2)
            axis.plot([d["mean"]], [y], color=colour, marker="o", markersize=6)


def _values(cell: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The mean of each measure with its mark, and the verdict."""
    out: list[tuple[str, str]] = []
    for m in MEASURES:
        mean, verdict = cell["means"][m.name], cell["difference"][m.name]["verdict"]
        out.append(("–" if mean is None else f"{mean:{m.form}}{_MARKS[verdict]}", verdict))
    return out


def _signed(d: Mapping[str, Any], m: Measure) -> str:
    if d["mean"] is None:
        return "–"
    low, high = d["ci"]
    return f"{d['mean']:+{m.form}}, {low:+{m.form}} to {high:+{m.form}}{_MARKS[d['verdict']]}"


def _settings(numbers: Mapping[str, Any]) -> str:
    s = numbers["settings"]
    trials = f", {s['trials']} trials each" if s["trials"] > 1 else ""
    return f"{s['tasks']} held-out tasks of {s['rows'][0]}–{s['rows'][1]} rows, {s['budget']} critical steps{trials}"
