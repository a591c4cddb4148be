"""The calls of one turn: checked in call order, then run all at once, their results in call order.

Not here: what a call costs, and what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio
from msgspec import Struct, structs

from swarm.seeds import derive
from swarm.tools import CallContext, Refused, Tool
from swarm.types import ToolCall, ToolResult, Turn
from swarm.workspace import Workspace

_PENDING = ToolResult(())
"""In the place of a result that a call is still to bring."""


class Accepted(Struct, frozen=True):
    """A call that is to be run, and its place in the turn."""

    place: int
    tool: Tool
    call: ToolCall
    context: CallContext


def prepare(
    tools: Sequence[Tool], turn: Turn, caller: CallContext
) -> tuple[Workspace, tuple[Accepted, ...], list[ToolResult]]:
    """The workspace after all calls were checked, those to run, and a result (or its place) for each.

    `caller`: the agent's own seed, the index of the turn's first call, and in `left` the steps that the calls may
    spend. Ordinary calls beyond them are refused, and so are calls of unknown tools; each malformed call is
    a refusal at the end.
    """
    known = [_named(tools, c.name) for c in turn.calls]
    affordable, ordinary = caller.left, sum(t is not None and t.spec.ordinary for t in known)
    child_left = affordable - max(1, min(ordinary, affordable))
    workspace, spent = caller.workspace, 0
    accepted: list[Accepted] = []
    results: list[ToolResult] = []
    for place, (call, tool) in enumerate(zip(turn.calls, known, strict=True)):
        results.append(_PENDING)
        if tool is None:
            have = ", ".join(t.spec.name for t in tools)
            results[place] = _refusal("unknown_tool", f"no tool {call.name[:40]!r}, have {have}")
            continue
        if tool.spec.ordinary and spent >= affordable:
            results[place] = _refusal("over_budget", f"{affordable} steps were left for calls")
            continue
        index = caller.index + place
        seed = derive(caller.seed, "call", index)
        context = structs.replace(caller, index=index, seed=seed, left=child_left, workspace=workspace)
        prepared = tool.prepare(call, context)
        if isinstance(prepared, Refused):
            results[place] = _refusal(prepared.kind, prepared.reason)
            continue
        workspace = prepared
        spent += tool.spec.ordinary
        accepted.append(Accepted(place, tool, call, context))
    results += [_refusal("malformed_call", reason) for reason in turn.malformed]
    return workspace, tuple(accepted), results


async def run_all(accepted: Sequence[Accepted], results: Sequence[ToolResult]) -> list[ToolResult]:
    """Runs the accepted calls at once; the results, each at its call's place."""
    out = list(results)
    if len(accepted) == 1:  # a nursery would cost more than all the rest of a turn
        out[accepted[0].place] = await accepted[0].tool.run(accepted[0].call, accepted[0].context)
    if len(accepted) <= 1:
        return out

    async def run_one(a: Accepted) -> None:
        out[a.place] = await a.tool.run(a.call, a.context)

    async with trio.open_nursery() as nursery:
        for a in accepted:
            nursery.start_soon(run_one, a)
    return out


def _named(tools: Sequence[Tool], name: str) -> Tool | None:
    for tool in tools:
        if tool.spec.name == name:
            return tool
    return None


def _refusal(kind: str, reason: str) -> ToolResult:
    return ToolResult((f"error: {reason}",), error=kind)
