"""Agents on trails: one policy, and three ways to keep its context, or none.

    compaction    the policy writes a summary, and goes on from it and its last steps
    truncation    the oldest steps are dropped
    full_window   a context large enough for all of it

Not here: training (`recipes.compaction.run`), tasks (`envs.trails`), what the policy says (`subagents.trails`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from envs.tools import Access, Search
from envs.world import World
from recipes.config import Limits
from swarm.chat import Chat
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness
from swarm.transcript import Policy, read
from swarm.types import Budget, Engine, Sampling

System = Literal["compaction", "truncation", "full_window"]
SYSTEMS: tuple[System, ...] = get_args(System)
SYSTEM = "Follow the trails."
FULL = 8192
"""Tokens of the large context."""


def limits_of(limits: Limits, system: System) -> Limits:
    """The limits of a system, given those of compaction: the same window, other rewriting; or a large window."""
    if system == "full_window":
        return replace(limits, context=FULL, rewriting=replace(limits.rewriting, kind="none"))
    return replace(limits, rewriting=replace(limits.rewriting, kind=system))


def agent(world: World, chat: Chat, engine: Engine, limits: Limits) -> Harness:
    """An agent with `search` and `access` whose memory is its context: rows that it writes are not kept for it."""
    return Harness(
        engine=engine,
        chat=chat,
        tools=(Search(world), Access(world)),
        system=SYSTEM,
        sampling=Sampling(limits.turn_tokens, limits.temperature, stop=chat.stop),
        budget=Budget(limits.steps, limits.context, limits.seconds),
        context=limits.rewriting,
        scratchpad=False,
    )


def scripted(chat: Chat, policy: Policy) -> ScriptedEngine:
    """An engine that says what a policy decides from the conversation's text."""

    def speak(ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        turn = policy(read(chat.decode(ids)))
        return chat.encode_turn(turn.content, turn.calls)

    return ScriptedEngine(speak)
