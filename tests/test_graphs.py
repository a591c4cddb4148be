"""Graphs of LangGraph as harnesses: the same rollouts as the native loop's, fan-out, ends, and nothing left behind."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
from langchain_core.messages import HumanMessage
from langgraph.prebuilt import create_react_agent
from langgraph.warnings import LangGraphDeprecatedSinceV10

from recipes.graphs import react, supervisor
from swarm.context import ContextPolicy
from swarm.engine.scripted import ScriptedEngine
from swarm.gather import Job, gather
from swarm.graph_bridge import Loop
from swarm.graphs import GraphRunner
from swarm.loop import Harness
from swarm.transcript import Transcript
from swarm.types import Budget, Completion, Engine, Rollout, Sampling, Turn
from tests.graph_cases import LOOP, Kept, leads, of_node, of_nodes, rolled, runner, timeless
from tests.swarm_cases import TASK, call, chat, harness, says
from tests.test_spawning import CREATE, READ, assign, swarm

ECHO = Turn("", (call("echo", text="x"),))
DONE = Turn("done")


def text(r: Rollout, segment: int = 0) -> str:
    return chat().decode(r.trace.segments[segment].ids)


async def running() -> int:
    """Tasks on the graphs' loop, beside the one that counts."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return await LOOP.run(count)


# --- the prebuilt agent ------------------------------------------------------------------

HARNESSES = {
    "a call": lambda: harness(says(ECHO, DONE)),
    "calls at once": lambda: harness(
        says(Turn("| A | 1 |", tuple(call("echo", text=t, url=f"w/{t}") for t in "xyx")), Turn("| #1 | #2.a |"))
    ),
    "a refused call": lambda: harness(says(Turn("", (call("echo"), call("echo", text="x"))), DONE)),
    "more calls than steps": lambda: harness(says(Turn("", (call("echo", text="x"),) * 9), DONE), steps=4),
    "the last turn": lambda: harness(says(ECHO), steps=3),
    "subagents": lambda: swarm(says(Turn("", (CREATE, assign("p"), assign("q"), assign("p"))), Turn("#1 #2"))),
    "a failed subagent": lambda: swarm(says(Turn("", (CREATE, assign("p"))), DONE), harness(READ, fail_at=[0])),
}


@pytest.mark.parametrize("case", list(HARNESSES))
async def test_a_prebuilt_agent_makes_the_very_rollout_of_the_native_loop(case: str):
    native = HARNESSES[case]()
    expected = await native.roll(TASK, 1, native.budget)
    h = HARNESSES[case]()
    assert timeless(await rolled(react, h)) == timeless(expected)


async def test_an_engine_that_fails_makes_the_rollout_an_error():
    r = await rolled(react, harness(says(ECHO, DONE), fail_at=[1]))
    assert (r.trace.status, r.trace.error) == ("error", "scripted failure of call 1")
    assert len(r.ledger.stages) == 1


async def test_the_prebuilt_agent_of_langgraph_itself_makes_it_too():
    def graph_of(model, tools):
        with pytest.warns(LangGraphDeprecatedSinceV10):
            return create_react_agent(model, list(tools))

    h = HARNESSES["calls at once"]()
    expected = await h.roll(TASK, 1, h.budget)
    assert timeless(await rolled(graph_of, HARNESSES["calls at once"]())) == timeless(expected)


async def test_results_stand_in_call_order_whichever_ends_first():
    slow, quick = call("echo", text="slow", url="w/s", seconds=0.02), call("echo", text="quick", url="w/q")
    r = await rolled(react, harness(says(Turn("", (slow, quick)), DONE)))
    assert text(r).index("[Doc #1](w/s) slow\n</tool_response>") < text(r).index("[Doc #2](w/q) quick")


async def test_without_a_scratchpad_only_the_answers_rows_count():
    h = harness(says(Turn("| A | 1 |", (call("echo", text="x"),)), Turn("| B | 2 |")))
    assert (await rolled(react, h)).table == (("A", "1"), ("B", "2"))
    assert (await rolled(react, replace(h, scratchpad=False))).table == (("B", "2"),)


async def test_a_malformed_call_is_counted_and_ends_the_prebuilt_agent():
    broken = [*chat().tokenizer.encode('<tool_call>\n{"name": ', add_special_tokens=False), chat().stop[0]]
    h = replace(harness(says()), engine=ScriptedEngine(lambda ids, sampling: broken))
    r = await rolled(react, h)
    assert (r.trace.status, r.ledger.counts) == ("answered", {"malformed_call": 1})


# --- a supervisor ------------------------------------------------------------------------


async def test_a_supervisors_workers_run_at_once_and_each_has_a_segment_of_its_own():
    r = await rolled(supervisor, harness(leads, steps=20))
    assert (r.trace.status, r.answer) == ("answered", "all\n#rows")
    assert sorted(r.table) == [("1", "1"), ("3", "3")]
    assert len(r.trace.segments) == 3
    assert len(r.ledger.stages) == 2 + 2 + 4


class Together(Kept):
    """Answers the workers only when both have asked."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.waiting, self.both = 0, trio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        if "Fill rows." in chat().decode(ids):
            self.waiting += 1
            if self.waiting == 2:
                self.both.set()
            await self.both.wait()
        return await super().generate(ids, sampling)


async def test_workers_that_overlap_cost_what_one_costs_and_handing_over_costs_a_turn():
    def brief(t: Transcript) -> Turn:
        handed = Turn("", tuple(call("hand_over", prompt=p) for p in "ab"))
        return handed if "hand_over" in t.system and not t.exchanges else DONE

    h = harness(brief)
    r = await rolled(supervisor, replace(h, engine=Together(h.engine)))
    assert len(r.ledger.stages) == 4
    assert r.ledger.critical_steps == 1 + 1 + 1


async def test_a_document_has_its_label_in_every_conversation_that_meets_it():
    def read(t: Transcript) -> Turn:
        if "hand_over" in t.system:
            return DONE if t.exchanges else Turn("", tuple(call("hand_over", prompt=p) for p in "ab"))
        return DONE if len(t.exchanges) == 2 else Turn("", (call("echo", text="x", url="w/1"),))

    r = await rolled(supervisor, harness(read, steps=20))
    workers = [text(r, k) for k, s in enumerate(r.trace.segments) if "Fill rows." in text(r, k)]
    assert [(w.count("[Doc #1](w/1) x\n"), w.count("\n#1\n")) for w in workers] == [(1, 1), (1, 1)]


async def test_what_another_agent_said_last_is_told_as_the_users_words():
    def graph_of(model, tools):
        worker = react(model, [])

        async def node(state):
            ended = await worker.ainvoke({"messages": [HumanMessage("a part")]}, None)
            shared = [*state["messages"], ended["messages"][-1].model_copy(update={"name": "reader"})]
            said = await model.ainvoke(shared)
            return {"messages": [said, await model.ainvoke([*shared, said, HumanMessage("and?")])]}

        return node

    r = await rolled(of_node(graph_of), harness(lambda t: Turn(t.user.replace("\n", " ")), steps=9), note=False)
    assert len(r.trace.segments) == 2
    assert "<|im_start|>user\nList the airports.\n\nreader:\na part<|im_end|>" in text(r, 1)
    assert r.answer == "List the airports.  reader: a part"


# --- many at once ------------------------------------------------------------------------


@pytest.mark.slow
async def test_64_rollouts_at_once_are_not_mixed_up():
    def policy(t: Transcript) -> Turn:
        if len(t.exchanges) < 3:
            return Turn("", (call("echo", text=f"{t.user.split()[0]}-{len(t.exchanges)}", url="w"),))
        return Turn(f"| {t.user.split()[0]} | {t.exchanges[-1].results[0]} |")

    r = runner(react, harness(policy))
    tasks = [replace(TASK, id=str(k), query=f"q{k}") for k in range(64)]
    rollouts = await gather([Job(r, task, 1, r.budget) for task in tasks])
    assert [x.table for x in rollouts] == [((f"q{k}", f"q{k}-0"),) for k in range(64)]
    assert [len(x.trace.segments) for x in rollouts] == [1] * 64
    assert await running() == 0


# --- ends --------------------------------------------------------------------------------


class Stuck(ScriptedEngine):
    """Never answers; says that it was asked."""

    def __init__(self, asks: int = 1) -> None:
        super().__init__(lambda ids, sampling: (), delay=float("inf"))
        self.asks, self.asked = asks, trio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling):
        if self.calls + 1 == self.asks:
            self.asked.set()
        return await super().generate(ids, sampling)


def stuck(asks: int = 1) -> tuple[Harness, Stuck]:
    engine = Stuck(asks)
    return replace(harness(says()), engine=engine), engine


async def test_at_the_deadline_graph_and_request_end(mock_clock):
    h, engine = stuck()
    async with trio.open_nursery() as nursery:
        ended: list[Rollout] = []

        async def roll() -> None:
            ended.append(await rolled(react, h))

        nursery.start_soon(roll)
        await engine.asked.wait()
        mock_clock.jump(101)
    assert (ended[0].trace.status, ended[0].trace.error) == ("truncated", "deadline")
    assert (engine.pending, await running()) == (0, 0)


async def test_rows_that_were_written_before_the_deadline_are_handed_in(mock_clock):
    policy = says(Turn("| A | 1 |", (call("echo", text="x", seconds=1e6),)))
    h = harness(policy)
    async with trio.open_nursery() as nursery:
        ended: list[Rollout] = []

        async def roll() -> None:
            ended.append(await rolled(react, h))

        nursery.start_soon(roll)
        while h.engine.calls == 0 or h.engine.pending:  # type: ignore[attr-defined]
            await trio.lowlevel.checkpoint()
        mock_clock.jump(101)
    assert (ended[0].trace.status, ended[0].table) == ("truncated", (("A", "1"),))


async def test_who_cancels_a_rollout_waits_until_graph_and_requests_have_ended():
    h, engine = stuck(asks=2)
    both = of_nodes(lambda model, tools: {name: asks(model) for name in ("a", "b")})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rolled, both, h)
        await engine.asked.wait()
        nursery.cancel_scope.cancel()
    assert (engine.pending, await running()) == (0, 0)


def asks(model):
    async def node(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    return node


async def test_an_error_of_a_node_is_the_rollouts_and_ends_what_runs_beside_it():
    h, engine = stuck()

    def nodes(model, tools):
        async def fails(state):
            while not engine.asked.is_set():
                await asyncio.sleep(0)
            raise KeyError("no such page")

        return {"asks": asks(model), "fails": fails}

    r = await rolled(of_nodes(nodes), h)
    assert (r.trace.status, r.trace.error) == ("error", "KeyError: 'no such page'")
    assert r.failed
    assert (engine.pending, await running()) == (0, 0)


async def test_a_graph_that_blocks_its_loop_is_given_up_with_one_line():
    blocked, free = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def node_of(model, tools):
        async def blocks(state):
            token.run_sync_soon(blocked.set)
            free.wait()
            return {}

        return blocks

    ended: list[Rollout] = []
    h = harness(says(DONE))
    r = GraphRunner(of_node(node_of), h, loop=Loop(grace=0.0))

    async def roll() -> None:
        ended.append(await r.roll(TASK, 1, Budget(5, 4096, seconds=0.05)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(roll)
    free.set()
    assert ended[0].trace.status == "error"
    assert "a graph did not end within 0 s of its cancellation" in ended[0].trace.error


def test_the_thread_of_a_loop_ends_with_it():
    before = set(threading.enumerate())
    loop = Loop()
    (thread,) = set(threading.enumerate()) - before
    del loop
    thread.join(10)
    assert not thread.is_alive()


async def test_a_graph_beyond_its_recursion_limit_is_truncated():
    r = await rolled(lambda model, tools: react(model, tools).with_config(recursion_limit=5), harness(says(ECHO)))
    assert (r.trace.status, r.trace.error) == ("truncated", "recursion limit")
    assert r.ledger.critical_steps == 3


def insists(model, tools):
    """Asks until it is refused."""

    async def node(state):
        messages = state["messages"]
        while True:
            messages = [*messages, await model.ainvoke(messages), HumanMessage("more")]

    return node


@pytest.mark.parametrize(("note", "status", "error"), [(True, "exhausted", ""), (False, "truncated", "budget")])
async def test_a_graph_that_asks_beyond_the_budget_is_ended_with_the_rows_so_far(note, status, error):
    r = await rolled(of_node(insists), harness(says(Turn("| A | 1 |")), steps=3), note=note)
    assert (r.trace.status, r.trace.error) == (status, error)
    assert (r.ledger.critical_steps, set(r.table)) == (3, {("A", "1")})


async def test_a_graph_that_asks_beyond_the_context_is_truncated():
    h = replace(harness(says(DONE), steps=99), budget=Budget(99, 700))
    r = await rolled(of_node(insists), h, note=False)
    assert (r.trace.status, r.trace.error) == ("truncated", "context")


async def test_a_graph_without_an_answer_is_an_error_that_says_what_there_was():
    r = await rolled(of_node(lambda model, tools: lambda state: {"messages": []}), harness(says(DONE)))
    assert r.trace.error == "ValueError: the graph ended with messages, want messages with one of an assistant"


def test_a_harness_that_rewrites_its_context_is_refused():
    h = replace(harness(says()), context=ContextPolicy("truncation", threshold=300))
    with pytest.raises(ValueError, match="context = truncation, want none"):
        runner(react, h)


# --- nodes that are no coroutines ----------------------------------------------------------


async def test_a_node_without_await_may_ask_and_call_too():
    def node_of(model, tools):
        def node(state):
            said = model.bind_tools(tools).invoke(state["messages"])
            heard = [tools[0].invoke({**c, "type": "tool_call"}) for c in reversed(said.tool_calls)]
            return {"messages": [said, *heard, model.bind_tools(tools).invoke([*state["messages"], said, *heard])]}

        return node

    h = harness(says(Turn("", (call("echo", text="x"), call("echo", text="y"))), DONE))
    expected = await h.roll(TASK, 1, h.budget)
    assert timeless(await rolled(of_node(node_of), h)) == timeless(expected)


async def test_a_node_that_waits_in_a_thread_is_let_go_with_its_rollout():
    h, engine = stuck()
    let_go = threading.Event()

    def node_of(model, tools):
        def node(state):
            try:
                return {"messages": [model.invoke(state["messages"])]}
            finally:
                let_go.set()

        return node

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rolled, of_node(node_of), h)
        await engine.asked.wait()
        nursery.cancel_scope.cancel()
    assert let_go.wait(10)
    assert engine.pending == 0


@pytest.mark.parametrize("what", ["model", "tool"])
async def test_waiting_in_an_async_node_is_refused(what):
    def node_of(model, tools):
        async def node(state):
            said = await model.bind_tools(tools).ainvoke(state["messages"])
            asked = model.invoke(state["messages"]) if what == "model" else tools[0].invoke(said.tool_calls[0])
            return {"messages": [asked]}

        return node

    r = await rolled(of_node(node_of), harness(says(ECHO)))
    assert r.trace.error == f"RuntimeError: {what}.invoke in an async node, want await {what}.ainvoke"
