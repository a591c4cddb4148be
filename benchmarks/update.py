"""How fast one PPO update is, and how much memory it takes, against TRL and against the products alone.

    python -m benchmarks.update --models a,b --dtypes fp32,bf16 --threads 2 --repeats 3

Every system has the same model, batch, threads and machine, and a process of its own, one after another.
Compare ratios of one run, never absolute numbers of two; where others use the machine, those of processor time
on one thread. `benchmarks.ours` and `benchmarks.trl_grpo` say what is
measured. Without TRL (`pip install 'swarm-rl[bench]'`, or a Python that has it and this project, given as
`--trl-python`) the rest is measured. Not here: rollouts, generation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.workload import sequences

SYSTEMS = ("ours", "bare", "bound", "trl")


@dataclass(frozen=True, slots=True)
class Cell:
    """Real tokens a second (median, and of the slowest and the fastest repeat), real tokens a second of processor
    time over all threads (median), peak resident memory, and processor seconds that a critic adds."""

    system: str
    model: str
    dtype: str
    threads: int
    tokens_s: float
    slowest: float
    fastest: float
    tokens_cpu_s: float
    peak_mb: float
    critic_cpu_seconds: float | None


def cell(system: str, model: str, dtype: str, threads: int, found: list[dict]) -> Cell:
    """What the processes of one system found, together."""
    tokens = sum(len(s.ids) for s in sequences())
    seconds, cpu, critic = (
        [x for f in found for x in f.get(name, [])] for name in ("seconds", "cpu_seconds", "critic_cpu_seconds")
    )
    return Cell(
        system, model, dtype, threads, tokens / median(seconds), tokens / max(seconds), tokens / min(seconds),
        tokens / median(cpu), max(f["peak_mb"] for f in found), median(critic) if critic else None,
    )  # fmt: skip


def compared(model: str, dtype: str, threads: int, systems: list[str], given: argparse.Namespace) -> list[Cell]:
    """Systems take turns, so that a machine that is busy for a while is so for all."""
    found: dict[str, list[dict]] = {s: [] for s in systems}
    for _ in range(given.rounds):
        for s in systems:
            python = given.trl_python if s == "trl" else sys.executable
            found[s].append(process(s, model, dtype, threads, given.repeats, python))
    return [cell(s, model, dtype, threads, found[s]) for s in systems]


def process(system: str, model: str, dtype: str, threads: int, repeats: int, python: str) -> dict:
    module = "benchmarks.trl_grpo" if system == "trl" else "benchmarks.ours"
    command = [python, "-m", module, system, model, dtype, str(threads), str(repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def has_trl(python: str) -> bool:
    return subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0


def table(cells: list[Cell]) -> Table:
    out = Table(title="one PPO update; ratios of wall-clock time | of processor time")
    columns = ("model", "dtype", "threads", "system", "tokens/s", "slowest–fastest", "of bound", "× TRL", "peak MB")
    for name in columns:
        out.add_column(name, justify="left" if name in ("model", "dtype", "system") else "right")
    for c in cells:
        same = {d.system: d for d in cells if (d.model, d.dtype, d.threads) == (c.model, c.dtype, c.threads)}
        out.add_row(
            c.model, c.dtype, str(c.threads), c.system, f"{c.tokens_s:,.0f}", f"{c.slowest:,.0f}–{c.fastest:,.0f}",
            times(c, same.get("bound")), times(c, same.get("trl")), f"{c.peak_mb:,.0f}",
        )  # fmt: skip
    return out


def times(c: Cell, other: Cell | None) -> str:
    return f"{c.tokens_s / other.tokens_s:.2f} | {c.tokens_cpu_s / other.tokens_cpu_s:.2f}" if other else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="a,b")
    parser.add_argument("--dtypes", default="fp32")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="processes of each system, in turn")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/update.json"))
    given = parser.parse_args()
    console = Console(width=140)
    systems = given.systems.split(",")
    if "trl" in systems and not has_trl(given.trl_python):
        console.print("TRL is not installed: measuring the rest (pip install 'swarm-rl[bench]')")
        systems.remove("trl")
    cells: list[Cell] = []
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for model, dtype, threads in product(given.models.split(","), given.dtypes.split(","), given.threads.split(",")):
        cells += compared(model, dtype, int(threads), systems, given)
        given.out.write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1) + "\n")
    console.print(table(cells))
    for c in cells:
        if c.critic_cpu_seconds is not None:
            added = f"a critic, not in the table, adds {c.critic_cpu_seconds:.2f} s of processor time"
            console.print(f"{c.model} {c.dtype} {c.threads}: {added}")


if __name__ == "__main__":
    main()
