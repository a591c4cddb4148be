"""Graphs that run the systems of a run: LangGraph's prebuilt agent, and a supervisor with workers in parallel.

    react        model ⇄ tools                                        the native loop, as a graph
    supervisor   lead ─┬─ a call of `hand_over` each ─▶ worker ─┬─▶ lead      a worker is a react graph of its own,
                       └─ …                         ─▶ worker ─┘             all of them the policy that is trained

    GraphRunner(react, builder.swarm(engine, frozen))
    GraphRunner(supervisor, builder.single(engine))

Neither knows anything of this project but its model and its tools. The one file that imports langgraph. Not here: how
a graph is run and recorded (`swarm.graphs`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

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

    The workers alone have `tools`, and what comes back is the last thing that each says.
    """
    lead_model, worker_graph = model.bind_tools([hand_over]), react(model, tools)

    async def lead(state: Led) -> dict[str, Any]:
        return {"messages": [await lead_model.ainvoke(state["messages"])]}

    async def worker(call: ToolCall) -> dict[str, Any]:
        asked = [SystemMessage(WORKER), HumanMessage(str(call["args"].get("prompt", "")))]
        ended = await worker_graph.ainvoke({"messages": asked}, None)
        return {"messages": [ToolMessage(ended["messages"][-1].text, tool_call_id=call["id"])]}

    def handed(state: Led) -> list[Send] | str:
        last = state["messages"][-1]
        return [Send("worker", c) for c in last.tool_calls] if isinstance(last, AIMessage) and last.tool_calls else END

    graph = StateGraph(Led)
    graph.add_node("lead", lead)
    graph.add_node("worker", worker)
    graph.add_edge(START, "lead")
    graph.add_conditional_edges("lead", handed, ["worker", END])
    graph.add_edge("worker", "lead")
    return graph.compile()
