"""The systems that are trained and compared, each the one agent loop with other tools and engines.

single agent   search, access                                      trained engine
swarm          search, access, create_subagent, assign_task        trained engine; a roster of frozen subagents
floor          the swarm's tools, a script that answers at once
ceiling        the swarm's tools, scripts for both roles
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.tools import Access, Search
from envs.world import World
from orchestrator.scripted import Style, empty, orchestrate
from orchestrator.tools import AssignTask, CreateSubagent
from recipes.config import Limits, Recipe
from subagents.roster import Role
from subagents.scripted import read_table
from swarm.chat import Chat
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness, Subagent, Subagents
from swarm.tools import Tool
from swarm.transcript import Policy, read
from swarm.types import Budget, Engine, Sampling

SYSTEM = "Fill the table."


@dataclass(frozen=True, slots=True)
class Builder:
    """What all systems of a run share: the world, the language and the limits."""

    world: World
    chat: Chat
    recipe: Recipe

    def single(self, engine: Engine) -> Harness:
        """An agent with `search` and `access` only."""
        return self._harness(engine, self._reading(), self.recipe.main)

    def swarm(self, engine: Engine, subagents: Subagents) -> Harness:
        """An orchestrator over these subagents."""
        limits = self.recipe.spawning
        spawning = (CreateSubagent(limits), AssignTask(subagents, limits))
        return self._harness(engine, (*self._reading(), *spawning), self.recipe.main)

    def roles(self) -> dict[str, Role]:
        """How the roles of the recipe are run, by name; their engines come with those who play them."""
        return {name: self._role(name) for name in {"": "", **self.recipe.roles}}

    def everybody(self, engine: Engine) -> Subagents:
        """Subagents of any name on one engine."""
        child = Subagent(self._harness(engine, self._reading(), self.recipe.child))
        return lambda name, seed: child

    def _role(self, name: str) -> Role:
        settings = self.recipe.role(name)
        limits = replace(self.recipe.child, **settings.limits)
        harness = self._harness(self.scripted(empty), self._reading(), limits)
        return Role(harness, settings.system or None, settings.reply_tokens)

    def scripted(self, policy: Policy) -> ScriptedEngine:
        """An engine that says what a policy decides from the conversation's text."""

        def speak(ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            turn = policy(read(self.chat.decode(ids)))
            return self.chat.encode_turn(turn.content, turn.calls)

        return ScriptedEngine(speak)

    def ceiling(self) -> Harness:
        """Oracle-parallel: splits every list as wide as it may, over faultless readers."""
        return self.swarm(self.scripted(orchestrate(Style())), self.everybody(self.scripted(read_table)))

    def floor(self) -> Harness:
        """Answers at once, with nothing."""
        return self.swarm(self.scripted(empty), self.everybody(self.scripted(empty)))

    def _reading(self) -> tuple[Tool, ...]:
        return (Search(self.world), Access(self.world))

    def _harness(self, engine: Engine, tools: tuple[Tool, ...], limits: Limits) -> Harness:
        sampling = Sampling(limits.turn_tokens, limits.temperature, stop=self.chat.stop)
        budget = Budget(limits.steps, limits.context, limits.seconds)
        return Harness(engine, self.chat, tools, SYSTEM, sampling, budget, limits.rewriting)
