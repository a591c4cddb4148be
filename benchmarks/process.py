"""The command line of a process that measures one system: its arguments, and one line of JSON at the end.

    python -m benchmarks.ours SYSTEM MODEL fp32|bf16 THREADS REPEATS

Not here: what is measured.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
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


def peak_mb() -> float:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
