"""What the tests of graphs share: runners over scripted agents, and small graphs. Not a test itself."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage
from langgraph.graph import END, START, StateGraph
from msgspec import structs

from swarm.engine.scripted import ScriptedEngine
from swarm.graph_bridge import Loop
from swarm.graph_model import GraphModel
from swarm.graphs import GraphOf, GraphRunner
from swarm.loop import Harness
from swarm.transcript import Transcript
from swarm.types import Completion, Engine, Rollout, Sampling, Turn
from tests.swarm_cases import TASK, call

LOOP = Loop()
"""One thread for all tests."""


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


Node = Callable[[Talk], Awaitable[dict[str, Any]] | dict[str, Any]]


def of_nodes(nodes_of: Callable[[GraphModel, Any], dict[str, Node]]) -> GraphOf:
    """A graph whose nodes all run at once."""

    def graph_of(model: GraphModel, tools: Any) -> Any:
        graph = StateGraph(Talk)
        for name, node in nodes_of(model, tools).items():
            graph.add_node(name, node)  # type: ignore[call-overload]
            graph.add_edge(START, name)
            graph.add_edge(name, END)
        return graph.compile()

    return graph_of


def of_node(node_of: Callable[[GraphModel, Any], Node]) -> GraphOf:
    return of_nodes(lambda model, tools: {"node": node_of(model, tools)})


def runner(graph_of: GraphOf, harness: Harness, **options: Any) -> GraphRunner:
    return GraphRunner(graph_of, harness, loop=LOOP, **options)


async def rolled(graph_of: GraphOf, harness: Harness, seed: int = 1, **options: Any) -> Rollout:
    return await runner(graph_of, harness, **options).roll(TASK, seed, harness.budget)


def timeless(r: Rollout) -> Rollout:
    """The rollout without seconds, and without what only the native loop keeps for a replay."""
    ledger = structs.replace(r.ledger, seconds=0.0, seconds_queued=0.0)
    trace = replace(r.trace, acts=(), setup=None)
    return replace(r, ledger=ledger, trace=trace, children=tuple(timeless(c) for c in r.children))


class Kept(ScriptedEngine):
    """Keeps each prompt with what it said after it."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(lambda ids, sampling: ())
        self.inner, self.kept = inner, list[tuple[tuple[int, ...], tuple[int, ...]]]()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self.inner.generate(ids, sampling)
        self.kept.append((tuple(ids), completion.ids))
        return completion


def leads(t: Transcript) -> Turn:
    """Two parts at once, then what the workers wrote; a worker finds a row in as many steps as its part says."""
    if "hand_over" in t.system:
        return Turn("all\n#rows") if t.exchanges else Turn("", tuple(call("hand_over", prompt=p) for p in ("1", "3")))
    if len(t.exchanges) < int(t.user.splitlines()[0]):
        return Turn("", (call("echo", text=t.user[0], url=f"w/{t.user[0]}"),))
    return Turn(f"| {t.user[0]} | {t.exchanges[0].results[0][5:7]}.a |")
