"""The load of `benchmarks.scale` as a LangGraph user writes it: a model node, a tool node, one compiled graph for all.

Each agent is one `ainvoke` under asyncio, without a checkpointer and with plain messages instead of LangChain's,
both of which would cost more.

    python -m benchmarks.scale_langgraph langgraph AGENTS STEPS      one line of JSON

Not here: the load itself (`benchmarks.scale_cells`).
"""

from __future__ import annotations

import asyncio
import json
import operator
import sys
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph

from benchmarks.scale_cells import Clocks, Measured, Ticks, kept, look, measure, messages


class Conversation(TypedDict):
    """What an agent said and heard, in turn."""

    history: Annotated[list[str], operator.add]


class Nodes:
    """The two nodes; counts the calls of the tool."""

    def __init__(self, ticks: Ticks, steps: int) -> None:
        self._ticks, self._said = ticks, messages(steps)
        self.calls = 0

    async def model(self, state: Conversation) -> dict[str, list[str]]:
        said = self._said[len(state["history"]) // 2]
        await self._ticks.next(said is self._said[-1])
        return {"history": [said]}

    async def tool(self, state: Conversation) -> dict[str, list[str]]:
        self.calls += 1
        return {"history": [look(json.loads(state["history"][-1])["arguments"])]}


def follows(state: Conversation) -> str:
    """An answer ends the agent; anything else is a call."""
    return END if "answer" in json.loads(state["history"][-1]) else "tool"


def langgraph(agents: int, steps: int) -> Measured:
    ticks = Ticks(agents, asyncio.Event, asyncio.sleep)
    nodes = Nodes(ticks, steps)
    graph: Any = StateGraph(Conversation)
    graph.add_node("model", nodes.model)
    graph.add_node("tool", nodes.tool)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", follows)
    graph.add_edge("tool", "model")
    compiled = graph.compile()
    ended: list[Conversation] = []

    async def agent() -> None:
        ended.append(await compiled.ainvoke({"history": []}, {"recursion_limit": 2 * steps + 2}))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(agents):
                group.create_task(agent())
            await ticks.drive()

    clocks = Clocks()
    asyncio.run(main())
    return clocks.measured("langgraph", agents, steps, ticks, nodes.calls, agents * kept(ended[-1]["history"]))


if __name__ == "__main__":
    measure({"langgraph": langgraph}, sys.argv[1:])
