"""Replay: what the loop makes of a record is the rollout again, and what is not is named, to the token."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from swarm.chat import HermesChat
from swarm.kept import RecordGap, turns_of
from swarm.loop import Harness, Subagent, begin, run
from swarm.recheck import recheck, sampled
from swarm.records import read, write
from swarm.replay import Difference, differences, replay
from swarm.types import Budget, Completion, Reward, Rollout, Segment, Span, Trace, Turn
from tests import test_compaction
from tests.debug_cases import CREATE, assign, language, rolled, swarm, text
from tests.swarm_cases import TASK, call, engine, harness, says

ECHO = Turn("", (call("echo", text="x"),))


async def recorded(h: Harness, folder: Path, budget: Budget | None = None) -> Rollout:
    """A rollout as it is read from its file."""
    r = await run(h, begin(h, TASK, seed=3, budget=budget))
    write(folder / "r.rollouts", [r])
    [kept] = read(folder / "r.rollouts")
    assert kept == r
    return kept


async def same(r: Rollout) -> bool:
    again = await replay(r, language)
    return not differences(r, again) and again == r


async def test_a_swarm_is_replayed_with_its_children_and_its_clock(tmp_path):
    r = await recorded(swarm(), tmp_path)
    assert len(r.children) == 2
    assert r.ledger.seconds > 0
    assert await same(r)


@pytest.mark.parametrize("kind", ["compaction", "truncation"])
@pytest.mark.parametrize("steps", [3, 8, 14])
async def test_rewritten_contexts_are_made_again(tmp_path, kind, steps):
    r = await recorded(test_compaction.agent(steps=steps, kind=kind), tmp_path, Budget(steps, 1024))
    assert (len(r.trace.segments) > 1) == (steps > 3)
    assert await same(r)


async def test_calls_that_were_refused_malformed_or_unknown_are_so_again(tmp_path):
    work = assign("p").calls
    refused = (call("echo"), call("fly"), CREATE, CREATE, *assign("").calls, *work, *work)
    too_long, too_many = (Turn("", (call("echo", text="x"),) * n) for n in (40, 8))
    r = await recorded(swarm(says(Turn("", refused), too_long, too_many, Turn("#1")), steps=8), tmp_path)
    assert r.trace.acts[0].refused == (0, 1, 3, 4, 6)
    assert {
        "unknown_tool",
        "bad_arguments",
        "duplicate_agent",
        "malformed_call",
        "over_budget",
    } <= r.ledger.counts.keys()
    assert await same(r)


async def test_an_agent_that_a_deadline_cut_is_cut_again_where_it_was(tmp_path, autojump_clock):
    policy = says(Turn("| A | 1 |", (call("echo", text="x"),)), Turn("", (call("echo", text="x", seconds=1e6),)))
    r = await recorded(harness(policy), tmp_path)
    assert (r.trace.error, r.table) == ("deadline", (("A", "1"),))
    assert await same(r)


async def test_a_subagent_that_a_deadline_cut_is_cut_again(tmp_path, autojump_clock):
    child = harness(says(Turn("| A | 1 |", (call("echo", text="x", seconds=1e6),))))
    child = replace(child, budget=Budget(10, 4096, seconds=5.0))
    r = await recorded(swarm(says(Turn("", (CREATE, *assign("p").calls)), Turn("#1")), child), tmp_path)
    assert r.children[0].trace.status == "truncated"
    assert await same(r)


async def test_an_engines_failure_is_one_again_in_an_agent_and_in_its_subagent(tmp_path):
    assert await same(await recorded(harness(says(ECHO), fail_at=[2]), tmp_path / "one"))
    child = harness(says(ECHO), fail_at=[1])
    r = await recorded(swarm(says(Turn("", (CREATE, *assign("p").calls)), Turn("x")), child), tmp_path / "two")
    assert r.failed
    assert await same(r)


async def test_a_context_without_room_is_cut_again(tmp_path):
    r = await recorded(harness(says(ECHO), steps=99), tmp_path, Budget(99, 700))
    assert r.trace.status in ("exhausted", "truncated")
    assert await same(r)


async def test_nested_spawns_are_replayed_to_the_leaf(tmp_path):
    limits = SpawnLimits(depth=3)
    policy = says(Turn("", (CREATE, *assign("deeper").calls)), Turn("end"))
    h = harness(policy, CreateSubagent(limits), AssignTask(lambda *_: Subagent(h), limits), steps=40)
    r = await recorded(h, tmp_path)
    assert r.children[0].children[0].children
    assert await same(r)


async def test_a_turn_during_which_the_weights_changed_is_said_again_with_both_versions():
    class Changes:
        async def generate(self, ids, sampling):
            said = h.chat.encode_turn("two versions")  # type: ignore[attr-defined]
            return Completion(tuple(said), (-0.5,) * len(said), 4, "stop", 7, 0.25, ((3, 2),))

        async def load(self, ref): ...

    h = harness(says(ECHO))
    r = await rolled(replace(h, engine=Changes()))
    assert [s.version for s in r.trace.segments[0].spans if s.kind == "sampled"] == [3, 4]
    assert turns_of(r.trace)[0].earlier == ((3, 2),)
    assert (r.ledger.tokens_cached, r.ledger.seconds_queued) == (7, 0.25)
    assert await same(r)


# --- differences -----------------------------------------------------------------------


class Louder(HermesChat):
    def observe(self, results, note, *, closed):
        return super().observe([t.replace("look", "LOOK") for t in results], note, closed=closed)


async def test_another_language_is_found_at_its_first_token_in_its_turn():
    r = await rolled(swarm())
    loud = Louder(language(r.trace).tokenizer, terse_tools=True)
    found = differences(r, await replay(r, lambda trace: loud), loud.decode)
    first = found[0]
    ids = r.trace.segments[0].ids
    assert (first.agent, first.turn) == ("main", 1)
    at = int(first.what.removeprefix("token "))
    assert first.recorded == loud.decode(ids[at : at + 8])
    assert first.recorded[0].lower() == first.replayed[0].lower()
    assert first.recorded != first.replayed


def tampered(r: Rollout, **ledger: object) -> Rollout:
    return replace(r, ledger=structs.replace(r.ledger, **ledger))


async def test_log_probabilities_are_compared_to_the_nats_that_are_asked_for():
    r = await rolled(harness(says(Turn("done"))))
    spans = r.trace.segments[0].spans
    nearly = Span("sampled", spans[1].ids, (*spans[1].logprobs[:-1], -1e-6))
    other = replace(r, trace=replace(r.trace, segments=(Segment((spans[0], nearly)),)))
    last = len(r.trace.segments[0].ids) - 1
    assert differences(r, other) == [Difference("main", 0, f"log-probability of token {last}", "0.0", "-1e-06")]
    assert differences(r, other, nats=1e-5) == []


async def test_a_ledger_or_a_reward_that_comes_out_otherwise_is_a_difference_at_the_end():
    r = await rolled(harness(says(ECHO, Turn("done"))))
    again = await replay(r, language)
    assert differences(tampered(r, tokens_sampled=5), again) == [
        Difference("main", 2, "ledger tokens_sampled", "5", str(r.ledger.tokens_sampled))
    ]
    one, other = (replace(x, reward=Reward({"perf": p}, {"perf": 1.0})) for x, p in ((r, 0.5), (again, 0.25)))
    assert [d.what for d in differences(one, other)] == ["reward"]
    assert differences(one, again) == []


async def test_a_token_that_the_record_lost_is_named_in_the_subagent_that_it_was_of():
    r = await rolled(swarm())
    child = r.children[1]
    spans = child.trace.segments[0].spans
    short = Span("observed", spans[2].ids[:-1])
    segment = Segment((*spans[:2], short, *spans[3:]))
    broken = replace(child, trace=replace(child.trace, segments=(segment,)))
    found = differences(replace(r, children=(r.children[0], broken)), r)
    assert [(d.agent, d.turn) for d in found] == [("main/3:a", 1)]
    assert str(found[0]).startswith("main/3:a, turn 1, token ")


async def test_differences_say_where_texts_part():
    r = await rolled(harness(says(Turn("the same beginning of an answer, then Ohio"))))
    [found] = differences(replace(r, answer=r.answer.replace("Ohio", "Utah")), r)
    assert found.recorded.endswith("Utah")
    assert found.replayed.endswith("Ohio")


# --- what cannot be replayed -----------------------------------------------------------


async def test_a_record_without_a_setup_is_refused_by_name():
    r = await rolled(swarm())
    bare = replace(r.children[0], trace=replace(r.children[0].trace, setup=None, acts=()))
    with pytest.raises(RecordGap, match="main/2:a: its record has no setup and no results of calls"):
        await replay(replace(r, children=(bare, r.children[1])), language)


async def test_a_record_whose_parts_do_not_agree_is_refused():
    r = await rolled(harness(says(ECHO, Turn("done"))))
    acts = (structs.replace(r.trace.acts[0], sampled=1), *r.trace.acts[1:])
    with pytest.raises(RecordGap, match=r"main: turn 0 has \d+ sampled ids in its spans, want 1"):
        await replay(replace(r, trace=replace(r.trace, acts=acts)), language)


async def test_the_text_of_a_replay_is_what_its_policy_read():
    r = await rolled(swarm())
    assert text(await replay(r, language)) == text(r)


def test_a_trace_of_somebody_elses_agent_has_no_acts():
    assert turns_of(Trace("main", (Segment((Span("prompt", (1,)),)),), "answered")) == []


# --- with an engine --------------------------------------------------------------------


async def test_the_engine_that_made_a_record_says_the_same_today(tmp_path):
    for h in (swarm(), test_compaction.agent(steps=14)):
        r = await rolled(h)
        said = await recheck(r, lambda trace, own=h: own.engine if trace.agent == "main" else None)
        assert [(s.turn, s.at, s.error) for s in said] == [(k, -1, "") for k in range(len(r.trace.acts))]


async def test_every_turn_is_asked_after_its_own_context_with_its_own_seed_and_length():
    h = test_compaction.agent(steps=14)
    r = await rolled(h)
    heard = test_compaction.Heard(h.engine.inner)  # type: ignore[attr-defined]
    await recheck(r, lambda _: heard, at_once=1)
    assert sorted(heard.asked) == sorted(h.engine.asked)  # type: ignore[attr-defined]
    summaries = [t.sampling.max_tokens == 32 for t in sampled(r.trace)]
    assert sum(summaries) == len(r.trace.segments) - 1 > 0


async def test_the_first_token_where_a_policy_differs_and_its_drift_before_are_told():
    class Drifted:
        async def generate(self, ids, sampling):
            said = h.chat.encode_turn("one three")  # type: ignore[attr-defined]
            return Completion(tuple(said), (-0.25,) * len(said), 9, "stop")

        async def load(self, ref): ...

    h = harness(says(Turn("one two")))
    r = await rolled(h)
    [said] = await recheck(r, lambda _: Drifted())
    both = (h.chat.encode_turn(t) for t in ("one two", "one three"))  # type: ignore[attr-defined]
    at = next(k for k, (a, b) in enumerate(zip(*both, strict=False)) if a != b)
    assert (said.at, said.drift) == (at, 0.25)


async def test_an_engine_that_fails_is_told_of_its_turn():
    r = await rolled(harness(says(ECHO, Turn("done"))))
    said = await recheck(r, lambda _: engine(says(ECHO), fail_at=[0, 1]))
    assert [s.error.startswith("scripted failure") for s in said] == [True, True]
