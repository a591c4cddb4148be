"""A run's rollouts made by workers on a cluster: each opens the run's job in a process of its own, with engines of its
own, and rolls out what it is asked to.

    collector ── requests ──▶ worker: job, engines ──▶ rollouts, as they would be made here
    learner ── weights ─────▶ every worker, which must then serve what this process serves

Workers find checkpoints and caches by the same paths as this process: on several machines, in a shared folder. Not
here: who gets which request and what follows when a worker is lost (`swarm.pool`), rewards and evaluation.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerFast

from recipes.config import Training
from recipes.session import load_tokenizer
from swarm.cluster import Cluster
from swarm.seeds import derive
from swarm.types import Budget, Cast, Rollout, Runner, ServingEngine, Task
from swarm.workers import ClusterConfig, Request, Roller

R = TypeVar("R", bound=Training)
POLICY = "policy"
NOBODY: Cast = MappingProxyType({})


class Rolling(Protocol):
    """What a worker needs of a job."""

    @property
    def engine(self) -> ServingEngine:
        """The engine of the policy that is trained."""
        ...

    def harness(self) -> Runner:
        """The system that is trained, on engines of this process."""
        ...

    async def recast(self, cast: Cast) -> None:
        """Makes this the whole cast from the next spawn on; an empty one changes nothing."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """sha256 of all weights as they are served, by name; the trained policy's is "policy"."""
        ...


Opens = Callable[[R, PreTrainedTokenizerFast], AbstractAsyncContextManager[Rolling]]


@dataclass(frozen=True, slots=True)
class JobRoller:
    """A `Roller` of a job that is open."""

    job: Rolling

    async def roll(self, request: Request) -> Rollout:
        await self.job.recast(request.cast)
        return await self.job.harness().roll(request.task, request.seed, request.budget)

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        await self.job.engine.update(weights, version)

    async def checksums(self) -> Mapping[str, str]:
        return await self.job.checksums()


@dataclass(frozen=True, slots=True)
class OpenJob(Generic[R]):
    """Opens a recipe's job in a worker: a `RollerFactory`. `folder` is where relative paths begin."""

    open: Opens[R]
    recipe: R
    folder: Path

    def __call__(self) -> AbstractAsyncContextManager[Roller]:
        return self._opened()

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[JobRoller]:
        os.chdir(self.folder)
        place = self.recipe.placement
        recipe = replace(
            self.recipe, threads=max(1, int(place.worker_cpus)), placement=replace(place, workers=0, learners=1)
        )
        async with self.open(recipe, load_tokenizer(recipe.start)) as job:
            yield JobRoller(job)


@asynccontextmanager
async def open_workers(opens: Opens[R], recipe: R) -> AsyncGenerator[Cluster | None]:
    """The workers that the placement asks for; None for none. Raises ClusterError where Ray cannot be reached."""
    if not recipe.placement.workers:
        yield None
        return
    async with Cluster(cluster_config(recipe), OpenJob(opens, recipe, Path.cwd())) as cluster:
        yield cluster


def cluster_config(recipe: Training) -> ClusterConfig:
    """The rollouts that are made at once are those of all workers together."""
    place = recipe.placement
    return ClusterConfig(
        address=place.address,
        workers=max(1, place.workers),
        worker_cpus=place.worker_cpus,
        worker_gpus=place.worker_gpus,
        learners=place.learners,
        learner_cpus=place.learner_cpus,
        learner_gpus=place.learner_gpus,
        at_once=-(-recipe.at_once // max(1, place.workers)),
    )


def requests_of(
    limits: Budget, tasks: Sequence[Task], budgets: Sequence[int], seed: int, cast: Cast = NOBODY
) -> list[Request]:
    """One request a task, with the budget of critical steps and the seed that `recipes.session.roll_out` gives it."""
    return [
        Request(task, derive(seed, "rollout", k), Budget(steps, limits.tokens, limits.seconds), cast=cast)
        for k, (task, steps) in enumerate(zip(tasks, budgets, strict=True))
    ]


async def publish(cluster: Cluster, weights: Mapping[str, Any], version: int, served: Mapping[str, str]) -> None:
    """Gives all workers the weights. `served` are the checksums of this process, whose policy was compared with the
    learner. Raises RuntimeError where a worker then serves something else. A checkpoint that only one side has up, for
    a cast that was or will be, is nothing to compare.
    """
    await cluster.update(weights, version)
    for sums in await cluster.checksums():
        for name in sorted({POLICY, *(served.keys() & sums.keys())}):
            here, there = served.get(name, "nothing"), sums.get(name, "nothing")
            if here != there:
                seen = f"sha256 {there[:12]}, want {here[:12]} as in this process"
                raise RuntimeError(f"update to version {version}: a worker serves {name!r} with {seen}")
