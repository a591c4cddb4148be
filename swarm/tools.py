"""The seam between the loop and a tool.

A call is handled in two steps. `prepare` runs first, for the calls of a turn one after another
in call order, without waiting: whatever depends on order (creating a subagent, refusing
a duplicate) happens there. Then `run` runs for all of them at once. So results never depend
on which call finished first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from swarm.seeds import derive
from swarm.types import Task, ToolCall, ToolResult, ToolSpec
from swarm.workspace import Workspace


class CallContext(Struct, frozen=True, gc=False):
    """What a call may know of the agent that makes it.

    `agent` is the caller's lineage and `index` the call's place in the trace (unique in it);
    `left`: the critical steps that a child started by this call may spend; `agent_seed`: the caller's.
    """

    agent: str
    depth: int
    index: int
    agent_seed: int
    left: int
    task: Task
    workspace: Workspace

    @property
    def seed(self) -> int:
        """The call's own; most calls need none."""
        return derive(self.agent_seed, "call", self.index)


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that is not run: `kind` is counted, `reason` is what the policy reads."""

    kind: str
    reason: str


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        """Checks the call; returns the caller's workspace as it is after it was accepted."""
        ...

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult: ...
