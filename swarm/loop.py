"""The one agent loop: generate → parse tool calls → run the turn's calls at once → observe.

    open ─▶ State ─▶ step ─▶ State ─▶ … ─▶ State(status ≠ "running") ─▶ close ─▶ Rollout
                      │ ▲
            generate, prepare calls in order, run them in a nursery, observe

Orchestrator, subagent and single agent are this loop with other tools and engines; a spawn
is a tool that runs it again. `step` advances an explicit, immutable state by one turn, so any
driver may run it; `run` is the plain one, with a deadline.

Budget: every turn costs max(1, ordinary calls) steps, and a stage its slowest child's besides.
What is left is shown each turn; with one step left the policy answers without tools.

Context: when it has grown too long, `swarm.context` says what replaces it. Under compaction the turn after
the request is the summary, a turn like any other but for its text: it costs a step and runs no calls.

Not here: what a reward is, how a model samples, what a tool does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

import trio
from msgspec import Struct, structs
from msgspec import field as struct_field

from swarm.calls import prepare, run_all
from swarm.context import Ask, ContextPolicy, Opening, Step, check_room, closed, fitting, move, note, render
from swarm.seeds import derive
from swarm.terms import Setup, Terms
from swarm.tools import CallContext, Tool
from swarm.types import (
    Act,
    Artifact,
    Budget,
    ChatFormat,
    Completion,
    Engine,
    EngineError,
    Ledger,
    OpenedBy,
    Rollout,
    Sampling,
    Segment,
    Span,
    Stage,
    Status,
    Task,
    ToolSpec,
    Trace,
    Turn,
)
from swarm.workspace import Workspace

ONE_STEP = Stage(1)
"""What most turns cost: one object for all of them."""


@dataclass(frozen=True, slots=True)
class Harness:
    """How an agent is run on a task: its engine, its language, its tools and its limits.

    Without a `scratchpad` the table rows of earlier turns are not kept: an answer hands in only those that it
    holds itself, so that whatever is to be remembered must stand in the context. `checkpoint` is the sha256 of the
    frozen weights that `engine` serves, "" where it serves a policy that is trained.
    """

    engine: Engine
    chat: ChatFormat
    tools: tuple[Tool, ...]
    system: str
    sampling: Sampling
    budget: Budget
    context: ContextPolicy = field(default_factory=ContextPolicy)
    scratchpad: bool = True
    checkpoint: str = ""
    specs: tuple[ToolSpec, ...] = field(init=False, repr=False, compare=False)
    by_name: Mapping[str, Tool] = field(init=False, repr=False, compare=False)
    terms: Terms = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [t.spec.name for t in self.tools]
        if len(set(names)) != len(names):
            raise ValueError(f"harness: tools {names}, want each name once")
        object.__setattr__(self, "specs", tuple(t.spec for t in self.tools))
        object.__setattr__(self, "by_name", dict(zip(names, self.tools, strict=True)))
        object.__setattr__(self, "terms", Terms(self.specs, self.sampling, self.context, self.scratchpad))
        check_room(self.context, self.budget.tokens, self.sampling.max_tokens)

    def fits(self, task: Task) -> str:
        """See `Runner`: any task will do."""
        return ""

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        """See `Runner`."""
        return await run(self, begin(self, task, seed, budget=budget))


@dataclass(frozen=True, slots=True)
class Subagent:
    """Who takes an assignment: how it is run, its own system prompt in the place of the orchestrator's, if it has one,
    and how many tokens of its answer come back at most (0: as many as the caller's limits say)."""

    harness: Harness
    system: str | None = None
    reply_tokens: int = 0


Subagents = Callable[[str, int], Subagent]
"""Who takes an assignment, by the name that it goes to and the assignment's seed."""


class State(Struct, frozen=True, gc=False):
    """One agent between two turns: all that is needed to go on from here.

    `segment` is the context, `past` are those that it replaced, `steps` its last steps, which a rewrite may keep.
    `last`: the next turn is the answer; `summarize`: it is the summary. `spent`: the ledger's critical steps, kept
    beside it because their sum takes longer with every turn. `acts`: its turns as they went; `earlier` as in `Setup`.
    """

    task: Task
    agent: str
    depth: int
    seed: int
    budget: Budget
    system: str
    prompt: str
    segment: Segment
    workspace: Workspace
    terms: Terms
    ledger: Ledger = struct_field(default_factory=Ledger)
    spent: int = 0
    past: tuple[Segment, ...] = ()
    steps: tuple[Step, ...] = ()
    last: bool = False
    summarize: bool = False
    status: Status = "running"
    error: str = ""
    answer: str = ""
    children: tuple[Rollout, ...] = ()
    checkpoint: str = ""
    acts: tuple[Act, ...] = ()
    earlier: tuple[tuple[int, Budget], ...] = ()

    @property
    def left(self) -> int:
        return self.budget.critical_steps - self.spent


def begin(
    harness: Harness,
    task: Task,
    seed: int,
    *,
    budget: Budget | None = None,
    agent: str = "main",
    depth: int = 0,
    system: str | None = None,
    prompt: str | None = None,
    workspace: Workspace | None = None,
) -> State:
    """The state before the first turn. A root agent is asked the task's query.

    Raises ValueError if `budget.tokens` leaves no room above the threshold at which the context is rewritten.
    """
    budget = budget or harness.budget
    check_room(harness.context, budget.tokens, harness.sampling.max_tokens)
    prompt = task.query if prompt is None else prompt
    system = harness.system if system is None else system
    lettered = dict(zip(ascii_lowercase, task.names, strict=False))
    workspace = workspace or Workspace((Artifact(task.subject, cells={"text": task.query, **lettered}),))
    frozen = harness.checkpoint
    state = State(
        task, agent, depth, seed, budget, system, prompt, Segment(()), workspace, harness.terms, checkpoint=frozen
    )
    return _opened(harness, state, (), "start")


async def run(harness: Harness, state: State) -> Rollout:
    """Drives an agent to its end, or to its deadline: what it had by then is its result."""
    started = trio.current_time()
    with trio.move_on_after(state.budget.seconds) as scope:
        while state.status == "running":
            state = await step(harness, state)
    if scope.cancelled_caught:
        state = structs.replace(state, status="truncated", error="deadline")
    ledger = structs.replace(state.ledger, seconds=trio.current_time() - started)
    return close(structs.replace(state, ledger=ledger))


def close(state: State) -> Rollout:
    """The rollout of a finished agent. One that was cut hands in the rows that it had written."""
    cut = state.status == "truncated"
    setup = Setup(state.terms, state.seed, state.depth, state.budget, state.system, state.earlier)
    segments = (*state.past, state.segment)
    return Rollout(
        task=state.task,
        trace=Trace(state.agent, segments, state.status, state.error, state.checkpoint, state.acts, setup),
        ledger=state.ledger,
        prompt=state.prompt,
        answer=state.answer,
        table=state.workspace.rows if cut else state.workspace.table(state.answer),
        children=state.children,
    )


async def step(harness: Harness, state: State) -> State:
    """One turn. An engine's failure ends the agent with status "error"; nothing else is caught."""
    ids = state.segment.ids
    prompt_tokens, sampling, began = len(ids), _sampling(harness, state), trio.current_time()
    if prompt_tokens + sampling.max_tokens > state.budget.tokens:
        return _cut(state)
    try:
        answer = harness.engine.generate(ids, sampling)
        del ids  # an agent that waits holds its context once, as spans
        completion = await answer
    except EngineError as e:
        return structs.replace(state, status="error", error=str(e))
    seconds = trio.current_time() - began
    turn = harness.chat.parse(completion.ids, harness.specs)
    state = _said(state, completion, prompt_tokens)
    if state.summarize:
        return _summarized(harness, _acted(state, completion, seconds), completion.ids, turn)
    final = state.last or not (turn.calls or turn.malformed)
    if final or harness.scratchpad:
        state = structs.replace(state, workspace=state.workspace.written(turn.content))
    if final:
        return _answered(_acted(state, completion, seconds), turn)
    return await _act(harness, state, turn, completion, prompt_tokens, seconds)


def _sampling(harness: Harness, state: State) -> Sampling:
    most = harness.context.summary_tokens if state.summarize else harness.sampling.max_tokens
    return structs.replace(harness.sampling, max_tokens=most, seed=derive(state.seed, len(state.ledger.stages)))


def _cut(state: State) -> State:
    return structs.replace(state, status="truncated", error="context")


def _acted(state: State, completion: Completion, seconds: float) -> State:
    """The state after a turn without calls."""
    act = Act(len(completion.ids), completion.cached, completion.seconds_queued, seconds=seconds)
    return structs.replace(state, acts=(*state.acts, act))


def _said(state: State, completion: Completion, prompt_tokens: int) -> State:
    ledger = structs.replace(
        state.ledger,
        tokens_prompt=state.ledger.tokens_prompt + prompt_tokens,
        tokens_cached=state.ledger.tokens_cached + completion.cached,
        tokens_sampled=state.ledger.tokens_sampled + len(completion.ids),
        seconds_queued=state.ledger.seconds_queued + completion.seconds_queued,
    )
    return structs.replace(state, segment=state.segment.extended(*completion.spans), ledger=ledger)


def _summarized(harness: Harness, state: State, ids: tuple[int, ...], turn: Turn) -> State:
    """The summary was said: it is no act, whatever it spells out, and the context is rewritten around it."""
    counts = {
        "summary_tokens": len(ids),
        "summary_cut": int(not closed(harness.chat, ids)),
        "call_in_summary": len(turn.calls) + len(turn.malformed),
    }
    ledger, spent = _paid(state, ONE_STEP, counts)
    state = structs.replace(state, ledger=ledger, spent=spent, summarize=False)
    return _rewritten(harness, state, (Step(ids),), "compaction")


def _answered(state: State, turn: Turn) -> State:
    counts = {"call_after_budget": len(turn.calls) + len(turn.malformed)} if state.last else {}
    ledger, spent = _paid(state, ONE_STEP, counts)
    status = "exhausted" if state.last else "answered"
    return structs.replace(state, ledger=ledger, spent=spent, status=status, answer=turn.content)


async def _act(
    harness: Harness, state: State, turn: Turn, completion: Completion, prompt_tokens: int, seconds: float
) -> State:
    first = state.ledger.counts.get("calls", 0)
    caller = CallContext(state.agent, state.depth, first, state.seed, state.left - 1, state.task, state.workspace)
    checked, began = prepare(harness.by_name, turn, caller), trio.current_time()
    results = await run_all(checked)
    calling = trio.current_time() - began
    workspace = checked.workspace
    texts: list[str] = []
    children: dict[int, Rollout] = {}
    counts: dict[str, int] = {}
    for place, result in enumerate(results):
        workspace, text = workspace.show(result.parts)
        texts.append(text)
        if result.child is not None:
            children[place] = result.child
            results[place] = structs.replace(result, child=None)
        if result.error:
            counts[result.error] = counts.get(result.error, 0) + 1
    counts["calls"] = len(results)
    stage = ONE_STEP
    if children or checked.ordinary > 1:
        stage = Stage(max(1, checked.ordinary), tuple([c.ledger.critical_steps for c in children.values()]))
    ledger, spent = _paid(state, stage, counts)
    said, cached, queued = completion.ids, completion.cached, completion.seconds_queued
    act = Act(len(said), cached, queued, tuple(results), tuple(children), checked.refused, seconds, calling)
    state = structs.replace(
        state,
        workspace=workspace,
        children=(*state.children, *children.values()),
        ledger=ledger,
        spent=spent,
        acts=(*state.acts, act),
    )
    return _observed(harness, state, Step(said, tuple(texts)), prompt_tokens + len(said))


def _observed(harness: Harness, state: State, step: Step, used: int) -> State:
    """Appends a turn's results, and a note that says how it goes on. `used`: the context's tokens before."""
    policy = harness.context
    longest: Ask = "summarize" if policy.kind == "compaction" else ""
    ids = _shown(harness, state, step, longest)
    follows = move(
        policy,
        used=used + len(ids),
        window=state.budget.tokens,
        turn_tokens=harness.sampling.max_tokens,
        left=state.left,
        rewrites=len(state.past),
    )
    ask: Ask = "summarize" if follows == "summarize" else "answer now" if follows == "answer" else ""
    observed = Span("observed", tuple(ids if ask == longest else _shown(harness, state, step, ask)))
    state = structs.replace(
        state,
        segment=state.segment.extended(observed),
        steps=_kept(policy, state.steps, step),
        last=follows == "answer",
        summarize=follows == "summarize",
    )
    if follows == "truncate":
        return _rewritten(harness, state, (), "truncation")
    return _cut(state) if follows == "cut" else state


def _kept(policy: ContextPolicy, steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """The last steps, where a rewrite could need them."""
    return (*steps, step)[-policy.keep :] if policy.kind != "none" and policy.keep else ()


def _shown(harness: Harness, state: State, step: Step, ask: Ask) -> list[int]:
    return harness.chat.observe(step.results, note(state.left, ask), closed=closed(harness.chat, step.ids))


def _rewritten(harness: Harness, state: State, summary: tuple[Step, ...], by: OpenedBy) -> State:
    """A context of its own for what is kept; if not even the task fits, the last turn, or the end."""
    opening = _opening(harness, state)
    kept = fitting(harness.context, harness.chat, opening, summary, state.steps, state.left)
    if kept < 0 and state.left > 1 and harness.context.at_limit == "cut":
        return _cut(state)
    steps = state.steps[len(state.steps) - max(kept, 0) :]
    state = structs.replace(
        state,
        past=(*state.past, state.segment),
        steps=steps,
        workspace=state.workspace.forgotten([state.prompt, *(text for step in steps for text in step.results)]),
        ledger=structs.replace(state.ledger, counts=_added(state.ledger.counts, {f"{by}s": 1})),
    )
    return _opened(harness, state, (*summary, *steps), by, last=kept < 0)


def _opened(harness: Harness, state: State, shown: Sequence[Step], by: OpenedBy, *, last: bool = False) -> State:
    last = last or state.left <= 1
    ids = render(harness.chat, _opening(harness, state), shown, state.left, "answer now" if last else "")
    return structs.replace(state, segment=Segment((Span("prompt", tuple(ids)),), by), last=last)


def _opening(harness: Harness, state: State) -> Opening:
    return Opening(state.system, harness.specs, state.prompt)


def _paid(state: State, stage: Stage, counts: Mapping[str, int]) -> tuple[Ledger, int]:
    """The ledger after one more stage, and its critical steps."""
    ledger = state.ledger
    stages, counts = (*ledger.stages, stage), _added(ledger.counts, counts)
    return structs.replace(ledger, stages=stages, counts=counts), state.spent + stage.critical_steps


def _added(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    total = dict(counts)
    for kind, n in more.items():
        if n:
            total[kind] = total.get(kind, 0) + n
    return total
