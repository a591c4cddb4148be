"""The ways to run a recipe's agent on a task, by name; what a grid compares, and what a mixture draws from.

    orchestrator             the swarm, on the policy's engine
    single                   one agent and one window
    compaction, truncation   one agent, its context rewritten as the recipe says
    react, supervisor        LangGraph's prebuilt agent with the recipe's tools; a lead with workers   recipes.graphs
    program                  any agent program, over the gateway, with the recipe's tools              swarm.gateway
    floor, ceiling           scripts, which have no weights and are not trained

A way is a function of the open session that gives a `Runner` for as long as its context lasts. Here is the one place
where somebody else's agents are plugged in. Not here: what is measured (`recipes.grid.cells`).
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import trio

from recipes.config import HarnessName, Recipe
from recipes.graphs import react, supervisor
from recipes.named import resolve
from recipes.session import Session
from swarm.checkpoint import ref_of
from swarm.context import ContextPolicy
from swarm.gateway import Gateway, serving
from swarm.gateway_agent import CommandAgent
from swarm.graphs import GraphRunner
from swarm.loop import Harness
from swarm.seeds import derive
from swarm.types import Budget, Rollout, Runner, Task

Way = Callable[[Session], AbstractAsyncContextManager[Runner]]
Weights = Literal["policy", "start", ""]
"""Whose they are: the trained policy's, those that training started from, or nobody's, for a script."""


def native(make: Callable[[Session], Runner]) -> Way:
    """A way that needs nothing to be opened."""
    return lambda s: nullcontext(make(s))


def _rewriting(s: Session) -> Runner:
    return s.builder.single(s.engine)


def _single(s: Session) -> Harness:
    return replace(s.builder.single(s.engine), context=ContextPolicy())


def _own(s: Session) -> Harness:
    """The recipe's own for somebody else's loop, which keeps its context itself."""
    return replace(s.harness(), context=ContextPolicy())


@asynccontextmanager
async def _program(s: Session) -> AsyncGenerator[Runner]:
    async with serving(Gateway()) as gateway:
        yield CommandAgent(gateway, _own(s), s.recipe.program)


HARNESSES: dict[HarnessName, Way] = {
    "orchestrator": native(Session.swarm),
    "single": native(_single),
    "compaction": native(_rewriting),
    "truncation": native(_rewriting),
    "react": native(lambda s: GraphRunner(react, _own(s))),
    "supervisor": native(lambda s: GraphRunner(supervisor, _single(s))),
    "program": _program,
}
"""Those whose policy is the recipe's."""
SCRIPTS: Mapping[str, Way] = {
    "floor": native(lambda s: s.builder.floor()),
    "ceiling": native(lambda s: s.builder.ceiling()),
}
WAYS: Mapping[str, Way] = {**HARNESSES, **SCRIPTS}


# --- a mixture -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mixed:
    """A `Runner` of several: each rollout is made by one, drawn by its seed and named in it.

    `Mixed({"orchestrator": a, "single": b}, {"orchestrator": 3, "single": 1})`. Its budget holds the largest of each
    limit; a rollout has the tokens and seconds of the runner that makes it.
    """

    runners: Mapping[str, Runner]
    weights: Mapping[str, float]

    @property
    def budget(self) -> Budget:
        limits = [r.budget for r in self.runners.values()]
        most = [max(getattr(b, name) for b in limits) for name in ("critical_steps", "tokens", "seconds")]
        return Budget(*most)

    def fits(self, task: Task) -> str:
        return next((f"{name}: {why}" for name, r in self.runners.items() if (why := r.fits(task))), "")

    def drawn(self, seed: int) -> str:
        """Who makes the rollout of a seed: the same whatever the order of the names."""
        names = sorted(self.weights)
        return random.Random(derive(seed, "harness")).choices(names, [self.weights[n] for n in names])[0]

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        name = self.drawn(seed)
        runner = self.runners[name]
        own = Budget(budget.critical_steps, runner.budget.tokens, runner.budget.seconds)
        return replace(await runner.roll(task, seed, own), harness=name)


@asynccontextmanager
async def trained(s: Session, ways: Mapping[HarnessName, Way] = HARNESSES) -> AsyncGenerator[Runner]:
    """What the recipe is trained through: its own harness, or the mixture that it names."""
    if not s.recipe.harnesses:
        yield s.harness()
        return
    async with AsyncExitStack() as stack:
        runners: dict[str, Runner] = {
            name: await stack.enter_async_context(ways[name](s)) for name in s.recipe.harnesses
        }
        yield Mixed(runners, {**s.recipe.harnesses})


# --- systems ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class System:
    """A harness and whose weights are in its policy: `System("cold_start", "orchestrator", "start")`."""

    name: str
    harness: str
    weights: Weights


def systems_of(recipe: Recipe) -> dict[str, System]:
    """The systems that have a name of their own, in the order of every table, whether they fit the recipe or not."""
    alone: Weights = "start" if recipe.spawn else "policy"
    systems = (
        System("single_agent", recipe.alone, alone),
        System("cold_start", "orchestrator", "start"),
        System("swarm", "orchestrator", "policy"),
        System("floor", "floor", ""),
        System("ceiling", "ceiling", ""),
    )
    return {system.name: system for system in systems}


async def load(s: Session, system: System, policy: Path) -> None:
    """Puts the system's weights into the policy's engine; `policy` is the folder of the trained ones."""
    if system.weights:
        folder = policy if system.weights == "policy" else resolve(str(s.recipe.start))
        await s.engine.load(await trio.to_thread.run_sync(ref_of, folder))
