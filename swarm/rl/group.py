# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Learners in several processes that make one update together, as one learner would.

    update ── whole rollouts, a task's together, evenly by tokens ──▶ rank 0 … rank n − 1
                                                                        │ gradients summed over processes
           ◀── metrics and the new weights, of rank 0 ◀────────────────┘

Every rank has the whole model; they are processes of their own, none of them this one. One that dies or is late
ends the group: training goes on from a checkpoint. Not here: how processes are started (`swarm.rl.ranks` on this
machine, `swarm.cluster` on Ray), and the update itself (`swarm.rl.learner`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from swarm.rl.adapt import merged_state_dict
from swarm.rl.batch import collect
from swarm.rl.credit import Credit
from swarm.rl.learner import Learner
from swarm.rl.ppo import Metrics
from swarm.rl.ranks import LocalRanks, Ranks
from swarm.types import Rollout

LearnerFactory = Callable[[Accelerator], Learner]
"""Makes a learner in a rank's process; it must be picklable (a function of a module, or a dataclass)."""


def local_group(factory: LearnerFactory, count: int, threads: int, seconds: float) -> LearnerGroup:
    """A group of processes on this machine, of so many cores each."""
    return LearnerGroup(LocalRanks(partial(Rank, factory, count), count, threads), count, seconds)


class LearnerGroup:
    """`with LearnerGroup(ranks, 2, seconds=600) as group: metrics, weights = group.update(rollouts)`.

    `ranks` are processes with a `Rank` each. They meet and make their learners, the first one's weights being those
    of all. `seconds` bounds every call; `credit` is that of the last update. Raises LearnerError; what raises it closes
    the group.
    """

    def __init__(self, ranks: Ranks, count: int, seconds: float) -> None:
        self._ranks, self._count, self._seconds = ranks, count, seconds
        address = self._call("listen", [()])[0]
        self.step, self.updates = self._call("join", [(address, seconds)] * count)[0]
        self.credit: Credit | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.close()

    def update(self, rollouts: Sequence[Rollout]) -> tuple[Metrics, dict[str, Tensor]]:
        """Learns from the rollouts; the metrics are of all of them, the weights those of `weights`."""
        parts = shards(rollouts, self._count)
        reports = self._call("update", [([rollouts[k] for k in part],) for part in parts])
        metrics, _, weights, self.step, self.updates = reports[0]
        left_out = Counter[str]()
        for report in reports:
            left_out.update(report[0].left_out)
        self.credit = Credit.joined([(part, report[1]) for part, report in zip(parts, reports, strict=True)])
        return replace(metrics, left_out=dict(left_out)), weights

    def weights(self) -> dict[str, Tensor]:
        """The state dict of the plain model that says what the policy says, on the CPU."""
        return self._call("weights", [()])[0]

    def state_dict(self) -> dict[str, Any]:
        """See `Learner.state_dict`; tensors are on the CPU and nobody else's."""
        return self._call("state_dict", [()])[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Learner.load_state_dict`."""
        self.step, self.updates = self._call("load_state_dict", [(state,)] * self._count)[0]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            return self._ranks.call(method, arguments, self._seconds)
        except BaseException:
            # What the others were doing together with the one that failed can never end.
            self._ranks.close()
            raise


def shards(rollouts: Sequence[Rollout], count: int) -> list[list[int]]:
    """Which rollouts each of `count` ranks learns from: a task's together, the largest task first to who has least.

    Indices rise within a rank; a rank may have none.
    """
    tasks: defaultdict[str, list[int]] = defaultdict(list)
    for k, rollout in enumerate(rollouts):
        tasks[rollout.task.id].append(k)
    sizes = {task: sum(_tokens(rollouts[k]) for k in members) for task, members in tasks.items()}
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for task in sorted(tasks, key=lambda task: -sizes[task]):
        least = loads.index(min(loads))
        loads[least] += sizes[task]
        parts[least] += tasks[task]
    return [sorted(part) for part in parts]


def _tokens(rollout: Rollout) -> int:
    return sum(len(span.ids) for segment in rollout.trace.segments for span in segment.spans)


class Rank:
    """One of the `count` processes of a group: `Ranks` are made with `partial(Rank, factory, count)`.

    `host` is where the others find it, `local` which of the GPUs that it sees is its own. Its methods are called in
    its process.
    """

    def __init__(self, factory: LearnerFactory, count: int, rank: int, host: str, local: int) -> None:
        self._factory, self._rank, self._count, self._host, self._local = factory, rank, count, host, local
        self._store: TCPStore | None = None
        self._learner: Learner | None = None

    def listen(self) -> str:
        """Opens the place where all ranks meet, on a port that is free: `host:port`."""
        self._store = TCPStore(self._host, 0, self._count, is_master=True, wait_for_workers=False)
        return f"{self._host}:{self._store.port}"

    def join(self, address: str, seconds: float) -> tuple[int, int]:
        """Meets the others and makes the learner; its steps and updates so far."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        host, _, port = address.rpartition(":")
        wait = timedelta(seconds=seconds)
        store = self._store or TCPStore(host, int(port), self._count, is_master=False, timeout=wait)
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(self._local)
        backend = "nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._count, timeout=wait)
        # accelerate finds the group that there is, and asks the environment for what it could ask the group.
        places = {"RANK": self._rank, "LOCAL_RANK": self._local, "WORLD_SIZE": self._count}
        places |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
        self._learner = self._factory(Accelerator(cpu=not gpu))
        return self._counts()

    def update(self, rollouts: Sequence[Rollout]) -> tuple[Metrics, Credit, dict[str, Tensor] | None, int, int]:
        """Metrics and credit, the new weights where it is rank 0, the optimizer steps and the updates."""
        learner = self._made()
        metrics = learner.update(collect(rollouts, learner.config.truncated, learner.oldest))
        assert learner.credit is not None
        return metrics, learner.credit, self.weights() if self._rank == 0 else None, *self._counts()

    def weights(self) -> dict[str, Tensor]:
        return _on_cpu(merged_state_dict(self._made().policy))

    def state_dict(self) -> dict[str, Any]:
        return _on_cpu(self._made().state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> tuple[int, int]:
        self._made().load_state_dict(state)
        return self._counts()

    def _counts(self) -> tuple[int, int]:
        learner = self._made()
        return learner.step, learner.updates

    def _made(self) -> Learner:
        assert self._learner is not None, "join comes first"
        return self._learner


def _on_cpu(value: Any) -> Any:
    """Tensors in dicts, lists and tuples, copied where they would share memory with what is trained."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(x) for key, x in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        kind = type(cast(Sequence[Any], value))
        return kind(_on_cpu(x) for x in cast(Sequence[Any], value))  # pyright: ignore[reportCallIssue]
    return value
