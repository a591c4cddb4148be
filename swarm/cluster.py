# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Rollout workers and learners as Ray actors, on one machine or on many.

    trio here:  Pool ─▶ _RayWorker ─▶ ref ─ ─ ─▶ RollerActor (asyncio, Ray's thread) ─▶ roller (trio, a thread)
                                  ▲   the answer, by a callback that wakes trio ┘

Placement is Ray's, by the CPUs and GPUs that a process asks for. Weights are put in the object store once and every
worker takes them from there. Ray's own restarts are off: a worker that Ray started again would have no weights, so
`swarm.pool` starts it. The nodes need this package and what the roller's factory names.

Not here: who gets which request (`swarm.pool`), what runs in the processes (`swarm.actors`), what learners do
(`swarm.rl.group`).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Self

import trio

from swarm.actors import Answer, RankActor, RollerActor
from swarm.pool import Pool, PoolStats
from swarm.rl.ranks import LearnerError, LearnerLost, RankFactory
from swarm.types import Rollout
from swarm.workers import ClusterConfig, ClusterError, Request, RollerFactory, WorkerError, WorkerLost

_REACH_SECONDS = 10.0

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A machine that is busy takes longer than Ray's 30 s.
    "RAY_raylet_start_wait_time_s": "180",
}
"""Read by Ray when it is imported."""


def _ray() -> Any:
    """Ray, an optional extra. Raises ClusterError where it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as e:
        raise ClusterError(f"cluster: ray cannot be imported ({e}), want `pip install 'swarm-rl[ray]'`") from e
    return ray


def connect(config: ClusterConfig) -> bool:
    """Joins the cluster at `config.address`, or starts one on this machine; whether it did so now.

    To be called from the main thread: what Ray starts ends with the thread that started it, however that ends (two
    helpers of Ray's own about a minute later). Raises ClusterError.
    """
    ray = _ray()
    if ray.is_initialized():
        return False
    where = {"address": config.address} if config.address else {"address": "local", "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _reach(config.address)
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as e:  # the boundary: Ray raises bare ones where it does not come up
        raise ClusterError(f"cluster: no Ray at {config.address or 'this machine'}: {_line(e)}") from e
    finally:
        # Ray's own handler raises wherever the program is, in trio's internals too.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return True


def _reach(address: str) -> None:
    """Raises OSError where nobody listens; Ray itself would look for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()


def disconnect() -> None:
    """Leaves the cluster; one that was started here is stopped."""
    _ray().shutdown()


def resources() -> dict[str, float]:
    """What the cluster has in all, taken or not: `{"CPU": 192.0, "GPU": 16.0}` and more by Ray's names."""
    return dict(_ray().cluster_resources())


def room(config: ClusterConfig, who: str) -> str:
    """What each worker or learner asks for, and what the cluster has, in words."""
    ray = _ray()
    asked, there, free = _asked(config, who), ray.cluster_resources(), ray.available_resources()
    count = config.workers if who == "worker" else config.learners
    wanted = ", ".join(f"{x:g} {name}" for name, x in asked.items() if x)
    has = ", ".join(f"{there.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in asked)
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"asked {wanted} for each of {count} {who}s, the cluster of {nodes} nodes has {has}"


def _asked(config: ClusterConfig, who: str) -> dict[str, float]:
    if who == "worker":
        return {"CPU": config.worker_cpus, "GPU": config.worker_gpus}
    return {"CPU": config.learner_cpus, "GPU": config.learner_gpus}


def actor(kind: type, config: ClusterConfig, who: str, **more: object) -> Any:
    """The class as a Ray actor that is placed by what it asks for, with as many threads as CPUs."""
    asked = _asked(config, who)
    threads = str(max(1, int(asked["CPU"])))
    return (
        _ray()
        .remote(kind)
        .options(
            num_cpus=asked["CPU"],
            num_gpus=asked["GPU"],
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
            **more,
        )
    )


class Cluster:
    """`async with Cluster(config, factory) as cluster: rollouts = await cluster.roll_out(requests)`.

    Workers that make rollouts with the rollers of `factory`, opened in their processes. Nothing of it outlives the
    block. Raises ClusterError where Ray cannot be reached, ValueError for a factory that cannot be sent.
    """

    def __init__(self, config: ClusterConfig, factory: RollerFactory) -> None:
        self.config = config
        try:
            pickle.dumps(factory)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ValueError(f"cluster: factory = {factory!r}, want one that can be pickled: {e}") from e
        self._factory = factory

    async def __aenter__(self) -> Self:
        self._ours = connect(self.config)
        sent = _ray().put(self._factory)
        words = partial(room, self.config, "worker")
        self._pool = Pool(partial(_RayWorker, self.config, sent), self.config, words)
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._pool.__aexit__(kind, error, trace)
        finally:
            if self._ours:
                disconnect()

    @property
    def stats(self) -> PoolStats:
        return self._pool.stats

    async def up(self, count: int) -> None:
        """See `Pool.up`."""
        await self._pool.up(count)

    async def roll_out(
        self, requests: Sequence[Request], done: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """See `Pool.roll_out`."""
        return await self._pool.roll_out(requests, done)

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """Puts tensors in the object store once, for every worker; see `Pool.update`."""
        stored = await trio.to_thread.run_sync(_ray().put, dict(weights))
        await self._pool.update(stored, version)

    async def checksums(self) -> list[Mapping[str, str]]:
        """See `Pool.checksums`."""
        return await self._pool.checksums()


class RayRanks:
    """The `Ranks` of a learner group as actors: `LearnerGroup(RayRanks(config, factory), config.learners, seconds)`.

    To be called from the main thread. Raises ClusterError where Ray cannot be reached or has no room for all of them.
    """

    def __init__(self, config: ClusterConfig, factory: RankFactory) -> None:
        self._ours = connect(config)
        kind = actor(RankActor, config, "learner")
        self._actors = [kind.remote(factory, rank, _ray().util.get_node_ip_address) for rank in range(config.learners)]
        ray = _ray()
        _, waiting = ray.wait([a.placed.remote() for a in self._actors], num_returns=config.learners,
                              timeout=config.place_seconds)  # fmt: skip
        if waiting:
            words = room(config, "learner")
            self.close()
            raise ClusterError(f"cluster: no room for all learners in {config.place_seconds:.0f} s: {words}")

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `Ranks`."""
        ray = _ray()
        refs = [a.ask.remote(method, *given) for a, given in zip(self._actors, arguments, strict=False)]
        deadline, waiting = monotonic() + seconds, refs
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=max(0.0, deadline - monotonic()))
            if not ended:
                raise LearnerLost(f"learners: {method} was not done after {seconds:.0f} s")
            for ref in ended:
                self._check(refs.index(ref), ref)
        return [answer.value for answer in ray.get(refs)]

    def _check(self, rank: int, ref: Any) -> None:
        ray, who = _ray(), f"learners: rank {rank} of {len(self._actors)}"
        try:
            answer: Answer = ray.get(ref)
        except ray.exceptions.RayError as e:
            raise LearnerLost(f"{who} died: {_line(e)}") from e
        if answer.error:
            raise LearnerError(f"{who} raised {answer.error}\n{answer.trace}")

    def close(self) -> None:
        for one in self._actors:
            _ray().kill(one)
        self._actors = []
        if self._ours:
            self._ours = False
            disconnect()


# --- on this side ----------------------------------------------------------------------


class _RayWorker:
    """A `Worker` of the pool. Where the roller raised, that is a wrong program; all else that goes wrong is a loss."""

    def __init__(self, config: ClusterConfig, factory: Any) -> None:
        self._factory = factory
        kind = actor(RollerActor, config, "worker", max_concurrency=config.at_once + 8, scheduling_strategy="SPREAD")
        self._actor = kind.remote()

    async def placed(self) -> None:
        await _answer(self._actor.placed.remote())

    async def start(self) -> None:
        cause = await _answer(self._actor.start.remote(self._factory))
        if cause:
            raise WorkerLost(cause)

    async def lost(self) -> str:
        try:
            return await _answer(self._actor.lost.remote())
        except WorkerLost as e:
            return str(e)

    async def roll(self, request: Request) -> Rollout:
        return await self._ask("roll", request)

    async def update(self, weights: Any, version: int) -> None:
        await self._ask("update", weights, version)

    async def checksums(self) -> Mapping[str, str]:
        return await self._ask("checksums")

    def kill(self) -> None:
        _ray().kill(self._actor)

    async def _ask(self, method: str, *arguments: object) -> Any:
        answer: Answer = await _answer(self._actor.ask.remote(method, *arguments))
        if answer.lost:
            raise WorkerLost(answer.error)
        if answer.error:
            raise WorkerError(f"a worker's {method} raised {answer.error}\n{answer.trace}")
        return answer.value


async def _answer(ref: Any) -> Any:
    """The value behind a reference; the call is cancelled when this is. Raises WorkerLost and WorkerError."""
    ray, token, done = _ray(), trio.lowlevel.current_trio_token(), trio.Event()

    def wake(_: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future = ref.future()
    future.add_done_callback(wake)
    try:
        await done.wait()
    finally:
        if not done.is_set():
            ray.cancel(ref)
    try:
        return future.result()
    except ray.exceptions.RayTaskError as e:
        raise WorkerError(f"a worker raised {_last(str(e))}\n{e}") from e
    except ray.exceptions.RayError as e:
        raise WorkerLost(_line(e)) from e


def _line(error: Exception) -> str:
    """What a message of Ray says, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    telling = [line for line in lines if line.startswith("The actor is dead because")] or lines
    return telling[0].partition(" Some common causes")[0].strip()[:300]


def _last(text: str) -> str:
    """The last line of a traceback."""
    return text.strip().splitlines()[-1] if text.strip() else "nothing"
