"""Who takes an agent from its first state to its end: `swarm.loop.run`, or something that looks on, or steps in.

A tool that runs agents takes its drive as an argument, so that a fork or a debugger reaches the agents of agents.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from swarm.loop import Harness, State
from swarm.tools import Tool
from swarm.types import Rollout

Drive = Callable[[Harness, State], Awaitable[Rollout]]


@runtime_checkable
class Spawner(Protocol):
    """A tool that runs agents."""

    def driven(self, drive: Drive) -> Tool:
        """The same tool, whose agents are driven so."""
        ...


def driven(harness: Harness, drive: Drive) -> Harness:
    """The harness, the agents that its tools run being driven so; those that these run are their drive's business."""
    return replace(harness, tools=tuple(t.driven(drive) if isinstance(t, Spawner) else t for t in harness.tools))
