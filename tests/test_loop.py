"""The one loop: order, cost, budget, deadlines, and what a bad turn leads to."""

from dataclasses import replace

import trio

from swarm.gather import Job, gather
from swarm.loop import Harness, begin, run, step
from swarm.types import Budget, Rollout, Turn
from tests.swarm_cases import TASK, call, chat, harness, says

DONE = Turn("done")


async def rollout(h: Harness, **options: object) -> Rollout:
    return await run(h, begin(h, TASK, seed=1, **options))  # type: ignore[arg-type]


def text(r: Rollout) -> str:
    return chat().decode(r.trace.segments[0].ids)


async def test_results_come_back_in_call_order_whichever_ends_first(autojump_clock):
    slow, quick = call("echo", text="slow", seconds=9), call("echo", text="quick")
    r = await rollout(harness(says(Turn("", (slow, quick)), DONE)))
    assert text(r).index("slow\n</tool_response>") < text(r).index("quick\n</tool_response>")


async def test_calls_of_a_turn_run_at_once(autojump_clock):
    calls = tuple(call("echo", text="x", seconds=5) for _ in range(4))
    r = await rollout(harness(says(Turn("", calls), DONE)))
    assert r.ledger.seconds == 5.0


async def test_every_ordinary_call_costs_a_step_and_an_answer_one():
    r = await rollout(harness(says(Turn("", (call("echo", text="x"),) * 3), Turn("", (call("echo", text="y"),)), DONE)))
    assert r.ledger.critical_steps == 3 + 1 + 1
    assert r.trace.status == "answered"


async def test_calls_beyond_the_budget_are_refused_and_the_answer_still_fits():
    r = await rollout(harness(says(Turn("", (call("echo", text="x"),) * 9), DONE), steps=4))
    assert r.ledger.critical_steps == 4
    assert r.ledger.counts["over_budget"] == 6
    assert (r.trace.status, r.answer) == ("exhausted", "done")


async def test_the_budget_that_is_left_is_shown_every_turn_and_the_last_turn_is_announced():
    r = await rollout(harness(says(Turn("", (call("echo", text="x"),))), steps=3))
    assert [left in text(r) for left in ("[left 3]", "[left 2]", "[left 1] answer now")] == [True] * 3
    assert r.ledger.counts["call_after_budget"] == 1
    assert r.ledger.critical_steps == 3


async def test_malformed_and_unknown_calls_give_a_short_error_and_are_counted():
    broken = '<tool_call>\n{"name": "echo"'
    policy = says(Turn("", (call("fly", to="moon"), call("echo"))), DONE)
    r = await rollout(harness(policy))
    assert r.ledger.counts["unknown_tool"] == 1
    assert r.ledger.counts["bad_arguments"] == 1
    assert "error: no tool 'fly', have echo" in text(r)
    parsed = chat().parse([*chat().tokenizer.encode(broken, add_special_tokens=False)])
    assert len(parsed.malformed) == 1


async def test_a_deadline_cuts_the_agent_and_keeps_the_rows_it_wrote(autojump_clock):
    policy = says(Turn("| A | 1 |", (call("echo", text="x"),)), Turn("", (call("echo", text="x", seconds=1e6),)))
    r = await rollout(harness(policy))
    assert (r.trace.status, r.trace.error) == ("truncated", "deadline")
    assert r.table == (("A", "1"),)
    assert r.ledger.seconds == 100.0


async def test_an_engine_error_is_data_and_no_answer():
    r = await rollout(harness(says(Turn("", (call("echo", text="x"),)), DONE), fail_at=[1]))
    assert r.trace.status == "error"
    assert r.failed
    assert len(r.ledger.stages) == 1


async def test_a_full_context_makes_the_next_turn_the_last():
    h = harness(says(Turn("", (call("echo", text="x " * 40),))), steps=100)
    r = await rollout(h, budget=Budget(100, 2400))
    assert r.trace.status == "exhausted"
    assert len(r.trace.segments[0].ids) <= 2400


async def test_trained_ids_are_exactly_the_sampled_ones_and_the_prompt_only_grows():
    h = harness(says(Turn("a", (call("echo", text="<|im_end|>"),)), Turn("b")))
    state = begin(h, TASK, seed=1)
    before = state.segment.ids
    while state.status == "running":
        state = await step(h, state)
        assert state.segment.ids[: len(before)] == before
        before = state.segment.ids
    sampled = [s for s in state.segment.spans if s.kind == "sampled"]
    expected = (chat().encode_turn("a", (call("echo", text="<|im_end|>"),)), chat().encode_turn("b"))
    assert tuple(list(s.ids) for s in sampled) == expected


async def test_without_a_scratchpad_an_answer_hands_in_only_the_rows_that_it_holds():
    notes = Turn("| A | 1 |", (call("echo", text="x"),))
    for answer, kept, lost in (("| B | 2 |", (("A", "1"), ("B", "2")), (("B", "2"),)), ("#rows", (("A", "1"),), ())):
        h = harness(says(notes, Turn(answer)))
        assert (await rollout(h)).table == kept
        assert (await rollout(replace(h, scratchpad=False))).table == lost


async def test_without_a_scratchpad_an_agent_that_is_cut_hands_in_nothing(autojump_clock):
    policy = says(Turn("| A | 1 |", (call("echo", text="x"),)), Turn("", (call("echo", text="x", seconds=1e6),)))
    assert (await rollout(replace(harness(policy), scratchpad=False))).table == ()


async def test_the_same_seed_gives_the_same_rollout_and_cancelling_leaves_nothing(autojump_clock):
    h = harness(says(Turn("", (call("echo", text="x", seconds=3, url="w/1"),)), Turn("| #1 | #1.a |")))
    once, twice = await rollout(h), await rollout(h)
    assert once == twice
    assert once.table == (("x", "X"),)
    with trio.move_on_after(1):
        await gather([Job(h, TASK, k, h.budget) for k in range(5)])
    assert h.engine.pending == 0  # type: ignore[attr-defined]


async def test_many_rollouts_come_back_in_order_however_few_run_at_once(autojump_clock):
    h = harness(says(Turn("", (call("echo", text="x", seconds=1),)), DONE))
    seen: list[Rollout] = []
    rollouts = await gather([Job(h, TASK, k, Budget(5 + k, 4096)) for k in range(6)], at_once=2, done=seen.append)
    assert len(seen) == 6
    assert [f"[left {5 + k}]" in text(r) for k, r in enumerate(rollouts)] == [True] * 6
