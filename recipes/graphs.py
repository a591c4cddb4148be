"""Graphs that run the systems of a run: LangGraph's prebuilt agent, and a supervisor with workers in parallel.

    react        model ⇄ tools                                        the native loop, as a graph
    supervisor   lead ─┬─ each call of `hand_over` ─▶ worker ─┬─▶ lead        a worker is a react graph of its own,
                       └─ each other call ─────────▶ tools ──┘               all of them the policy that is trained

    GraphRunner(react, builder.swarm(engine, frozen))
    GraphRunner(supervisor, builder.single(engine))

Neither knows anything of this project but its model and its tools. Not here: how a graph is run and recorded
(`swarm.graphs`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain.tools import tool

from swarm.graph_kit import END, START, Send, StateGraph, ToolNode
from swarm.graph_model import GraphModel, GraphTool
from swarm.graphs import Graph

WORKER = "Fill rows."
"""What a worker of the supervisor's is told to begin with."""


def react(model: GraphModel, tools: Sequence[GraphTool]) -> Graph:
    """LangChain's prebuilt agent: it calls tools until it answers."""
    return create_agent(model, list(tools))


@tool(extras={"ordinary": False})
def hand_over(prompt: str) -> str:
    """Have a worker do a part of the task. Hand over several parts at once: they are done in parallel."""
    raise NotImplementedError("run by a worker node")


class Led(TypedDict):
    """The supervisor's conversation."""

    messages: Annotated[list[AnyMessage], operator.add]


def supervisor(model: GraphModel, tools: Sequence[GraphTool]) -> Graph:
    """A lead that hands parts of the task to workers, as many at once as it likes, until it answers.

    Both have `tools`; of what a worker says the last comes back.
    """
    lead_model, worker_graph = model.bind_tools([*tools, hand_over]), react(model, tools)

    async def lead(state: Led) -> dict[str, Any]:
        return {"messages": [await lead_model.ainvoke(state["messages"])]}

    async def worker(state: ToolCall) -> dict[str, Any]:
        asked = [SystemMessage(WORKER), HumanMessage(str(state["args"].get("prompt", "")))]
        ended = await worker_graph.ainvoke({"messages": asked}, None)
        return {"messages": [ToolMessage(ended["messages"][-1].text, tool_call_id=state["id"])]}

    def follows(state: Led) -> list[Send] | str:
        said = state["messages"][-1]
        calls = said.tool_calls if isinstance(said, AIMessage) else []
        return [Send("worker", c) if c["name"] == hand_over.name else Send("tools", [c]) for c in calls] or END

    graph = StateGraph(Led)
    graph.add_node("lead", lead)
    graph.add_node("worker", worker)
    graph.add_node("tools", ToolNode(list(tools)))
    graph.add_edge(START, "lead")
    graph.add_conditional_edges("lead", follows, ["worker", "tools", END])
    graph.add_edge("worker", "lead")
    graph.add_edge("tools", "lead")
    return graph.compile()
