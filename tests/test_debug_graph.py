"""The loop as a LangGraph graph: its history outlives the process, and is forked with LangGraph's own calls."""

from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from swarm.loop import Harness, State, begin
from swarm.portal import Portal
from swarm.replay import timeless
from swarm.stepper import StateSerializer, open_saver, put, rollout_of, stepper, thread
from swarm.types import Budget, Turn
from tests.debug_cases import rolled, swarm
from tests.swarm_cases import TASK, call, harness, says

A = thread("a")


@pytest.fixture
def portal() -> Iterator[Portal]:
    with Portal() as opened:
        yield opened


def first(h: Harness, seed: int = 1) -> dict[str, State]:
    return {"state": begin(h, TASK, seed)}


def graph_of(h: Harness, portal: Portal, folder: Path):
    return stepper(h, portal, open_saver(folder / "debug.sqlite"))


def test_a_graph_makes_the_rollout_that_the_loop_makes(portal, tmp_path):
    h = swarm()
    graph = graph_of(h, portal, tmp_path)
    made = rollout_of(graph.invoke(first(h), A))
    assert timeless(made) == timeless(portal.call(rolled, h))


def test_every_turn_is_a_checkpoint_newest_first(portal, tmp_path):
    h = swarm()
    graph = graph_of(h, portal, tmp_path)
    graph.invoke(first(h), A)
    turns = [len(s.values["state"].acts) for s in graph.get_state_history(A) if s.values]
    assert turns == [4, 3, 2, 1, 0]


def test_a_history_outlives_the_process_and_goes_on_from_where_it_was(tmp_path):
    h = swarm()
    with Portal() as before:
        graph_of(h, before, tmp_path).invoke(first(h), A, interrupt_after=["turn"])
    with Portal() as after:
        graph = graph_of(h, after, tmp_path)
        assert graph.get_state(A).next == ("turn",)
        assert timeless(rollout_of(graph.invoke(None, A))) == timeless(after.call(rolled, h))


def test_an_edit_of_a_past_state_is_a_fork_and_the_first_history_stays(portal, tmp_path):
    h = harness(says(Turn("", (call("echo", text="x"),))), steps=3)
    graph = graph_of(h, portal, tmp_path)
    short = rollout_of(graph.invoke(first(h), A))
    past = next(s for s in graph.get_state_history(A) if s.values and len(s.values["state"].acts) == 1)
    more = structs.replace(past.values["state"], budget=Budget(5, 4096))
    forked = graph.update_state(past.config, {"state": more})
    long = rollout_of(graph.invoke(None, forked))
    assert (short.ledger.critical_steps, long.ledger.critical_steps) == (3, 5)
    assert past in list(graph.get_state_history(A))


def test_the_states_of_subagents_are_in_threads_of_their_lineage(portal, tmp_path):
    h = swarm()
    graph = graph_of(h, portal, tmp_path)
    made = rollout_of(graph.invoke(first(h), A))
    for child in made.children:
        last, *_ = graph.get_state_history(thread("a", child.trace.agent))
        assert rollout_of(last.values) == child
        assert last.next == ()


def test_the_deadline_counts_the_turns_only(portal, tmp_path):
    slow = harness(says(Turn("| A | 1 |", (call("echo", text="x", seconds=0.02),))), steps=9)
    graph = graph_of(slow, portal, tmp_path)
    state = begin(slow, TASK, 1, budget=Budget(9, 4096, seconds=0.03))
    r = rollout_of(graph.invoke({"state": state}, A))
    assert (r.trace.status, r.trace.error) == ("truncated", "deadline")
    assert r.table == (("A", "1"),)


def test_recorded_states_are_filed_as_a_history(portal, tmp_path):
    h = swarm()
    graph = graph_of(h, portal, tmp_path)
    graph.invoke(first(h), A)
    states = [s.values["state"] for s in graph.get_state_history(A) if s.values][::-1]
    end = put(graph, thread("b"), states)
    assert [s.values["state"] for s in graph.get_state_history(thread("b")) if s.values][::-1] == states
    assert graph.get_state(end).next == ()


def test_a_state_goes_through_the_serializer_unchanged(portal, tmp_path):
    graph = graph_of(h := swarm(), portal, tmp_path)
    graph.invoke(first(h), A)
    serializer = StateSerializer()
    for snapshot in graph.get_state_history(A):
        nested = {"channel_values": [snapshot.values, ("x", 1)]}
        assert serializer.loads_typed(serializer.dumps_typed(nested))["channel_values"][0] == snapshot.values


def test_what_is_called_through_a_portal_is_awaited_and_its_errors_are_raised(portal):
    async def twice(x: int) -> int:
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    assert portal.call(twice, 4) == 8
    with pytest.raises(ValueError, match="negative"):
        portal.call(twice, -1)


def test_a_portal_leaves_what_was_entered_last_first():
    seen: list[str] = []

    @asynccontextmanager
    async def held(name: str):
        seen.append(f"in {name}")
        yield name
        seen.append(f"out {name}")

    with Portal() as portal:
        assert [portal.enter(lambda n=n: held(n)) for n in "ab"] == ["a", "b"]
    assert seen == ["in a", "in b", "out b", "out a"]


def test_what_cannot_be_entered_raises_to_who_enters_it(portal):
    @asynccontextmanager
    async def broken():
        raise OSError("no engine")
        yield

    with pytest.raises(OSError, match="no engine"):
        portal.enter(broken)
