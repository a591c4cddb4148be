"""The command line of a process that measures one system: its arguments, and one line of JSON at the end.

    python -m benchmarks.ours SYSTEM MODEL fp32|bf16 THREADS REPEATS

Not here: what is measured.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch


def measure(systems: Mapping[str, Callable[[str, bool, int], dict[str, Any]]]) -> None:
    """Prints the seconds of each repeat, after one that warms up, and the peak of resident memory."""
    system, model, dtype, threads, repeats = sys.argv[1:]
    if system not in systems or dtype not in ("fp32", "bf16"):
        raise SystemExit(f"system = {system!r}, dtype = {dtype!r}, want one of {list(systems)} and fp32 or bf16")
    torch.set_num_threads(int(threads))
    found = systems[system](model, dtype == "bf16", int(repeats))
    print(json.dumps({"peak_mb": peak_mb()} | found))


@dataclass(frozen=True, slots=True)
class Time:
    """Wall-clock seconds, and processor seconds of all threads: what a machine that others use disturbs less."""

    wall: float
    cpu: float

    def __sub__(self, other: Time) -> Time:
        return Time(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Time:
    return Time(perf_counter(), process_time())


def lists(times: Sequence[Time]) -> dict[str, list[float]]:
    """`{"seconds": [...], "cpu_seconds": [...]}`."""
    return {"seconds": [t.wall for t in times], "cpu_seconds": [t.cpu for t in times]}


def peak_mb() -> float:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
