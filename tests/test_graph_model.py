"""The policy as a LangChain chat model: tools, structured output, streaming, and what it refuses."""

from contextvars import copy_context
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from recipes.graphs import react
from swarm.engine.scripted import ScriptedEngine
from swarm.graph_model import GraphModel
from swarm.types import Rollout, Turn
from tests.graph_cases import of_node, rolled
from tests.swarm_cases import call, chat, harness, says
from tests.test_spawning import CREATE, assign, swarm

DONE = Turn("done")


class Answer(BaseModel):
    """The answer."""

    airport: str
    runways: int = 1


@tool
def fly(to: str) -> str:
    """Fly there."""
    return f"landed in {to}"


async def heard(node_of, *turns: Turn) -> tuple[list[Any], Rollout]:
    """What `node_of(model, tools, messages)` gave, run in a node."""
    got: list[Any] = []

    def of(model, tools):
        async def node(state):
            got.append(await node_of(model, tools, state["messages"]))
            return {"messages": [AIMessage("end")]}

        return node

    r = await rolled(of_node(of), harness(says(*turns)))
    return got, r


async def error(node_of, *turns: Turn) -> str:
    """How the rollout failed."""
    _, r = await heard(node_of, *(turns or (DONE,)))
    return r.trace.error


# --- replies -----------------------------------------------------------------------------


async def test_a_reply_says_what_was_called_and_what_it_cost():
    (message,), r = await heard(
        lambda model, tools, m: model.bind_tools([fly]).ainvoke(m), Turn("so", (call("fly", to="x"),))
    )
    assert message.content == "so"
    assert [(c["name"], c["args"]) for c in message.tool_calls] == [("fly", {"to": "x"})]
    assert message.usage_metadata["output_tokens"] == r.ledger.tokens_sampled
    assert message.usage_metadata["input_tokens"] == r.ledger.tokens_prompt
    assert message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("turn", [Turn("two  words\n", (call("fly", to="x"), call("fly", to="y", n=2))), DONE])
async def test_streamed_pieces_add_up_to_the_reply_which_is_asked_for_once(turn: Turn):
    async def node_of(model, tools, messages):
        pieces = [piece async for piece in model.bind_tools([fly]).astream(messages)]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        return pieces, whole, await model.bind_tools([fly]).ainvoke([*messages, HumanMessage("again")])

    ((pieces, whole, invoked),), r = await heard(node_of, turn)
    assert len(pieces) > len(turn.content.split()) + len(turn.calls)
    assert whole.content == invoked.content == turn.content.strip()
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(c.name, dict(c.arguments)) for c in turn.calls]
    assert whole.usage_metadata["output_tokens"] == invoked.usage_metadata["output_tokens"]
    assert len(r.ledger.stages) == 2


async def test_a_streamed_reply_is_gone_on_from():
    async def node_of(model, tools, messages):
        whole: AIMessageChunk | None = None
        async for piece in model.bind_tools([fly]).astream(messages):
            whole = piece if whole is None else whole + piece
        assert whole is not None
        results = [ToolMessage("there", tool_call_id=c["id"]) for c in whole.tool_calls]
        return await model.bind_tools([fly]).ainvoke([*messages, whole, *results])

    _, r = await heard(node_of, Turn("go", (call("fly", to="x"),)), DONE)
    assert len(r.trace.segments) == 1
    assert [s.kind for s in r.trace.segments[0].spans] == ["prompt", "sampled", "observed", "sampled"]


async def test_a_malformed_call_is_an_invalid_one_streamed_or_not():
    broken = [*chat().encode("words "), *chat().tokenizer.encode('<tool_call>\n{"name": ', add_special_tokens=False)]
    got: list[Any] = []

    def of(model, tools):
        async def node(state):
            got.append(await model.ainvoke(state["messages"]))
            pieces = [piece async for piece in model.astream([*state["messages"], HumanMessage("again")])]
            got.append(pieces[-1])
            return {"messages": [AIMessage("end")]}

        return node

    h = harness(says())
    engine = ScriptedEngine(lambda ids, sampling: [*broken, chat().stop[0]])
    await rolled(of_node(of), h.__class__(engine, h.chat, h.tools, h.system, h.sampling, h.budget))
    assert [[bool(c["error"]) for c in m.invalid_tool_calls] for m in got] == [[True], [True]]
    assert got[0].content == "words"


# --- tools -------------------------------------------------------------------------------


async def test_the_graphs_own_tools_run_beside_ours_and_cost_a_step_each():
    def graph_of(model, tools):
        return react(model, [*tools, fly])

    r = await rolled(graph_of, harness(says(Turn("", (call("fly", to="x"), call("echo", text="y"))), DONE)))
    shown = chat().decode(r.trace.segments[0].ids)
    assert shown.index("landed in x") < shown.index("<tool_response>\ny\n")
    assert [s.main for s in r.ledger.stages] == [2, 1]


async def test_a_call_that_nobody_knows_is_counted_and_answered_by_the_graph():
    r = await rolled(react, harness(says(Turn("", (call("swim"),)), DONE)))
    assert r.ledger.counts == {"calls": 1, "unknown_tool": 1}
    assert "swim is not a valid tool" in chat().decode(r.trace.segments[0].ids)


async def test_calling_again_gives_the_same_and_is_not_counted_again():
    async def node_of(model, tools, messages):
        said = await model.bind_tools(tools).ainvoke(messages)
        return [(await tools[0].ainvoke({**said.tool_calls[0], "type": "tool_call"})).content for _ in range(2)]

    got, r = await heard(node_of, Turn("", (call("echo", text="x", url="w/1"),)))
    assert got == [["[Doc #1](w/1) x"] * 2]
    assert r.ledger.counts == {"calls": 1}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"args": {"text": "y"}}, "arguments {'text': 'y'}, want the policy's own, {'text': 'x'}"),
        ({"id": "forged"}, "no call 'forged' by the policy, want a tool call of one of its messages"),
    ],
)
async def test_a_call_that_the_policy_did_not_make_is_refused(given, why):
    async def node_of(model, tools, messages):
        said = await model.bind_tools(tools).ainvoke(messages)
        await tools[0].ainvoke({**said.tool_calls[0], "type": "tool_call", **given})

    assert await error(node_of, Turn("", (call("echo", text="x"),))) == f"ValueError: echo: {why}"


async def test_a_tool_choice_is_what_the_policy_is_shown():
    async def node_of(model, tools, messages):
        for choice in ("any", "fly", "none"):
            await model.bind_tools([*tools, fly], tool_choice=choice).ainvoke(messages)

    _, r = await heard(node_of, DONE)
    shown = [chat().decode(s.ids).partition("<|im_end|>")[0].partition("\n")[2] for s in r.trace.segments]
    assert shown == ["Work.\ntools: echo fly", "Work.\ntools: fly", "Work."]


def test_a_tool_choice_of_no_tool_is_refused():
    with pytest.raises(ValueError, match=r"tool_choice = 'swim', want auto, any, required, none or one of \['fly'\]"):
        GraphModel().bind_tools([fly], tool_choice="swim")


# --- structured output -------------------------------------------------------------------


async def test_structured_output_is_a_checked_call():
    def node_of(model, tools, messages):
        return model.with_structured_output(Answer).ainvoke(messages)

    got, _ = await heard(node_of, Turn("", (call("Answer", airport="A", runways="2"),)))
    assert got == [Answer(airport="A", runways=2)]


async def test_of_a_schema_without_a_class_the_arguments_come_back():
    class Route(TypedDict):
        """A route."""

        start: str

    def node_of(model, tools, messages):
        return model.with_structured_output(Route).ainvoke(messages)

    assert (await heard(node_of, Turn("", (call("Route", start="A"),))))[0] == [{"start": "A"}]


BAD = {
    "no call": (DONE, "no call of Answer in the reply, want one"),
    "lacks a field": (Turn("", (call("Answer", runways=1),)), "Answer without airport, want airport"),
    "wrong type": (
        Turn("", (call("Answer", airport="A", runways="two"),)),
        "runways\n  Input should be a valid integer",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_output_that_does_not_fit_ends_the_rollout_like_an_answer_that_says_nothing(case):
    turn, why = BAD[case]

    def node_of(model, tools, messages):
        return model.with_structured_output(Answer).ainvoke(messages)

    def raw(model, tools, messages):
        return model.with_structured_output(Answer, include_raw=True).ainvoke(messages)

    _, r = await heard(node_of, turn)
    assert (r.trace.status, r.answer, r.ledger.counts["malformed_output"]) == ("answered", "", 1)
    assert not r.failed
    ((found),), _ = await heard(raw, turn)
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)
    assert why in str(found["parsing_error"])


def test_structured_output_by_another_method_is_refused():
    with pytest.raises(ValueError, match="method = 'json_mode', want function_calling"):
        GraphModel().with_structured_output(Answer, method="json_mode")


async def test_a_prebuilt_agent_with_a_response_format_asks_again_until_it_fits():
    def graph_of(model, tools):
        return create_agent(model, list(tools), response_format=ToolStrategy(Answer))

    turns = (Turn("", (call("echo", text="x"),)), Turn("", (call("Answer"),)), Turn("", (call("Answer", airport="A"),)))
    r = await rolled(graph_of, harness(says(*turns)))
    assert r.trace.status == "answered"
    assert len(r.trace.segments) == 1
    assert len(r.ledger.stages) == 3


# --- what is refused ---------------------------------------------------------------------

IMAGE = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}]
REFUSED = {
    "temperature": lambda model, tools, m: model.bind(temperature=0.0).ainvoke(m),
    "stop": lambda model, tools, m: model.ainvoke(m, stop=["x"]),
    "image": lambda model, tools, m: model.ainvoke([HumanMessage(IMAGE)]),  # type: ignore[arg-type]
    "late system": lambda model, tools, m: model.ainvoke([HumanMessage("a"), SystemMessage("b")]),
    "no user": lambda model, tools, m: model.ainvoke([SystemMessage("b")]),
    "result of no call": lambda model, tools, m: model.ainvoke(
        [*m, AIMessage("x"), ToolMessage("r", tool_call_id="c")]
    ),
}
WHY = {
    "temperature": "ValueError: model: temperature given by the graph, want sampling left to the runner",
    "stop": "ValueError: model: stop given by the graph, want sampling left to the runner",
    "image": "DialogueError: message 0: a part of type 'image_url', want text",
    "late system": "DialogueError: message 1: the system speaks, want the system at the beginning only",
    "no user": "DialogueError: 1 messages before the assistant speaks, none by a user: want one",
    "result of no call": "DialogueError: message 3: a result of call 'c', want one a call of message 2",
}


@pytest.mark.parametrize("case", list(REFUSED))
async def test_what_cannot_be_asked_is_an_error_of_one_line(case):
    assert (await error(REFUSED[case])).startswith(WHY[case])


async def test_fewer_tokens_may_be_asked_for():
    _, r = await heard(lambda model, tools, m: model.bind(max_tokens=2).ainvoke(m), Turn("so many words"))
    assert r.ledger.tokens_sampled == 2


async def test_outside_of_a_rollout_there_is_no_policy():
    with pytest.raises(RuntimeError, match="no rollout here, want a call by a graph while a GraphRunner runs it"):
        GraphModel().invoke("hi")


async def test_after_its_rollout_a_call_is_refused():
    left: list[Any] = []

    def of(model, tools):
        async def node(state):
            left.append(copy_context())
            return {"messages": [AIMessage("end")]}

        return node

    await rolled(of_node(of), harness(says(DONE)))
    with pytest.raises(RuntimeError, match="this rollout is over, want calls only while its graph runs"):
        left[0].run(GraphModel().invoke, "hi")


async def test_a_refused_spawn_is_text_for_the_policy():
    r = await rolled(react, swarm(says(Turn("", (CREATE, CREATE, assign(" "))), DONE)))
    assert r.ledger.counts == {"calls": 3, "duplicate_agent": 1, "empty_assignment": 1}
    assert "error: agent 'a' exists" in chat().decode(r.trace.segments[0].ids)
