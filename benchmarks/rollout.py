"""What rollouts cost beyond the engine: a swarm's batch against the same calls stepped inline, engine by engine.

    python -m benchmarks.rollout --engines embedded,vllm --threads 1,2 --repeats 3

The batch is the main job's: agents that search, read, spawn and answer, all through the one agent loop. Inline, the
same prompts are sampled for as many tokens, each call handed in by the engine's own thread as soon as the call before
it is done: no tasks, no tools, no parsing. Swarm and inline take turns in one process; compare ratios of one run.
Also: prefix caching off, seconds to start, and of an update of the weights with its check. Not here: many agents
without an engine (`benchmarks.scale`), updates of the learner (`benchmarks.update`).
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


@dataclass(frozen=True, slots=True)
class Cell:
    """Sampled tokens a second of the swarm and inline (medians), the median of the repeats' ratios, the share of
    prompt tokens that was not computed again, and medians of seconds."""

    engine: str
    threads: int
    prefix_caching: bool
    tokens: int
    requests: int
    agents: int
    swarm_tokens_s: float
    inline_tokens_s: float
    of_inline: float
    least: float
    most: float
    cached: float
    start_seconds: float
    update_seconds: float
    peak_mb: float


def cell(engine: str, threads: int, prefix: bool, given: argparse.Namespace) -> Cell:
    arguments = [engine, str(threads), str(given.repeats), str(given.episodes), str(int(prefix))]
    command = [sys.executable, "-m", "benchmarks.rollout_cell", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = [b / a for a, b in zip(found["swarm"], found["inline"], strict=True)]
    return Cell(
        engine, threads, prefix, found["tokens"], found["requests"], found["agents"],
        found["tokens"] / median(found["swarm"]), found["tokens"] / median(found["inline"]),
        median(ratios), min(ratios), max(ratios), found["cached"], found["start"], median(found["update"]),
        found["peak_mb"],
    )  # fmt: skip


def table(cells: list[Cell]) -> Table:
    out = Table(title="rollouts of the main job against the same calls stepped inline")
    names = ("engine", "threads", "prefix cache", "tokens", "requests", "agents", "swarm tokens/s", "inline tokens/s",
             "of inline", "least–most", "cached", "start s", "update ms", "peak MB")  # fmt: skip
    for name in names:
        out.add_column(name, justify="left" if name == "engine" else "right")
    for c in cells:
        out.add_row(
            c.engine, str(c.threads), "on" if c.prefix_caching else "off", f"{c.tokens:,}", f"{c.requests:,}",
            str(c.agents), f"{c.swarm_tokens_s:,.0f}", f"{c.inline_tokens_s:,.0f}", f"{c.of_inline:.1%}",
            f"{c.least:.1%}–{c.most:.1%}", f"{c.cached:.0%}", f"{c.start_seconds:.1f}",
            f"{1000 * c.update_seconds:.0f}", f"{c.peak_mb:,.0f}",
        )  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,vllm")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/rollout.json"))
    given = parser.parse_args()
    wanted = [(e, int(t), True) for e, t in product(given.engines.split(","), given.threads.split(","))]
    if "vllm" in given.engines.split(","):
        wanted.append(("vllm", int(given.threads.split(",")[0]), False))
    console, cells = Console(width=160), list[Cell]()
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for k, (engine, threads, prefix) in enumerate(wanted, 1):
        console.print(f"{k} of {len(wanted)}: {engine}, {threads} threads{'' if prefix else ', no prefix cache'}")
        cells.append(cell(engine, threads, prefix, given))
        given.out.write_text(json.dumps({"machine": machine, "cells": [asdict(c) for c in cells]}, indent=1) + "\n")
    console.print(table(cells))


if __name__ == "__main__":
    main()
