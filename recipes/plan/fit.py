"""Where the processes of a run find room on a cluster, and what does not fit, each with its remedy.

Processes of this machine stand on the first node; Ray's actors on the node that has least on it. GPUs are given out
in the order of the processes. Not here: what a process holds (`recipes.plan.processes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recipes.config import Training
from recipes.plan.machine import Cluster, Node
from recipes.plan.memory import FLOAT, GIB, HALF, MIB, Memory, ModelSize, kv_bytes
from recipes.plan.processes import NOTHING, Process, Sizes, longest

_REMEDIES = {
    "weights": "--serving.dtype bfloat16, --serving.tensor_parallel, or a smaller model",
    "gradients": "--ppo.adapt.kind lora",
    "optimizer": "--ppo.adapt.kind lora",
    "cache": "a smaller --serving.cache_mib",
    "activations": "a smaller --ppo.micro_tokens and --main.context",
    "program": "fewer processes",
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A process, its node (from 0) and its GPUs there; `node` is None where there is no room."""

    process: Process
    node: int | None
    gpus: tuple[int, ...] = ()


def place(processes: Sequence[Process], cluster: Cluster) -> list[Placed]:
    """Each process on a node with as many GPUs and cores as it asks for, if there is one."""
    free = [_Free(cluster.node) for _ in range(cluster.count)]
    placed: list[Placed] = []
    for process in processes:
        nodes = sorted(range(cluster.count), key=lambda k: free[k].used) if process.cpus else [0]
        found = next(((k, gpus) for k in nodes if (gpus := free[k].take(process)) is not None), None)
        placed.append(Placed(process, None) if found is None else Placed(process, *found))
    return placed


class _Free:
    """What is left of a node: cores, and of each GPU its share."""

    def __init__(self, node: Node) -> None:
        self._cpus, self._gpus, self._whole = float(node.cpus), [1.0] * node.gpus, max(1, node.gpus)
        self._of = node.cpus

    @property
    def used(self) -> float:
        """The share that is taken, of GPUs where there are any, and of cores."""
        return (len(self._gpus) - sum(self._gpus)) / self._whole + (self._of - self._cpus) / self._of

    def take(self, process: Process) -> tuple[int, ...] | None:
        """The GPUs that the process gets; None, and nothing taken, where there is no room."""
        share = process.gpus if process.gpus < 1 else 1.0
        count = 0 if not process.gpus else max(1, round(process.gpus))
        with_room = [k for k, left in enumerate(self._gpus) if left >= share - 1e-9][:count]
        if len(with_room) < count or self._cpus < process.cpus:
            return None
        for k in with_room:
            self._gpus[k] -= share
        self._cpus -= process.cpus
        return tuple(with_room)


# --- what does not fit -----------------------------------------------------------------


def problems(recipe: Training | None, sizes: Sizes, placed: Sequence[Placed], cluster: Cluster) -> list[str]:
    """One line for everything that does not fit. `recipe` is None for a run without engines."""
    lines = [] if recipe is None else _of_engines(recipe, sizes, on_gpus=cluster.gpus > 0)
    lines += _unplaced([p.process for p in placed if p.node is None], cluster)
    for node in range(cluster.count):
        here = [p for p in placed if p.node == node]
        name = f"node {node + 1}"
        lines += _over(f"{name} memory", here, cluster.node.memory, lambda p: p.host)
        for gpu in range(cluster.node.gpus):
            on = [p for p in here if gpu in p.gpus]
            lines += _over(f"{name} GPU {gpu}", on, cluster.node.gpu_memory, lambda p: p.device)
    return lines


def _unplaced(lost: Sequence[Process], cluster: Cluster) -> list[str]:
    if not lost:
        return []
    first = lost[0]
    asked = [f"{first.gpus:g} GPUs" if first.gpus else "", f"{first.cpus:g} cores" if first.cpus else ""]
    names = first.name if len(lost) == 1 else f"{first.name} and {len(lost) - 1} more"
    each = " and ".join(x for x in asked if x)
    return [f"no room for {names}, {each} each, on {cluster}; want more nodes or GPUs (--nodes, --gpus)"]


def _over(where: str, placed: Sequence[Placed], has: int, of: Callable[[Process], Memory]) -> list[str]:
    total = sum((of(p.process) for p in placed), NOTHING)
    if total.total <= has:
        return []
    largest = max(_REMEDIES, key=lambda name: getattr(total, name))
    who = ", ".join(p.process.name for p in placed[:4]) + (", …" if len(placed) > 4 else "")
    seen = f"{total.total / GIB:.1f} of {has / GIB:.1f} GiB, of which {largest} {getattr(total, largest) / GIB:.1f}"
    return [f"{where}: {who} take {seen}; want {_REMEDIES[largest]}"]


def _of_engines(recipe: Training, sizes: Sizes, *, on_gpus: bool) -> list[str]:
    """What an engine would refuse, or be in the way of."""
    s, lines = recipe.serving, list[str]()
    if on_gpus and recipe.engine == "server" and recipe.placement.learners * recipe.placement.learner_gpus < 1:
        lines.append("placement.learner_gpus = 0: the learner and server 1 are on one GPU; want 1")
    for role, size in _roles(sizes):
        room = cached_tokens(recipe, size)
        if room < longest(recipe):
            seen = f"serving.cache_mib = {s.cache_mib}: room for {room} tokens of the {role}"
            need = -(-longest(recipe) * _kv(recipe, size) // MIB)
            lines.append(f"{seen}, a context has {longest(recipe)}; want --serving.cache_mib {need} or more")
        if recipe.engine == "embedded" and size.family != "qwen3":
            lines.append(f"engine = 'embedded' with a {role} of family {size.family}; want --engine vllm")
        if recipe.engine != "embedded" and size.heads % s.tensor_parallel:
            seen = f"serving.tensor_parallel = {s.tensor_parallel} with {size.heads} heads of the {role}"
            lines.append(f"{seen}; want a divisor")
    return lines


def cached_tokens(recipe: Training, size: ModelSize) -> int:
    """Tokens that an engine's cache has room for."""
    return recipe.serving.cache_mib * MIB // _kv(recipe, size)


def _kv(recipe: Training, size: ModelSize) -> int:
    return kv_bytes(size, HALF if recipe.serving.dtype == "bfloat16" else FLOAT)


def _roles(sizes: Sizes) -> list[tuple[str, ModelSize]]:
    return list(zip(names_of(sizes), sizes.served, strict=True))


def names_of(sizes: Sizes) -> list[str]:
    """`policy`, `subagent`, `role 1`, … for the models that are served."""
    return ["policy", "subagent", *(f"role {k + 1}" for k in range(len(sizes.frozen) - 1))][: len(sizes.served)]


def notes(recipe: Training, sizes: Sizes) -> list[str]:
    """How many whole contexts the caches hold."""
    lines: list[str] = []
    for role, size in _roles(sizes):
        count = cached_tokens(recipe, size) // longest(recipe)
        lines.append(
            f"a {role} engine's cache holds {cached_tokens(recipe, size):,} tokens: {count} contexts of "
            f"{longest(recipe):,} at once, and more where they share a beginning; others wait"
        )
    return lines
