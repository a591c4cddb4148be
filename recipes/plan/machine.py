"""What there is to run on: the nodes of a cluster, described by the user or read from this machine.

Not here: what a run needs of it (`recipes.plan.command`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.plan.memory import GIB, MIB
from swarm.checks import want

_want = partial(want, "cluster")
_SECONDS = 20.0
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container says how much memory it may have."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: cores, bytes of memory, GPUs and the bytes of each: `Node(96, 1024 * GIB, 8, 141 * GIB)`."""

    cpus: int
    memory: int
    gpus: int = 0
    gpu_memory: int = 0

    def __post_init__(self) -> None:
        _want("cpus", self.cpus, self.cpus >= 1, "1 or more")
        _want("memory", self.memory, self.memory > 0, "more than 0 GiB")
        _want("gpus", self.gpus, self.gpus >= 0, "0 or more")
        _want("gpu-memory", self.gpu_memory, (self.gpu_memory > 0) == (self.gpus > 0), "more than 0 GiB with GPUs only")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are alike: `Cluster(Node(96, 1024 * GIB, 8, 141 * GIB), count=2, words="2 described nodes")`."""

    node: Node
    count: int = 1
    words: str = "this machine"

    def __post_init__(self) -> None:
        _want("nodes", self.count, self.count >= 1, "1 or more")

    @property
    def gpus(self) -> int:
        return self.node.gpus * self.count

    def __str__(self) -> str:
        node = self.node
        gpus = f", {node.gpus} GPUs of {node.gpu_memory / GIB:.0f} GiB" if node.gpus else ", no GPU"
        each = " each" if self.count > 1 else ""
        return f"{self.words}: {node.cpus} cores, {node.memory / GIB:.1f} GiB{gpus}{each}"


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """The options that describe a cluster; without any of them it is this machine."""
    group = parser.add_argument_group("a described cluster, instead of this machine")
    group.add_argument("--nodes", type=int, metavar="N", help="machines that are alike (default: 1)")
    group.add_argument("--cpus", type=int, metavar="N", help="cores of a node")
    group.add_argument("--memory", type=float, metavar="GIB", help="memory of a node")
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node")
    group.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU")


def cluster_of(options: argparse.Namespace) -> Cluster:
    """What the options describe, or this machine. Raises ValueError where they are not whole, or out of range."""
    o = options
    given = {"--cpus": o.cpus, "--memory": o.memory, "--gpus": o.gpus, "--gpu-memory": o.gpu_memory}
    if o.nodes is None and all(value is None for value in given.values()):
        return this_machine()
    needed = ("--cpus", "--memory", *(("--gpu-memory",) if o.gpus else ()), *(("--gpus",) if o.gpu_memory else ()))
    for name in needed:
        if given[name] is None:
            raise ValueError(f"cluster: no {name}, want --cpus and --memory of a node, --gpus and --gpu-memory if any")
    node = Node(o.cpus, round(o.memory * GIB), o.gpus or 0, round((o.gpu_memory or 0) * GIB))
    count = 1 if o.nodes is None else o.nodes
    return Cluster(node, count, "1 described node" if count == 1 else f"{count} described nodes")


def this_machine() -> Cluster:
    """The cores, the memory (of the container, if it is less) and the GPUs of this machine."""
    gpus = gpu_bytes()
    return Cluster(Node(os.cpu_count() or 1, memory_bytes(), len(gpus), min(gpus, default=0)))


def memory_bytes() -> int:
    """Bytes of memory of this machine, or of its container if that has less."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def free_bytes() -> int:
    """Bytes of memory that a new process may take now."""
    if not _MEMINFO.exists():
        return memory_bytes()
    said = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
    return min(memory_bytes(), int(said["MemAvailable"].split()[0]) * 1024)


def _limits() -> list[int]:
    said = [path.read_text().strip() for path in _CGROUP if path.exists()]
    return [int(text) for text in said if text.isdecimal()]


def gpu_bytes() -> list[int]:
    """Bytes of each GPU, as nvidia-smi says; empty where there is none, or no driver answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    return parsed(_answer("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"))


def parsed(text: str) -> list[int]:
    """MiB, one line a GPU, as bytes."""
    return [int(line) * MIB for line in text.split() if line.isdecimal()]


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
