"""A record as an engine and as tools: what lets the loop go through a recorded agent's turns again.

    Recorded(trace) ── engine: says what was said ── tools: give back what came ── then `steps` drives the loop

Not here: comparing (`swarm.replay`), and what follows the record (`swarm.fork`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from swarm.loop import Harness, State, step
from swarm.seeds import derive
from swarm.terms import Budget, Sampling, Setup, ToolSpec
from swarm.tools import CallContext, Refused, Tool
from swarm.types import (
    Act,
    Completion,
    EngineError,
    Rollout,
    Segment,
    Span,
    ToolCall,
    ToolResult,
    Trace,
)
from swarm.workspace import Workspace

GIVEN = -1
"""The version of tokens that no weights said: a fork put them in the agent's mouth."""
NO_RECORD = ToolResult(("no record of this call",), error="no_record")
Child = Callable[[Rollout, CallContext], Awaitable[Rollout]]
"""What stands for a recorded child where its assignment is met again."""


class RecordGap(ValueError):
    """A record that lacks what it takes to go through it again; the message is one line for the user."""


def lacks(rollout: Rollout) -> str:
    """Why a rollout cannot be gone through again, in a few words; nothing where it can."""
    trace = rollout.trace
    if trace.setup is None:
        return f"{trace.agent}: its record has no setup and no results of calls, as those of the native loop have"
    return next((why for why in map(lacks, rollout.children) if why), "")


@dataclass(frozen=True, slots=True)
class Returned:
    """What one call gave back, whether it was refused instead of run, and the child that it ran."""

    result: ToolResult
    refused: bool = False
    child: Rollout | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One agent's record, by turn and by call: an `Engine` that says the turns again, whatever it is asked.

    Raises RecordGap for a record that `lacks`, or whose parts do not agree.
    """

    rollout: Rollout
    setup: Setup = field(init=False)
    said: dict[int, Completion] = field(init=False)
    returned: tuple[Returned, ...] = field(init=False)

    def __post_init__(self) -> None:
        trace = self.rollout.trace
        if trace.setup is None:
            raise RecordGap(lacks(self.rollout))
        # A turn is known by the seed that the loop draws it with, so that this engine needs no memory.
        seeds = [derive(trace.setup.seed, k) for k in range(len(trace.acts))]
        object.__setattr__(self, "setup", trace.setup)
        object.__setattr__(self, "said", dict(zip(seeds, turns_of(trace), strict=True)))
        object.__setattr__(self, "returned", _returned(self.rollout))

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Raises EngineError where the record ends, with the error that ended it if one did."""
        if sampling.seed not in self.said:
            raise EngineError(self.rollout.trace.error or "the record ends here")
        return self.said[sampling.seed]

    async def load(self, ref: object) -> None:
        raise EngineError("a record has no weights")

    def at(self, index: int) -> Returned | None:
        """What the call at this place of the trace gave back; None behind the last."""
        return self.returned[index] if index < len(self.returned) else None

    def budget(self, turn: int) -> Budget:
        """The budget that the agent had when this turn was due."""
        return next((budget for until, budget in self.setup.earlier if turn < until), self.setup.budget)


@dataclass(frozen=True, slots=True)
class KeptTool:
    """Gives back what came, `at` a call's place in the trace. `tool`: the one whose calls these were, if it is at hand,
    for what they do to a workspace; it runs those for which nothing came.
    """

    spec: ToolSpec
    at: Callable[[int], Returned | None]
    child: Child
    tool: Tool | None = None

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        came = self.at(context.index)
        if came is not None and came.refused:
            return Refused(came.result.error, "".join(map(str, came.result.parts)).removeprefix("error: "))
        prepared = context.workspace if self.tool is None else self.tool.prepare(call, context)
        return context.workspace if came is not None and isinstance(prepared, Refused) else prepared

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        came = self.at(context.index)
        if came is None:
            return NO_RECORD if self.tool is None else await self.tool.run(call, context)
        if came.child is None:
            return came.result
        return structs.replace(came.result, child=await self.child(came.child, context))


async def steps(harness: Harness, state: State, record: Recorded, turns: int) -> list[State]:
    """The states before the agent's first `turns` turns, and the one after them; fewer where it ends before.

    `harness` has the record for engine and tools. The clock is the record's.
    """
    states = [state]
    for k in range(turns):
        if state.status != "running":
            break
        state = await retaken(
            harness, structs.replace(state, budget=record.budget(k + 1)), record.rollout.trace.acts[k]
        )
        states.append(state)
    return states


async def retaken(harness: Harness, state: State, act: Act) -> State:
    """One turn again, with the clock of its record; ids that were given are no sampled ones."""
    after = await step(harness, state)
    if len(after.acts) == len(state.acts):
        return after
    mine = structs.replace(after.acts[-1], seconds=act.seconds, calling=act.calling)
    after = structs.replace(after, acts=(*after.acts[:-1], mine))
    return given(after, act.given) if act.given else after


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn stands in a trace: its segment, the place of its first span in it, and its spans."""

    segment: int
    span: int
    spans: tuple[Span, ...]


def places_of(trace: Trace) -> list[Place]:
    """Where each turn stands. Raises RecordGap where the spans hold other ids than the acts count."""
    flat = [(k, j, span) for k, segment in enumerate(trace.segments) for j, span in enumerate(segment.spans)]
    found: list[Place] = []
    at = 0
    for turn, act in enumerate(trace.acts):
        while at < len(flat) and act.sampled and not _begins(flat[at][2], act):
            at += 1
        first, ids = at, 0
        while at < len(flat) and ids < act.sampled and flat[at][2].kind != "prompt":
            ids += len(flat[at][2].ids)
            at += 1
        if ids != act.sampled:
            raise RecordGap(f"{trace.agent}: turn {turn} has {ids} sampled ids in its spans, want {act.sampled}")
        segment, span, _ = flat[first] if first < len(flat) else (len(trace.segments) - 1, len(flat), None)
        found.append(Place(segment, span, tuple([s for _, _, s in flat[first:at]])))
    return found


def turns_of(trace: Trace) -> list[Completion]:
    """What an engine said, turn by turn. Raises RecordGap as `places_of` does."""
    return [_completion(place.spans, act) for place, act in zip(places_of(trace), trace.acts, strict=True)]


def _begins(span: Span, act: Act) -> bool:
    return span.ids == act.given if act.given else span.kind == "sampled"


def _completion(spans: Sequence[Span], act: Act) -> Completion:
    if act.given:
        return Completion(act.given, (0.0,) * len(act.given), GIVEN, "stop")
    ids = tuple([i for s in spans for i in s.ids])
    logprobs = tuple([x for s in spans for x in s.logprobs])
    earlier = tuple([(s.version, len(s.ids)) for s in spans[:-1]])
    return Completion(ids, logprobs, spans[-1].version if spans else 0, "stop", act.cached, act.queued, earlier)


def _returned(rollout: Rollout) -> tuple[Returned, ...]:
    children = iter(rollout.children)
    found: list[Returned] = []
    for act in rollout.trace.acts:
        for place, result in enumerate(act.results):
            child = next(children, None) if place in act.children else None
            found.append(Returned(result, place in act.refused, child))
    return tuple(found)


def given(state: State, ids: tuple[int, ...]) -> State:
    """The state after a turn that nobody sampled, so that it is not trained."""
    acts = (*state.acts[:-1], structs.replace(state.acts[-1], given=ids))

    def observed(segment: Segment) -> Segment:
        spans = [Span("observed", s.ids) if s.version == GIVEN else s for s in segment.spans]
        return Segment(tuple(spans), segment.opened_by)

    past = (*state.past[:-1], *map(observed, state.past[-1:]))
    return structs.replace(state, segment=observed(state.segment), past=past, acts=acts)
