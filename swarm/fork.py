"""Goes on from any turn of any agent of a recorded rollout: the past is kept, one thing is changed, the rest is live.

    main     0 ── 1 ────── 2 ─ ─ ─ 3 ─ ─        ── from the record      ─ ─ live
                  ├ a  ──────────  │
                  └ b  0 ── 1 ─ ─ ─┘            a fork at turn 1 of main/5:b

What happened before the fork, and what happened beside it without knowing of it, stays: `a`, which was assigned in
the same turn, keeps its record. Whoever joins the forked agent goes on live from there. The kept turns run through the
one loop again (`swarm.kept`), so the branch is a rollout like any other: it can be recorded, replayed and forked.

Not here: comparing branches (`swarm.fork_compare`), and engines: the live harness has them, and the roster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from msgspec import structs

from swarm.drive import driven
from swarm.kept import GIVEN, KeptTool, Recorded, RecordGap, Returned, given, lacks, retaken, steps
from swarm.loop import Harness, State, begin, run, step
from swarm.replay import first_apart, tree
from swarm.terms import Budget, Sampling, Setup
from swarm.tools import CallContext
from swarm.types import CheckpointRef, Completion, Engine, Rollout, Segment, Span, ToolCall, ToolResult, Turn
from swarm.workspace import Workspace


class ForkError(ValueError):
    """A fork that cannot be made; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What is changed at the turn of a fork: `Edit(results={0: "none"})`, `Edit(budget=Budget(20, 8192))`.

    `action`: what the agent says in this turn instead, or its ids; its calls are run. `results`: what calls of this
    turn give back, by their places in it: a text, or a whole result (with a text the child that ran stays in the tree,
    and so does its cost). `budget`, `temperature`, `top_p` and `seed` hold from this turn on; `prompt` and `system` can
    be changed at turn 0, where nothing was said in their light yet. Nothing at all: the turn is sampled again.
    """

    action: Turn | tuple[int, ...] | None = None
    results: Mapping[int, str | ToolResult] = field(default_factory=dict[int, "str | ToolResult"])
    budget: Budget | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    prompt: str | None = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """A fork and what became of it. `rollout` is whole, the kept past included.

    `kept`: how many contexts of the root agent, and how many spans of the next one, are from the record.
    """

    parent: Rollout
    agent: str
    turn: int
    edit: Edit
    rollout: Rollout
    kept: tuple[int, int]

    @property
    def trainable(self) -> Rollout:
        """For a learner: the kept past is a prompt, with which a segment opened by a fork begins.

        It cannot be replayed: `rollout` can.
        """
        trace, (past, spans) = self.rollout.trace, self.kept
        cut = trace.segments[past]
        before = Span("prompt", tuple(Segment(cut.spans[:spans]).ids))
        segments = (Segment((before, *cut.spans[spans:]), "fork"), *trace.segments[past + 1 :])
        return replace(self.rollout, trace=replace(trace, segments=segments, acts=(), setup=None))


@runtime_checkable
class _Speaks(Protocol):
    """A language in which a turn can be said for a policy, as `swarm.chat.Chat` is."""

    def encode_turn(self, content: str, calls: tuple[ToolCall, ...] = ()) -> list[int]: ...


async def fork(live: Harness, rollout: Rollout, agent: str = "main", turn: int = 0, edit: Edit | None = None) -> Branch:
    """The branch that goes on from `turn` (counted from 0) of `agent`, run by `live`, the root's harness.

    With nothing changed, the same weights and the recorded seed, the branch is as the rollout was; with another roster
    behind `live`, those take over who are spawned after the fork, and the forked agent's own part. An agent that goes
    on has its whole deadline again. Raises ForkError for a turn or an edit that there is no place for, and for
    a harness under which the kept past would have been another; RecordGap for a record that cannot be kept.
    """
    forked = _Fork(agent, turn, edit or Edit())
    if why := lacks(rollout):
        raise RecordGap(why)
    _check(rollout, forked)
    kept: list[State] = []
    branch = await _again(live, rollout, forked, None, kept)
    return Branch(rollout, agent, turn, forked.edit, branch, (len(kept[0].past), len(kept[0].segment.spans)))


async def retraced(live: Harness, rollout: Rollout) -> list[State]:
    """The root's states before each of its turns, and its last, under a live harness: to go on from any of them.

    Raises as `fork` does.
    """
    if why := lacks(rollout):
        raise RecordGap(why)
    record = Recorded(rollout)
    live = _on_terms(live, record.setup)
    states = await steps(_mixed(live, record, record.at), _begun(live, record, Edit(), None), record, len(record.said))
    _verify(states[-1], record, 0)
    if states[-1].status == "running":
        states[-1] = structs.replace(states[-1], status=rollout.trace.status, error=rollout.trace.error)
    return states


@dataclass(frozen=True, slots=True)
class _Fork:
    agent: str
    turn: int
    edit: Edit


async def _again(
    live: Harness, rollout: Rollout, fork: _Fork, workspace: Workspace | None, kept: list[State]
) -> Rollout:
    """One agent on the way from the root to the fork: kept, then one turn that joins both, then live.

    `kept` takes the states at which each of them went on live.
    """
    target = rollout.trace.agent == fork.agent
    at = fork.turn if target else _joins(rollout, fork.agent)
    record = Recorded(_rebudgeted(rollout, fork) if target else rollout)
    live = _on_terms(live, record.setup)
    state = await _kept(live, record, at, fork if target else None, workspace)
    if target:
        live, state = _changed(live, state, fork.edit)
        state = await _edited_turn(live, state, record, fork)
    else:
        state = await _joining_turn(live, state, record, at, fork, kept)
    kept.insert(0, state)
    ended = await run(live, structs.replace(state, terms=live.terms))
    before = sum(a.seconds + a.calling for a in state.acts)
    ledger = structs.replace(ended.ledger, seconds=before + ended.ledger.seconds)
    return replace(ended, ledger=ledger, harness=rollout.harness)


async def _kept(live: Harness, record: Recorded, turns: int, fork: _Fork | None, workspace: Workspace | None) -> State:
    """The state before turn `turns`, as the record has it."""
    setup, trace, edit = record.setup, record.rollout.trace, fork.edit if fork else Edit()
    state = _begun(live, record, edit, workspace)
    state = (await steps(_mixed(live, record, record.at), state, record, turns))[-1]
    if edit.prompt is None and edit.system is None:
        _verify(state, record, 1 if edit.budget else 0)
    if state.status != "running" or len(state.acts) < turns:
        raise ForkError(f"{trace.agent}: it ended before turn {turns}, want a turn from 0 to {len(trace.acts) - 1}")
    return structs.replace(state, budget=setup.budget)


def _begun(live: Harness, record: Recorded, edit: Edit, workspace: Workspace | None) -> State:
    setup, rollout = record.setup, record.rollout
    state = begin(
        live,
        rollout.task,
        setup.seed,
        budget=record.budget(0),
        agent=rollout.trace.agent,
        depth=setup.depth,
        system=setup.system if edit.system is None else edit.system,
        prompt=rollout.prompt if edit.prompt is None else edit.prompt,
        workspace=workspace,
    )
    return structs.replace(state, earlier=setup.earlier)


def _changed(live: Harness, state: State, edit: Edit) -> tuple[Harness, State]:
    given = {"temperature": edit.temperature, "top_p": edit.top_p}
    sampling = structs.replace(live.sampling, **{k: v for k, v in given.items() if v is not None})
    seed = state.seed if edit.seed is None else edit.seed
    return replace(live, sampling=sampling), structs.replace(state, seed=seed)


async def _edited_turn(live: Harness, state: State, record: Recorded, fork: _Fork) -> State:
    """The turn of the fork, where it is given what is said in it or what comes back; else nothing yet."""
    edit = fork.edit
    if edit.action is None and not edit.results:
        return state
    first = state.ledger.counts.get("calls", 0)
    came = _came(record, edit, first)
    if edit.action is None:
        # The record knows the turn by its own seed.
        due = structs.replace(state, seed=record.setup.seed)
        after = await retaken(_mixed(live, record, came), due, record.rollout.trace.acts[fork.turn])
        return structs.replace(after, seed=state.seed)
    ids = _spoken(live, edit.action)
    _check_places(fork, len(live.chat.parse(ids, live.specs).calls))
    return given(await step(_mixed(live, _Says(ids), came), state), ids)


async def _joining_turn(
    live: Harness, state: State, record: Recorded, turn: int, fork: _Fork, kept: list[State]
) -> State:
    """The turn that assigned the task to the next agent on the way: all else that came in it stays."""
    index = next(k for k, r in enumerate(record.returned) if r.child and _leads(r.child.trace.agent, fork.agent))
    errors: list[ValueError] = []

    async def drive(harness: Harness, started: State) -> Rollout:
        child = record.returned[index].child
        assert child is not None
        try:
            return await _again(harness, child, fork, started.workspace, kept)
        except (ForkError, RecordGap) as e:  # handed past the nursery of the calls as data
            errors.append(e)
            return child

    mixed = _mixed(driven(live, drive), record, lambda k: None if k == index else record.at(k))
    state = await retaken(mixed, state, record.rollout.trace.acts[turn])
    if errors:
        raise errors[0]
    return state


# --- a turn of which something is given --------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Says:
    """An engine that says one turn."""

    ids: tuple[int, ...]

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        return Completion(self.ids, (0.0,) * len(self.ids), GIVEN, "stop")

    async def load(self, ref: CheckpointRef) -> None:
        """It says the same."""


def _mixed(live: Harness, engine: Engine, came: Callable[[int], Returned | None]) -> Harness:
    """The live harness whose engine is another, and of whose calls only those are run for which nothing came."""

    async def as_recorded(child: Rollout, context: CallContext) -> Rollout:
        return child

    tools = tuple(KeptTool(tool.spec, came, as_recorded, tool) for tool in live.tools)
    return replace(live, engine=engine, tools=tools)


def _came(record: Recorded, edit: Edit, first: int) -> Callable[[int], Returned | None]:
    """What the calls of the turn give back, by their places in the trace, of which `first` is the turn's first."""

    def at(index: int) -> Returned | None:
        was = record.at(index) if edit.action is None else None
        if index - first not in edit.results:
            return was
        given = edit.results[index - first]
        if isinstance(given, str):
            return Returned(ToolResult((given,)), child=was.child if was else None)
        return Returned(structs.replace(given, child=None), child=given.child)

    return at


def _spoken(live: Harness, action: Turn | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(action, tuple):
        return action
    if not isinstance(live.chat, _Speaks):
        raise ForkError(f"action: {type(live.chat).__name__} cannot say a turn, want a chat with encode_turn")
    return tuple(live.chat.encode_turn(action.content, action.calls))


# --- what fits -------------------------------------------------------------------------


def _check(rollout: Rollout, fork: _Fork) -> None:
    agents = {r.trace.agent: r for r in tree(rollout)}
    if fork.agent not in agents:
        raise ForkError(f"agent {fork.agent!r}: want one of {', '.join(agents)}")
    trace, edit, turn = agents[fork.agent].trace, fork.edit, fork.turn
    cut = trace.status in ("truncated", "error")  # it may go on from where it was cut
    last = len(trace.acts) - (0 if cut and edit.action is None and not edit.results else 1)
    if not 0 <= turn <= last:
        raise ForkError(f"{fork.agent}: turn {turn}, want one from 0 to {last}")
    if turn and not (edit.prompt is None and edit.system is None):
        raise ForkError(
            f"{fork.agent}: another prompt at turn {turn}, want it at turn 0, before anything was said to it"
        )
    if edit.results and edit.action is None:
        _check_places(fork, len(trace.acts[turn].results))
    spent = sum(stage.critical_steps for stage in agents[fork.agent].ledger.stages[:turn])
    if edit.budget and edit.budget.critical_steps <= spent:
        raise ForkError(
            f"{fork.agent}: critical_steps = {edit.budget.critical_steps}, want more than the {spent} that turn {turn} "
            "finds spent"
        )


def _check_places(fork: _Fork, calls: int) -> None:
    wrong = [place for place in fork.edit.results if not 0 <= place < calls]
    if wrong:
        raise ForkError(
            f"{fork.agent}: a result of call {wrong[0]} of turn {fork.turn}, which has {calls} calls (from 0)"
        )


def _leads(agent: str, to: str) -> bool:
    return to == agent or to.startswith(f"{agent}/")


def _joins(rollout: Rollout, agent: str) -> int:
    """The turn whose calls ran the child that the agent is, or descends from."""
    children = iter(rollout.children)
    for turn, act in enumerate(rollout.trace.acts):
        if any(_leads(next(children).trace.agent, agent) for _ in act.children):
            return turn
    raise ForkError(f"{rollout.trace.agent}: no turn of its record assigned anything to {agent}")


def _on_terms(live: Harness, setup: Setup) -> Harness:
    """On the recorded terms, whatever those of the harness are by now."""
    terms = setup.terms
    sampling = structs.replace(terms.sampling, stop=live.chat.stop)
    return replace(live, sampling=sampling, context=terms.context, scratchpad=terms.scratchpad)


def _rebudgeted(rollout: Rollout, fork: _Fork) -> Rollout:
    """The record as if its agent had had the fork's budget from this turn on."""
    setup, budget, turn = rollout.trace.setup, fork.edit.budget, fork.turn
    if setup is None or budget is None:
        return rollout
    before = [(until, b) for until, b in setup.earlier if until < turn]
    if turn:
        before.append((turn, Recorded(rollout).budget(turn - 1)))
    setup = structs.replace(setup, budget=budget, earlier=tuple(before))
    return replace(rollout, trace=replace(rollout.trace, setup=setup))


def _verify(state: State, record: Recorded, but: int) -> None:
    """Raises ForkError unless the kept contexts are as recorded; `but`: how many spans at the end may differ."""
    trace = record.rollout.trace
    now = (*state.past, Segment(state.segment.spans[: len(state.segment.spans) - but]))
    for k, (mine, was) in enumerate(zip(now, trace.segments, strict=False)):
        ids, its = mine.ids, was.ids
        at = first_apart(ids, its if k < len(state.past) else its[: len(ids)])
        if at >= 0:
            raise ForkError(
                f"{trace.agent}: token {at} of context {k} is {ids[at : at + 1]} under this harness, recorded is "
                f"{its[at : at + 1]}; want the language and tools that it was recorded with"
            )
