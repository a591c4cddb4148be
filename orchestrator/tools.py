"""`create_subagent` and `assign_task`, named and described as Kimi K2.5 does (arXiv 2602.02276, E.8).

An assignment runs the one agent loop again, with a frozen engine and a context of its own.
What comes back is one message: bounded text, and the subagent's table as a handle. The
subagent's transcript stays in the rollout, never in the orchestrator's context.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from msgspec import structs

from swarm.drive import Drive
from swarm.loop import Subagent, Subagents, begin, run
from swarm.tools import CallContext, Refused
from swarm.types import Artifact, Rollout, ToolCall, ToolResult, ToolSpec
from swarm.workspace import Workspace

CREATE = ToolSpec(
    name="create_subagent",
    description="Create a custom subagent with specific system prompt and name for reuse.",
    parameters={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "Unique name for this agent configuration"},
            "system_prompt": {
                "type": "string",
                "description": "System prompt defining the agent's role, capabilities, and boundaries",
            },
        },
        "required": ["name", "system_prompt"],
    },
    ordinary=False,
)
ASSIGN = ToolSpec(
    name="assign_task",
    description=(
        "Launch a new agent.\nUsage notes:\n1. You can launch multiple agents concurrently whenever possible, "
        "to maximize performance;\n2. When the agent is done, it will return a single message back to you."
    ),
    parameters={
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "Specify which created agent to use."},
            "prompt": {"type": "string", "description": "The task for the agent to perform"},
        },
        "required": ["agent", "prompt"],
    },
    ordinary=False,
)
REFUSALS = ("unknown_agent", "duplicate_assignment", "empty_assignment", "over_limit", "depth_limit", "no_budget")
"""The kinds of refused assignments, as the ledger counts them."""

_REFERENCE = re.compile(r"#(?:rows|\d+(?:\.[a-zA-Z])?)")


@dataclass(frozen=True, slots=True)
class SpawnLimits:
    """How far spawning may go: names an agent may create, assignments in a trace, depth, reply length."""

    agents: int = 8
    assignments: int = 20
    depth: int = 1
    reply_chars: int = 2000

    def __post_init__(self) -> None:
        for name in ("agents", "assignments", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"spawn limits: {name} = {getattr(self, name)}, want 1 or more")


def _strings(call: ToolCall, *names: str) -> list[str] | Refused:
    values = [call.arguments.get(n) for n in names]
    if all(isinstance(v, str) for v in values):
        return [str(v).strip() for v in values]
    return Refused("bad_arguments", f"{call.name} wants strings: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class CreateSubagent:
    """Registers a name and its system prompt in the caller's roster."""

    limits: SpawnLimits
    spec: ToolSpec = CREATE

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        values = _strings(call, "name", "system_prompt")
        if isinstance(values, Refused):
            return values
        name, system = values
        roster = context.workspace.roster
        if not name:
            return Refused("bad_arguments", "create_subagent wants a name")
        if name in roster:
            return Refused("duplicate_agent", f"agent {name[:40]!r} exists")
        if len(roster) >= self.limits.agents:
            return Refused("over_limit", f"at most {self.limits.agents} agents")
        return structs.replace(context.workspace, roster={**roster, name: system})

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        return ToolResult(("created",))


@dataclass(frozen=True, slots=True)
class AssignTask:
    """Runs a created subagent on a prompt. `subagent` says who that is, from a name and the assignment's seed, and
    `drive` takes it to its end.

    Handles named in the prompt are written out for the subagent, which shares nothing else.
    """

    subagent: Subagents
    limits: SpawnLimits
    spec: ToolSpec = ASSIGN
    drive: Drive = run

    def driven(self, drive: Drive) -> AssignTask:
        """See `Spawner`."""
        return replace(self, drive=drive)

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        values = _strings(call, "agent", "prompt")
        if isinstance(values, Refused):
            return values
        name, prompt = values
        ws = context.workspace
        refusals = (
            (name not in ws.roster, "unknown_agent", f"no agent {name[:40]!r}, create it first"),
            (not prompt, "empty_assignment", "the prompt is empty"),
            ((name, prompt) in ws.assigned, "duplicate_assignment", "this was assigned before"),
            (
                len(ws.assigned) >= self.limits.assignments,
                "over_limit",
                f"at most {self.limits.assignments} assignments",
            ),
            (context.depth >= self.limits.depth, "depth_limit", f"agents at depth {context.depth} spawn none"),
            (context.left < 2, "no_budget", "too few steps are left"),
        )
        for refused, kind, reason in refusals:
            if refused:
                return Refused(kind, reason)
        return structs.replace(ws, assigned=(*ws.assigned, (name, prompt)))

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        name, prompt = str(call.arguments["agent"]).strip(), str(call.arguments["prompt"]).strip()
        who = self.subagent(name, context.seed)
        harness = who.harness
        budget = replace(harness.budget, critical_steps=min(harness.budget.critical_steps, context.left))
        state = begin(
            harness,
            context.task,
            context.seed,
            budget=budget,
            agent=f"{context.agent}/{context.index}:{name}",
            depth=context.depth + 1,
            system=context.workspace.roster[name] if who.system is None else who.system,
            prompt=context.workspace.expand(prompt),
            workspace=context.workspace.child(),
        )
        child = await self.drive(harness, state)
        return ToolResult(self._message(child, who), error=_failure(child), child=child)

    def _message(self, child: Rollout, who: Subagent) -> tuple[str | Artifact, ...]:
        prose = " ".join(_REFERENCE.sub("", line) for line in child.answer.splitlines() if not line.startswith("|"))
        text = " ".join(prose.split())[: self.limits.reply_chars]
        if who.reply_tokens:
            text = who.harness.chat.clipped(text, who.reply_tokens)
        if child.trace.status == "error":
            text = "error: the subagent failed"
        if child.table:
            table = Artifact(title=child.trace.agent, rows=child.table)
            return (table, f"\n{text}") if text else (table,)
        return (text or "none",)


def _failure(child: Rollout) -> str:
    return {"error": "subagent_error", "truncated": "subagent_truncated"}.get(child.trace.status, "")
