"""How many agents one process runs at once, and what a step of one costs, beside the same load without a framework.

    python -m benchmarks.scale --agents 1000,10000,100000 --steps 10 --repeats 3 --out scale.json

    asyncio, trio        a task each, nothing else
    trio_deadline        a task each, with a cancel scope and a deadline: the least that an agent needs
    swarm                the one agent loop as it is, with a chat format that costs next to nothing
    swarm_subagents      the same agents as subagents, a hundred for each orchestrator
    swarm_hermes         the same agents in the real chat format
    langgraph            as its users write it (`pip install langgraph`)

`benchmarks.scale_cells` says what the load is. Every cell is a process of its own, so that memory is its own; systems
take turns, so that a machine that is busy for a while is so for all. The ratio is the median over the repeats of
processor time against `trio_deadline` in the same turn: compare ratios, never absolute numbers of two runs.
Not here: models, and engines that compute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.scale_cells import Measured

MODULES = {
    "asyncio": "scale_cells",
    "trio": "scale_cells",
    "trio_deadline": "scale_cells",
    "swarm": "scale_swarm",
    "swarm_subagents": "scale_swarm",
    "swarm_hermes": "scale_swarm",
    "langgraph": "scale_langgraph",
}
BASE = "trio_deadline"


@dataclass(frozen=True, slots=True)
class Cell:
    """A system at one number of agents: what its repeats measured, or why there are fewer than were asked for."""

    system: str
    agents: int
    repeats: tuple[Measured, ...]
    skipped: str = ""

    @property
    def step_us(self) -> tuple[float, ...]:
        """Processor time of each repeat for one answered turn, in microseconds."""
        return tuple(1e6 * m.cpu / m.answers for m in self.repeats)

    @property
    def idle_kb(self) -> float:
        """Resident KB of a waiting agent beside its transcript, median."""
        return median((m.idle_bytes - m.transcript_bytes) / m.agents / 1024 for m in self.repeats)

    @property
    def transcript_kb(self) -> float:
        return median(m.transcript_bytes / m.agents / 1024 for m in self.repeats)


def ratio(cell: Cell, base: Cell | None) -> float | None:
    """How many times the base's processor time, turn by turn; None without repeats of both."""
    pairs = list(zip(cell.step_us, base.step_us, strict=False)) if base else []
    return median(mine / other for mine, other in pairs) if pairs else None


def measured(system: str, agents: int, steps: int, limit: float) -> Measured | str:
    """What one process measured, or why it did not. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", f"benchmarks.{MODULES[system]}", system, str(agents), str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"more than {limit:g} s"
    if "No module named 'langgraph'" in done.stderr:
        return "langgraph is not installed"
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def compared(agents: int, systems: Sequence[str], given: argparse.Namespace, earlier: Sequence[Cell]) -> list[Cell]:
    """Systems take turns. One that was stopped is not started again, nor with more agents."""
    skipped = {c.system: f"{c.skipped} with {c.agents:,} agents" for c in earlier if c.skipped and c.agents < agents}
    found: dict[str, list[Measured]] = {s: [] for s in systems}
    for turn in range(given.repeats):
        for system in systems:
            if system in skipped:
                continue
            m = measured(system, agents, given.steps, given.limit)
            if isinstance(m, str):
                skipped[system] = m
            else:
                found[system].append(m)
            shown = m if isinstance(m, str) else f"{1e6 * m.cpu / m.answers:.1f} µs a step, {m.wall:.1f} s"
            given.console.print(f"{agents:,} agents, turn {turn + 1} of {given.repeats}: {system} {shown}", style="dim")
    return [Cell(s, agents, tuple(found[s]), skipped.get(s, "")) for s in systems]


def table(cells: Sequence[Cell], steps: int) -> Table:
    title = f"{steps} steps each: processor µs of a step, × {BASE}, KB of an agent that waits and of its transcript"
    out = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("agents", "system", "µs", "range", "×", "KB", "+ KB", "wall s"):
        out.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for c in cells:
        if not c.repeats:
            out.add_row(f"{c.agents:,}", c.system, "skipped")
            continue
        times = ratio(c, next((b for b in cells if (b.system, b.agents) == (BASE, c.agents)), None))
        out.add_row(
            f"{c.agents:,}", c.system, f"{median(c.step_us):,.1f}", f"{min(c.step_us):,.0f}–{max(c.step_us):,.0f}",
            "" if times is None else f"{times:.2f}", f"{c.idle_kb:.1f}", f"{c.transcript_kb:.1f}",
            f"{median(m.wall for m in c.repeats):,.1f}",
        )  # fmt: skip
    return out


def names(text: str) -> list[str]:
    unknown = [s for s in text.split(",") if s not in MODULES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: want of {', '.join(MODULES)}")
    return text.split(",")


def counts(text: str) -> list[int]:
    numbers = [int(n) if n.isdigit() else 0 for n in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: want numbers from 1, with commas between")
    return sorted(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=counts, default=[1000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--systems", type=names, default=list(MODULES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a process may take")
    parser.add_argument("--out", type=Path, help="a file for the measurements, JSON")
    given = parser.parse_args()
    given.console = Console(width=120)
    cells: list[Cell] = []
    for agents in given.agents:
        cells += compared(agents, given.systems, given, cells)
        if given.out:
            machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
            found = {"machine": machine, "python": platform.python_version(), "cells": [asdict(c) for c in cells]}
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    given.console.print(table(cells, given.steps))
    for c in cells:
        if c.skipped:
            given.console.print(f"{c.agents:,} {c.system}: {len(c.repeats)} of {given.repeats}, {c.skipped}")


if __name__ == "__main__":
    main()
