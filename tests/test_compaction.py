"""Agents whose contexts are rewritten: what that costs, what is trained, and how it ends."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from swarm.context import ContextPolicy
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness, State, Subagent, begin, run, step
from swarm.transcript import Transcript, read
from swarm.types import Budget, CheckpointRef, Completion, Rollout, Sampling, Segment, Turn
from tests.swarm_cases import TASK, call, chat, engine, harness

END = chat().stop[0]
Say = Callable[[Transcript], Turn]


class Heard:
    """An engine that keeps what it was asked and what it said."""

    def __init__(self, inner: ScriptedEngine) -> None:
        self.inner, self.asked, self.said = inner, list[list[int]](), list[Completion]()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(list(ids))
        self.said.append(await self.inner.generate(ids, sampling))
        return self.said[-1]

    async def load(self, ref: CheckpointRef) -> None:
        await self.inner.load(ref)


def works(t: Transcript) -> Turn:
    """Echoes until it must answer; a summary says how many steps it replaced."""
    if t.summarize:
        return Turn(f"{t.summary} +{len(t.exchanges)}".strip())
    return Turn("done") if t.last else Turn("", (call("echo", text=f"x{t.left}"),))


def agent(say: Say = works, steps: int = 12, window: int = 1024, turn: int = 128, **context: object) -> Harness:
    # The task takes 44 tokens here and a step 63: with the third, 44 + 3·63 = 233, the context is rewritten.
    policy = ContextPolicy(**{"kind": "compaction", "threshold": 220, "summary_tokens": 32, **context})  # type: ignore[arg-type]
    return replace(
        harness(say, steps=steps),
        engine=Heard(engine(say)),
        budget=Budget(steps, window),
        sampling=Sampling(turn, stop=chat().stop),
        context=policy,
    )


async def rollout(h: Harness) -> Rollout:
    return await run(h, begin(h, TASK, seed=1))


def text(segment: Segment) -> str:
    return chat().decode(segment.ids)


def sampled(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    return [s.ids for segment in segments for s in segment.spans if s.kind == "sampled"]


def contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[k : k + len(part)] == part for k in range(len(ids)))


def contexts(h: Harness) -> list[Transcript]:
    return [read(chat().decode(ids)) for ids in h.engine.asked]  # type: ignore[attr-defined]


def test_a_threshold_that_leaves_no_room_for_a_turn_is_refused_before_anything_runs() -> None:
    # 1,024 − 128 = 896
    agent(threshold=896)
    with pytest.raises(ValueError, match="context: threshold = 897, want at most 896, so that a turn of 128 tokens"):
        agent(threshold=897)
    with pytest.raises(ValueError, match="a turn of 200 tokens fits into 1024"):
        agent(threshold=896, summary_tokens=200)
    with pytest.raises(ValueError, match="want at most 72"):
        begin(agent(), TASK, 1, budget=Budget(9, 200))


# --- compaction in the loop ------------------------------------------------------------


async def test_the_summary_is_asked_for_at_the_threshold_and_not_one_token_below() -> None:
    first = begin(agent(threshold=800), TASK, seed=1)
    second = await step(agent(threshold=800), first)
    # The request is longer than the plain note by its word.
    used = len(second.segment.ids) + len(chat().encode(" summarize"))
    for threshold, asked in ((used, True), (used + 1, False)):
        h = agent(threshold=threshold)
        state = await step(h, begin(h, TASK, seed=1))
        assert state.summarize is asked
        assert text(state.segment).endswith(f"[left 11]{' summarize' * asked}<|im_end|>\n<|im_start|>assistant\n")


async def test_a_summary_is_trained_once_where_it_was_sampled_and_copied_id_for_id() -> None:
    h = agent(keep=1)
    r = await rollout(h)
    said = [c.ids for c in h.engine.said]  # type: ignore[attr-defined]
    assert len(r.trace.segments) > 2
    assert sampled(r.trace.segments) == said
    for old, new in pairwise(r.trace.segments):
        summary, (opening, *_) = old.spans[-1], new.spans
        assert (summary.kind, new.opened_by, opening.kind) == ("sampled", "compaction", "prompt")
        turn, results = old.spans[-3:-1]
        request = chat().observe((), "[left 2] summarize", closed=True)
        assert contains(opening.ids, summary.ids)
        assert contains(opening.ids, turn.ids + results.ids[: -len(request) + 1])
        assert not any(new.mask[: len(opening.ids)])


@pytest.mark.parametrize("keep", [0, 1, 2])
async def test_the_last_steps_stay_and_older_ones_go(keep: int) -> None:
    h = agent(keep=keep)
    await rollout(h)
    seen = contexts(h)
    after = next(k for k, t in enumerate(seen) if t.summarize) + 1
    before = seen[after - 1].exchanges
    assert len(before) == 3
    assert seen[after].exchanges == before[len(before) - keep :]
    assert seen[after].summary == "+3"


async def test_a_summary_costs_a_step_and_every_sampled_turn_has_its_stage() -> None:
    r = await rollout(agent())
    assert len(r.ledger.stages) == len(sampled(r.trace.segments)) == 12
    assert r.ledger.critical_steps == 12
    assert r.trace.status == "exhausted"
    assert r.ledger.counts["compactions"] == len(r.trace.segments) - 1


async def test_the_summary_tokens_are_counted() -> None:
    h = agent()
    r = await rollout(h)
    summaries = [c for c, t in zip(h.engine.said, contexts(h), strict=True) if t.summarize]  # type: ignore[attr-defined]
    assert r.ledger.counts["summary_tokens"] == sum(len(c.ids) for c in summaries)
    assert "summary_cut" not in r.ledger.counts


async def test_a_summary_cut_by_its_length_is_closed_in_the_copy_and_counted() -> None:
    def rambles(t: Transcript) -> Turn:
        return Turn("on and on and on") if t.summarize else works(t)

    r = await rollout(agent(rambles, summary_tokens=3, steps=4, threshold=90))
    summary = r.trace.segments[0].spans[-1].ids
    assert len(summary) == 3
    assert END not in summary
    assert f"{chat().decode(summary)}<|im_end|>\n<|im_start|>user\n[left 2]" in text(r.trace.segments[1])
    assert r.ledger.counts["summary_cut"] == 1


async def test_a_summary_runs_no_calls_and_writes_no_rows() -> None:
    def acts(t: Transcript) -> Turn:
        return Turn("| A | 1 |", (call("echo", text="y"),) * 2) if t.summarize else works(t)

    r = await rollout(agent(acts, steps=4, summary_tokens=128, threshold=90, keep=0))
    assert r.ledger.counts["call_in_summary"] == 2
    assert r.ledger.counts["calls"] == 1
    assert r.ledger.critical_steps == 1 + 1 + 1
    assert (r.table, r.trace.status) == ((), "exhausted")


async def test_the_budget_may_run_out_at_a_summary_and_the_answer_still_fits() -> None:
    # 3 steps: a call, the summary, the answer.
    h = agent(steps=3, threshold=90)
    r = await rollout(h)
    assert [(t.left, t.summarize, t.last) for t in contexts(h)] == [
        (3, False, False),
        (2, True, False),
        (1, False, True),
    ]
    assert (r.trace.status, r.answer, r.ledger.critical_steps) == ("exhausted", "done", 3)


async def test_with_one_step_left_no_summary_is_asked_for() -> None:
    r = await rollout(agent(steps=2, threshold=90))
    assert [s.opened_by for s in r.trace.segments] == ["start"]
    assert (r.trace.status, r.answer) == ("exhausted", "done")


@pytest.mark.parametrize(("at_limit", "status"), [("answer", "exhausted"), ("cut", "truncated")])
async def test_past_the_last_rewrite_the_agent_answers_or_is_cut(at_limit: str, status: str) -> None:
    r = await rollout(agent(steps=100, limit=2, at_limit=at_limit))
    assert [s.opened_by for s in r.trace.segments] == ["start", "compaction", "compaction"]
    assert (r.trace.status, r.trace.error) == (status, "context" if status == "truncated" else "")
    assert ("answer now" in text(r.trace.segments[-1])) is (status == "exhausted")
    assert r.ledger.counts["compactions"] == 2


@pytest.mark.parametrize(("at_limit", "status"), [("answer", "exhausted"), ("cut", "truncated")])
async def test_when_not_even_the_task_fits_the_agent_answers_or_is_cut(at_limit: str, status: str) -> None:
    r = await rollout(agent(threshold=20, at_limit=at_limit))
    assert (r.trace.status, r.ledger.critical_steps) == (status, 2 + (at_limit == "answer"))
    assert len(r.trace.segments) == 1 + (at_limit == "answer")


async def test_the_last_step_is_an_answer_even_if_nothing_fits() -> None:
    r = await rollout(agent(threshold=20, at_limit="cut", steps=3))
    assert (r.trace.status, r.answer) == ("exhausted", "done")


async def test_a_step_that_was_dropped_never_comes_back() -> None:
    def rambles_once(t: Transcript) -> Turn:
        return Turn("z " * 60 if not t.summary else "short") if t.summarize else works(t)

    # A summary of 120 tokens leaves room for one step below 260, a short one for three.
    h = agent(rambles_once, keep=3, threshold=260, summary_tokens=128)
    await rollout(h)
    seen = [[e.results[0] for e in t.exchanges] for t in contexts(h)]
    assert seen[4:8] == [["x12", "x11", "x10", "x9"], ["x9"], ["x9", "x7"], ["x9", "x7"]]


@pytest.mark.parametrize(("at_limit", "status"), [("answer", "exhausted"), ("cut", "truncated")])
async def test_when_the_summary_has_no_room_the_agent_answers_or_is_cut(at_limit: str, status: str) -> None:
    # With the request 117 tokens are used: 117 + 140 > 256, but 117 − 10 + 128 fits.
    r = await rollout(agent(window=256, threshold=100, summary_tokens=140, at_limit=at_limit))
    assert (r.trace.status, len(r.trace.segments)) == (status, 1)
    assert r.ledger.critical_steps == 1 + (at_limit == "answer")


async def test_a_document_met_again_after_a_rewrite_is_written_out_again() -> None:
    def meets(t: Transcript) -> Turn:
        return works(t) if t.summarize or t.last else Turn("", (call("echo", text="Ohio", url="w/7"),))

    h = agent(meets, keep=0)
    await rollout(h)
    before, after, *_ = ([e.results[0] for e in t.exchanges] for t in contexts(h) if t.summarize)
    assert before == ["[Doc #1](w/7) Ohio", "#1", "#1"]
    assert after == ["[Doc #1](w/7) Ohio", "#1"]


async def test_a_subagent_compacts_its_own_context_and_its_parent_does_not() -> None:
    def leads(t: Transcript) -> Turn:
        create, assign = (
            call("create_subagent", name="a", system_prompt="Read."),
            call("assign_task", agent="a", prompt="p"),
        )
        return Turn("ok") if t.exchanges else Turn("", (create, assign))

    child, limits = agent(steps=8), SpawnLimits()
    r = await rollout(harness(leads, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits), steps=20))
    assert [s.opened_by for s in r.trace.segments] == ["start"]
    assert r.children[0].ledger.counts["compactions"] >= 2
    assert r.children[0].trace.segments[1].opened_by == "compaction"
    assert r.ledger.critical_steps == (1 + 8) + 1


async def test_an_orchestrator_compacts_and_its_children_start_afresh() -> None:
    def leads(t: Transcript) -> Turn:
        if t.summarize or t.last:
            return works(t)
        create = () if t.summary or t.exchanges else (call("create_subagent", name="a", system_prompt="Read."),)
        return Turn("", (*create, call("assign_task", agent="a", prompt=f"p{t.left}")))

    limits = SpawnLimits()
    child = harness(lambda t: Turn("| A | 1 |"))
    lead = agent(leads, steps=12, threshold=100)
    lead = replace(lead, tools=(*lead.tools, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits)))
    r = await rollout(lead)
    assert r.ledger.counts["compactions"] >= 1
    assert [s.opened_by for c in r.children for s in c.trace.segments] == ["start"] * len(r.children)
    assert sum(bool(s.subagents) for s in r.ledger.stages) == len(r.children) > 1


# --- truncation ------------------------------------------------------------------------


async def test_truncation_keeps_the_last_steps_and_costs_nothing() -> None:
    h = agent(kind="truncation", keep=1, steps=8)
    r = await rollout(h)
    assert {s.opened_by for s in r.trace.segments[1:]} == {"truncation"}
    assert r.ledger.counts["truncations"] == len(r.trace.segments) - 1 > 1
    assert "summary_tokens" not in r.ledger.counts
    assert len(r.ledger.stages) == len(sampled(r.trace.segments)) == 8
    assert all(len(ids) < 220 for ids in h.engine.asked)  # type: ignore[attr-defined]
    assert all(t.exchanges[-1].results == (f"x{t.left + 1}",) for t in contexts(h)[1:])
    # A third exchange would pass the threshold: of three, the last is kept.
    assert [len(t.exchanges) for t in contexts(h)] == [0, 1, 2, 1, 2, 1, 2, 1]


async def test_truncation_with_nothing_kept_begins_again_with_what_is_left() -> None:
    h = agent(kind="truncation", keep=0, threshold=90, steps=3)
    await rollout(h)
    assert [(len(t.exchanges), t.left, t.last) for t in contexts(h)] == [(0, 3, False), (0, 2, False), (0, 1, True)]


# --- what holds for every run ----------------------------------------------------------


async def test_a_state_between_any_two_turns_comes_back_from_bytes() -> None:
    h = agent(keep=1, steps=6)
    state = begin(h, TASK, seed=1)
    while state.status == "running":
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State)
        assert again == state
        state = await step(h, again)
    assert state.ledger.counts["compactions"] >= 1


scripts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(
    script=scripts,
    kind=st.sampled_from(["truncation", "compaction"]),
    threshold=st.integers(40, 300),
    keep=st.integers(0, 3),
    steps=st.integers(1, 14),
    limit=st.integers(0, 4),
    at_limit=st.sampled_from(["answer", "cut"]),
    turn=st.integers(8, 100),
    summary_tokens=st.integers(1, 40),
)
def test_every_sampled_id_is_trained_once_and_contexts_only_grow_or_are_replaced(
    script: list[tuple[int, int]], turn: int, **options: object
) -> None:
    def say(t: Transcript) -> Turn:
        calls, words = script[t.left % len(script)]
        return Turn("word " * words, () if t.summarize or t.last else (call("echo", text="y" * words),) * calls)

    def speak(ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        said = say(read(chat().decode(ids)))
        return chat().encode_turn(said.content, said.calls)

    h = replace(agent(window=440, turn=turn, **options), engine=Heard(ScriptedEngine(speak)))  # type: ignore[arg-type]
    r = trio.run(rollout, h)
    heard = h.engine
    assert isinstance(heard, Heard)
    assert sampled(r.trace.segments) == [c.ids for c in heard.said]
    assert len(r.ledger.stages) == len(heard.said)
    assert all(t.count("[left ") == t.count("<|im_start|>user") for t in map(chat().decode, heard.asked))
    rewrites = 0
    for (before, after), said in zip(pairwise(heard.asked), heard.said, strict=False):
        grown = [*before, *said.ids]
        rewrites += after[: len(grown)] != grown
    assert rewrites <= len(r.trace.segments) - 1 <= int(options["limit"])  # type: ignore[call-overload]
    assert r.ledger.critical_steps <= int(options["steps"])  # type: ignore[call-overload]
    assert all(len(a) + len(c.ids) <= 440 for a, c in zip(heard.asked, heard.said, strict=False))
