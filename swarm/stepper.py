"""The one agent loop as a LangGraph graph: checkpointed after every turn, so that it can be looked at and forked.

    START ─▶ turn ─▶ running? ─▶ turn …           turn: `swarm.loop.step` of the thread's harness
                        └──────▶ END              state["state"]: the agent, as `swarm.loop.State`

History, edits and resumption are LangGraph's own: `get_state_history`, `update_state`, `invoke(None, past.config)`,
`interrupt_after`. Checkpoints lie in a SQLite file and outlive the process. Subagents run within a turn, each with its
states in a thread of its own: that of thread `a`, agent `main/3:reader`, is `a/3:reader`.

Not here: forks of the whole tree (`swarm.fork`), engines.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec
import trio
from msgspec import structs

from swarm.drive import Drive, driven
from swarm.graph_kit import END, START, CompiledStateGraph, JsonPlusSerializer, SqliteSaver, StateGraph, get_config
from swarm.loop import Harness, State, close, step
from swarm.portal import Portal
from swarm.types import Budget, Rollout

_MARK = "swarm.loop.State"
_LONGEST = 100_000
"""Turns: the budget ends an agent, not LangGraph's own limit."""


class Position(TypedDict):
    """What a checkpoint holds."""

    state: State


Graph = CompiledStateGraph[Position, Any, Position, Position]
Config = dict[str, Any]
"""LangGraph's: which thread, and which of its checkpoints."""


class StateSerializer:
    """LangGraph's serializer, to which states are bytes: what comes back equals what was kept.

    But for `Task.meta` and arguments of calls, whose tuples come back as lists. Nothing else than plain data and
    LangGraph's own types is ever made from a file.
    """

    def __init__(self) -> None:
        self._plain = JsonPlusSerializer(allowed_msgpack_modules=None)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(State).decode

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return self._plain.dumps_typed(self._packed(obj))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return self._unpacked(self._plain.loads_typed(data))

    def _packed(self, value: Any) -> Any:
        if isinstance(value, State):
            return {_MARK: self._encode(value)}
        return _mapped(self._packed, value)

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, dict) and list(cast(dict[Any, Any], value)) == [_MARK]:
            return self._decode(value[_MARK])
        return _mapped(self._unpacked, value)


def open_saver(path: Path) -> SqliteSaver:
    """The checkpoints of a file, which is made if there is none. Raises sqlite3.Error where it is no database."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The saver locks by itself; a notebook and trio's thread both write.
    return SqliteSaver(sqlite3.connect(path, check_same_thread=False), serde=StateSerializer())


def stepper(harness: Harness, portal: Portal, saver: SqliteSaver) -> Graph:
    """The graph of a root agent: `graph.invoke({"state": begin(harness, task, seed)}, thread("a"))`.

    Turns run in the portal's trio, so call it from another thread. The deadline counts only while turns run.
    """

    def turn(state: Position) -> Position:
        root: str = get_config().get("configurable", {})["thread_id"]
        looked_at = driven(harness, _recording(graph, root))
        return {"state": portal.call(timed, looked_at, state["state"])}

    builder = StateGraph(Position)
    builder.add_node("turn", turn)
    builder.add_edge(START, "turn")
    builder.add_conditional_edges("turn", _follows)
    graph = cast(Graph, builder.compile(checkpointer=saver).with_config({"recursion_limit": _LONGEST}))
    return graph


def thread(name: str, agent: str = "main") -> Config:
    """LangGraph's config for a thread, or for that of one of its agents."""
    return {"configurable": {"thread_id": name + agent.removeprefix("main")}}


def put(graph: Graph, config: Config, states: list[State]) -> Config:
    """Files states as a thread's history, one checkpoint a turn, and returns where the last one is."""
    for k, state in enumerate(states):
        config = _filed(graph, config, state, "turn" if k else START)
    return config


def rollout_of(values: Position) -> Rollout:
    """The rollout of a thread that has ended: `rollout_of(graph.get_state(config).values)`."""
    state = values["state"]
    seconds = sum(a.seconds + a.calling for a in state.acts)
    return close(structs.replace(state, ledger=structs.replace(state.ledger, seconds=seconds)))


async def timed(harness: Harness, state: State) -> State:
    """One turn, or the end of an agent whose turns have taken as long as its budget gives it."""
    left = _seconds_left(state.budget, state)
    with trio.move_on_after(left):
        return await step(harness, state)
    return structs.replace(state, status="truncated", error="deadline")


def _seconds_left(budget: Budget, state: State) -> float:
    return max(0.0, budget.seconds - sum(a.seconds + a.calling for a in state.acts))


def _recording(graph: Graph, root: str) -> Drive:
    """Drives a subagent, and files its states in its own thread."""

    async def drive(harness: Harness, state: State) -> Rollout:
        config = put(graph, thread(root, state.agent), [state])
        harness = driven(harness, drive)
        while state.status == "running":
            state = await timed(harness, state)
            config = _filed(graph, config, state, "turn")
        return rollout_of({"state": state})

    return drive


def _filed(graph: Graph, config: Config, state: State, node: str) -> Config:
    return cast(Config, graph.update_state(cast(Any, config), {"state": state}, as_node=node))


def _follows(values: Position) -> str:
    return "turn" if values["state"].status == "running" else END


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    match value:
        case dict():
            return {k: function(v) for k, v in cast(dict[Any, Any], value).items()}
        case list():
            return [function(v) for v in cast(list[Any], value)]
        case tuple() if type(cast(object, value)) is tuple:
            return tuple(function(v) for v in cast(tuple[Any, ...], value))
        case _:
            return value
