"""The calls of one turn: checked in call order, then run all at once, their results in call order.

Not here: what a call costs, and what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio
from msgspec import Struct, structs

from swarm.tools import CallContext, Refused, Tool
from swarm.types import ToolCall, ToolResult, Turn
from swarm.workspace import Workspace

_PENDING = ToolResult(())
"""In the place of a result that a call is still to bring."""


class Accepted(Struct, frozen=True, gc=False):
    """A call that is to be run, and its place in the turn."""

    place: int
    tool: Tool
    call: ToolCall
    context: CallContext


class Checked(Struct, frozen=True, gc=False):
    """What comes of a turn's calls: the workspace after them, those to run, how many of these are ordinary, and
    for each call a result or its place."""

    workspace: Workspace
    accepted: tuple[Accepted, ...]
    ordinary: int
    results: list[ToolResult]

    @property
    def refused(self) -> tuple[int, ...]:
        """The places of the calls that are not run."""
        if len(self.accepted) == len(self.results):
            return ()
        return tuple([place for place, result in enumerate(self.results) if result is not _PENDING])


def prepare(tools: Mapping[str, Tool], turn: Turn, caller: CallContext) -> Checked:
    """Checks the calls of a turn, one after another.

    `tools`: by name. `caller`: the context of the turn's first call, in `left` the steps that the calls may spend.
    Ordinary calls beyond them are refused, and so are calls of unknown tools; each malformed call is a refusal
    at the end.
    """
    affordable, workspace, spent = caller.left, caller.workspace, 0
    child_left = affordable - max(1, min(_ordinary(tools, turn.calls), affordable))
    accepted: list[Accepted] = []
    results: list[ToolResult] = []
    for place, call in enumerate(turn.calls):
        tool = tools.get(call.name)
        results.append(_PENDING)
        if tool is None:
            results[place] = _refusal("unknown_tool", f"no tool {call.name[:40]!r}, have {', '.join(tools)}")
            continue
        if tool.spec.ordinary and spent >= affordable:
            results[place] = _refusal("over_budget", f"{affordable} steps were left for calls")
            continue
        context = structs.replace(caller, index=caller.index + place, left=child_left, workspace=workspace)
        prepared = tool.prepare(call, context)
        if isinstance(prepared, Refused):
            results[place] = _refusal(prepared.kind, prepared.reason)
            continue
        workspace = prepared
        spent += tool.spec.ordinary
        accepted.append(Accepted(place, tool, call, context))
    if turn.malformed:
        results += [_refusal("malformed_call", reason) for reason in turn.malformed]
    return Checked(workspace, tuple(accepted), spent, results)


async def run_all(checked: Checked) -> list[ToolResult]:
    """Runs the accepted calls at once; all results, each at its call's place."""
    results = list(checked.results)
    accepted = checked.accepted
    if len(accepted) == 1:  # a nursery would cost more than all the rest of a turn
        results[accepted[0].place] = await accepted[0].tool.run(accepted[0].call, accepted[0].context)
    if len(accepted) <= 1:
        return results

    async def run_one(a: Accepted) -> None:
        results[a.place] = await a.tool.run(a.call, a.context)

    async with trio.open_nursery() as nursery:
        for a in accepted:
            nursery.start_soon(run_one, a)
    return results


def _ordinary(tools: Mapping[str, Tool], calls: Sequence[ToolCall]) -> int:
    count = 0
    for call in calls:
        tool = tools.get(call.name)
        count += tool is not None and tool.spec.ordinary
    return count


def _refusal(kind: str, reason: str) -> ToolResult:
    return ToolResult((f"error: {reason}",), error=kind)
