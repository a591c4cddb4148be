"""Runs any compiled LangGraph graph as a harness: its chat model is the policy, its tools are those of our world.

    GraphRunner.roll ─▶ graph.ainvoke ─▶ nodes ─▶ GraphModel, GraphTool ─▶ engine and tools
      trio               asyncio, in one thread for all rollouts             trio

Not here: graphs (`recipes.graphs`), and what a graph's model and tools are (`swarm.graph_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from uuid import uuid4

import trio

from swarm.chat import Chat
from swarm.graph_bridge import Desk, Loop
from swarm.graph_model import BadOutput, BudgetSpent, GraphModel, GraphTool, Serving, answer_of, opening, tool_of
from swarm.graph_rollout import Underway
from swarm.loop import Harness
from swarm.types import Budget, Rollout, Status, Task

__all__ = ["Graph", "GraphOf", "GraphRunner"]


class Graph(Protocol):
    """A compiled graph with `messages` in its state."""

    async def ainvoke(self, input: Any, config: Any) -> Any: ...


GraphOf = Callable[[GraphModel, Sequence[GraphTool]], Graph]
"""Makes a compiled graph of a model and tools: `lambda model, tools: create_agent(model, tools)`."""

_Ended = tuple[str, Status, str]
"""Answer, status and error."""


@dataclass(frozen=True, slots=True)
class GraphRunner:
    """A `Runner`: `GraphRunner(create_agent, harness)`.

    The graph takes the place of the loop of `harness`; engine, chat, tools, system prompt, sampling and budget are
    the harness's. It begins with the system prompt and the task's query in `messages`; the last message of an
    assistant there is the answer. With `note` the policy is shown what is left of the budget. Raises ValueError for a
    harness that rewrites its context, which is the graph's own business, or whose chat is of no known family.
    """

    graph_of: GraphOf
    harness: Harness
    note: bool = True
    loop: Loop = field(default_factory=Loop, repr=False, compare=False)
    graph: Graph = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        harness = self.harness
        if harness.context.kind != "none":
            raise ValueError(f"graph: context = {harness.context.kind}, want none: the graph keeps the messages")
        if not isinstance(harness.chat, Chat):
            raise ValueError(f"graph: chat = {type(harness.chat).__name__}, want a Chat")
        object.__setattr__(self, "graph", self.graph_of(GraphModel(), [tool_of(spec) for spec in harness.specs]))

    @property
    def budget(self) -> Budget:
        return self.harness.budget

    def fits(self, task: Task) -> str:
        """See `Runner`: any task will do."""
        return ""

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        """See `Runner`. A graph that fails is an error; one that LangGraph's recursion limit stops is truncated."""
        rollout = Underway(self.harness, cast(Chat, self.harness.chat), task, seed, budget, note=self.note)
        ended: _Ended = ("", "truncated", "deadline")
        with trio.move_on_after(budget.seconds):
            async with trio.open_nursery() as nursery:
                desk = Desk(nursery)
                try:
                    ended = await self._run(Serving(rollout, desk))
                finally:
                    desk.close()
                nursery.cancel_scope.cancel()
        return rollout.rollout(*ended)

    async def _run(self, serving: Serving) -> _Ended:
        """The boundary: whatever a graph raises is data."""
        begins = opening(self.harness.system, serving.rollout.task.query)
        config = {"configurable": {"thread_id": uuid4().hex}}  # for a graph that keeps checkpoints
        try:
            with serving.at_hand():
                state: Mapping[str, Any] = await self.loop.run(lambda: self.graph.ainvoke(begins, config))
            return answer_of(state), "answered", ""
        except Exception as error:
            return "", *self._status(error, serving.rollout)

    def _status(self, error: Exception, rollout: Underway) -> tuple[Status, str]:
        match error:
            case BudgetSpent():
                return ("exhausted", "") if error.over == "budget" and self.note else ("truncated", error.over)
            case BadOutput():  # the policy's failure, not the graph's: an answer that says nothing
                rollout.count("malformed_output")
                return "answered", ""
            case RecursionError() if type(error) is not RecursionError:  # LangGraph's limit is a kind of its own
                return "truncated", "recursion limit"
            case _:
                return "error", f"{type(error).__name__}: {error}"
