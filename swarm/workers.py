"""Workers that make rollouts in processes of their own: what they are asked, and what they must be able to do.

Not here: who gets which request (`swarm.pool`), and the processes themselves (`swarm.cluster`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from swarm.checks import want
from swarm.types import Budget, Cast, Mixture, Rollout, Task

_want = partial(want, "cluster")


@dataclass(frozen=True, slots=True)
class Request:
    """A rollout to make: `Request(task, seed=7, budget=Budget(20, 4096), system="swarm")`.

    `system` names one of those that the roller has; `cast` says who its subagents are.
    """

    task: Task
    seed: int
    budget: Budget
    system: str = ""
    cast: Cast = field(default_factory=dict[str, Mixture])


class Roller(Protocol):
    """What makes rollouts in a worker's process: it owns the engines there, and runs in one trio loop."""

    async def roll(self, request: Request) -> Rollout: ...

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """Takes the policy's new weights; when it returns, they are in use."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """A sha256 of each of its engines' weights, as they are served."""
        ...


RollerFactory = Callable[[], AbstractAsyncContextManager[Roller]]
"""Opens a roller, in the worker's process; it must be picklable (a function of a module, or a dataclass)."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where the processes of a run are, and how long each is waited for.

    `address` is the `host:port` of a Ray cluster (`"auto"`: the one on this machine); "" starts one here that ends
    with the run. Each of `workers` and of `learners` is a process of its own on any node that has so many CPUs and
    GPUs left.

    A worker makes up to `at_once` rollouts at a time. A request is handed out `attempts` times at most, and every
    worker may fail to start as often before the run is ended. Seconds: without any worker having found room
    (`place_seconds`), from there to its engines being up (`start_seconds`), for new weights (`update_seconds`), for a
    learner's update (`learn_seconds`), and beside a rollout's own deadline (`grace_seconds`).
    """

    address: str = ""
    workers: int = 1
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    learners: int = 1
    learner_cpus: float = 1.0
    learner_gpus: float = 0.0
    at_once: int = 64
    attempts: int = 3
    place_seconds: float = 60.0
    start_seconds: float = 600.0
    update_seconds: float = 600.0
    learn_seconds: float = 3600.0
    grace_seconds: float = 60.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        reachable = self.address in ("", "auto") or (bool(host) and "/" not in host and port.isdecimal())
        _want("address", self.address, reachable, "'', 'auto' or host:port")
        for name in ("workers", "learners", "at_once", "attempts"):
            _want(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("worker_cpus", "learner_cpus"):
            _want(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        for name in ("worker_gpus", "learner_gpus"):
            _want(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("place_seconds", "start_seconds", "update_seconds", "learn_seconds", "grace_seconds"):
            _want(name, getattr(self, name), getattr(self, name) > 0, "more than 0")


class WorkerLost(Exception):
    """A worker died, cannot be reached or could not be started: another may do better. One line."""


class WorkerError(Exception):
    """What no other worker would do better, as a wrong program. The first line says it all; a traceback may follow."""


class ClusterError(WorkerError):
    """There is no Ray, no room, or no worker that starts: one line for the user."""


class Worker(Roller, Protocol):
    """A worker as the pool sees it. Everything awaited here raises WorkerLost; `roll`, `update` and `checksums`
    raise WorkerError for what the roller raised. `weights` are whatever the pool was given."""

    async def placed(self) -> None:
        """Returns when it has a process somewhere."""
        ...

    async def start(self) -> None:
        """Opens its roller."""
        ...

    async def lost(self) -> str:
        """Waits for its end, and says why."""
        ...

    def kill(self) -> None: ...
