"""Runs a rollout again from its record: the same loop, an engine that says what was said, tools that return what came.

    record ─▶ the setup of each agent ─▶ swarm.loop.step, turn by turn ─▶ Rollout ─▶ the differences, to the token
                                          │ engine: what was said
                                          └ tools: what came back; for an assignment, the child's own replay

No engine, no tools, no clock: what the loop, the language and the ledger make of a record is made anew and compared.
So whatever changed in them and would have changed a rollout is found, at the first token where it does.
Not here: what another policy would have said (`swarm.recheck`), and going on from a turn (`swarm.fork`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from msgspec import structs

from swarm.kept import KeptTool, Recorded, RecordGap, lacks, steps
from swarm.loop import Harness, State, begin, close, step
from swarm.tools import CallContext
from swarm.types import ChatFormat, Ledger, Rollout, Segment, Trace
from swarm.workspace import Workspace

Chats = Callable[[Trace], ChatFormat]
"""The language of an agent, told by its trace: the policy's, or its checkpoint's own."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay is not as its record: `Difference("main", 2, "token 118", "17 9 4", "9 9 4")`.

    `turn` is the one before which, or in which, it stands, counted from 0; after the last one, their number.
    """

    agent: str
    turn: int
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.agent}, turn {self.turn}, {self.what}: recorded {self.recorded}, replayed {self.replayed}"


async def replay(rollout: Rollout, chats: Chats) -> Rollout:
    """What the loop makes of a record: the rollout again, without its reward. Raises RecordGap where it `lacks`.

    The clock is the record's: its seconds, and the deadline that cut an agent.
    """
    if why := lacks(rollout):
        raise RecordGap(why)
    return close((await states(rollout, chats))[-1])


async def states(rollout: Rollout, chats: Chats, workspace: Workspace | None = None) -> list[State]:
    """The root agent's states before each of its turns, and its last. Raises RecordGap.

    `workspace`: what it began with, where it is a subagent whose parent was run again.
    """
    record = Recorded(rollout)
    harness = _harness(record, chats)
    trace, setup = rollout.trace, record.setup
    state = begin(
        harness,
        rollout.task,
        setup.seed,
        budget=record.budget(0),
        agent=trace.agent,
        depth=setup.depth,
        system=setup.system,
        prompt=rollout.prompt,
        workspace=workspace,
    )
    found = await steps(harness, state, record, len(trace.acts))
    found[-1] = await _ended(harness, found[-1], rollout, record)
    return found


async def _ended(harness: Harness, state: State, rollout: Rollout, record: Recorded) -> State:
    """The state as its agent ended: by itself, by its engine's failure, for want of room, or at its deadline."""
    if state.status == "running" and rollout.trace.error == "deadline":
        state = structs.replace(state, status="truncated", error="deadline")
    if state.status == "running":
        state = await step(harness, state)
    ledger = structs.replace(state.ledger, seconds=rollout.ledger.seconds)
    return structs.replace(state, ledger=ledger, budget=record.setup.budget, earlier=record.setup.earlier)


def _harness(record: Recorded, chats: Chats) -> Harness:
    async def child(rollout: Rollout, context: CallContext) -> Rollout:
        return close((await states(rollout, chats, context.workspace.child()))[-1])

    setup, trace = record.setup, record.rollout.trace
    return Harness(
        engine=record,
        chat=chats(trace),
        tools=tuple(KeptTool(spec, record.at, child) for spec in setup.terms.specs),
        system=setup.system,
        sampling=setup.terms.sampling,
        budget=setup.budget,
        context=setup.terms.context,
        scratchpad=setup.terms.scratchpad,
        checkpoint=trace.checkpoint,
    )


def tree(rollout: Rollout) -> Iterator[Rollout]:
    """The rollouts of all agents, parents first."""
    yield rollout
    for child in rollout.children:
        yield from tree(child)


def timeless(rollout: Rollout) -> Rollout:
    """The rollout without what clock and cache had to do with it: two that went alike are equal."""
    ledger = structs.replace(rollout.ledger, seconds=0.0, seconds_queued=0.0, tokens_cached=0)
    acts = tuple([structs.replace(a, cached=0, queued=0.0, seconds=0.0, calling=0.0) for a in rollout.trace.acts])
    children = tuple(map(timeless, rollout.children))
    return replace(rollout, trace=replace(rollout.trace, acts=acts), ledger=ledger, children=children)


# --- differences -----------------------------------------------------------------------


Shown = Callable[[Sequence[int]], str]
"""Some token ids as the user reads them."""


def differences(
    recorded: Rollout, replayed: Rollout, shown: Shown = lambda ids: str(list(ids)), *, nats: float = 0.0
) -> list[Difference]:
    """Of each agent the first difference in what it saw and said, and those of its end, ledger, answer and table.

    Log-probabilities are equal that are no more than `nats` apart: an engine rounds as its batch has it. Rewards are
    compared where both rollouts have one.
    """
    return list(_of_tree(recorded, replayed, shown, nats))


def _of_tree(recorded: Rollout, replayed: Rollout, shown: Shown, nats: float) -> Iterator[Difference]:
    trace = recorded.trace
    agent, end = trace.agent, len(trace.acts)
    yield from _of_tokens(trace, replayed.trace, shown, nats)
    for what, was, now in _ends(recorded, replayed):
        if was != now:
            yield Difference(agent, end, what, *_apart(str(was), str(now)))
    for one, other in zip(recorded.children, replayed.children, strict=False):
        yield from _of_tree(one, other, shown, nats)


def _ends(recorded: Rollout, replayed: Rollout) -> Iterator[tuple[str, object, object]]:
    """What a rollout comes to, by name, of the one and of the other."""
    one, other = recorded.trace, replayed.trace
    yield "status", (one.status, one.error), (other.status, other.error)
    for name in Ledger.__struct_fields__:
        yield f"ledger {name}", getattr(recorded.ledger, name), getattr(replayed.ledger, name)
    yield "results", [a.results for a in one.acts], [a.results for a in other.acts]
    yield "answer", recorded.answer, replayed.answer
    yield "table", recorded.table, replayed.table
    yield "children", len(recorded.children), len(replayed.children)
    if recorded.reward and replayed.reward:
        yield "reward", recorded.reward, replayed.reward


def _of_tokens(recorded: Trace, replayed: Trace, shown: Shown, nats: float) -> Iterator[Difference]:
    """The first token that differs, if one does; else the first context that is otherwise different."""
    before = 0
    for k in range(max(len(recorded.segments), len(replayed.segments))):
        one, other = _segment(recorded, k), _segment(replayed, k)
        found = _of_context(one, other, shown, nats)
        if found is not None:
            at, what, *values = found
            turn = _turn(recorded, before + sum(one.mask[:at]))
            yield Difference(recorded.agent, turn, what + (f" of context {k}" if k else ""), *values)
            return
        before += sum(one.mask)


def _of_context(one: Segment, other: Segment, shown: Shown, nats: float) -> tuple[int, str, str, str] | None:
    """Where two contexts differ, in what, and how it is in both."""
    ids, its = one.ids, other.ids
    at = first_apart(ids, its)
    if at >= 0:
        return at, f"token {at}", shown(ids[at : at + 8]), shown(its[at : at + 8])
    spans = [str((s.opened_by, [(p.kind, len(p.ids), p.version) for p in s.spans])) for s in (one, other)]
    if spans[0] != spans[1]:
        return len(ids), "spans", *_apart(spans[0], spans[1])
    pairs = enumerate(zip(one.logprobs, other.logprobs, strict=True))
    far = next(((at, a, b) for at, (a, b) in pairs if not abs(a - b) <= nats and a != b), None)
    return None if far is None else (far[0], f"log-probability of token {far[0]}", str(far[1]), str(far[2]))


def first_apart(ids: Sequence[int], others: Sequence[int]) -> int:
    """The first place where the two differ, one of them ending included; -1 where they are equal."""
    if ids == others:
        return -1
    return next((k for k, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


def _segment(trace: Trace, k: int) -> Segment:
    return trace.segments[k] if k < len(trace.segments) else Segment(())


def _turn(trace: Trace, sampled: int) -> int:
    """The turn that follows so many sampled ids, or holds the next one."""
    return sum(n <= sampled for n in accumulate(a.sampled for a in trace.acts if not a.given))


def _apart(was: str, now: str, width: int = 80) -> tuple[str, str]:
    """Both texts from shortly before where they part."""
    at = next((k for k, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    begin = max(0, at - 16)
    return was[begin : begin + width], now[begin : begin + width]
