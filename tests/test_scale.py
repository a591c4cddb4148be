"""The load of the scale benchmark gives the counts it should, and the loop's work for a step does not grow."""

import argparse
import gc
from collections.abc import Callable

import pytest
import trio

from benchmarks import scale
from benchmarks.scale_cells import CELLS as RAW
from benchmarks.scale_cells import SIZE, Measured, messages
from benchmarks.scale_swarm import CELLS as OURS
from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from swarm.gather import Job, gather
from swarm.loop import Harness, Subagent, begin, step
from swarm.types import Rollout, Turn
from tests.swarm_cases import TASK, call, harness, says

ONCE = Turn("", (call("echo", text="x"),))


class Spawned(trio.abc.Instrument):
    """Counts the tasks that come into being."""

    def __init__(self) -> None:
        self.tasks = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks += 1


async def spawned(h: Harness, agents: int) -> tuple[int, list[Rollout]]:
    seen = Spawned()
    trio.lowlevel.add_instrument(seen)
    rollouts = await gather([Job(h, TASK, k, h.budget) for k in range(agents)])
    trio.lowlevel.remove_instrument(seen)
    return seen.tasks, rollouts


def measurement(system: str, cpu: float, answers: int = 10) -> Measured:
    return Measured(system, 1, 10, answers, 9, cpu, 1.0, 4096, 1024)


def test_every_message_of_the_load_has_its_size():
    said = messages(10)
    assert [len(text) for text in said] == [SIZE] * 10
    assert ["answer" in text for text in said] == [False] * 9 + [True]


@pytest.mark.parametrize("cell", [*RAW.values(), OURS["swarm"]], ids=[*RAW, "swarm"])
def test_two_hundred_agents_of_three_steps_are_answered_and_call_as_often_as_they_should(
    cell: Callable[[int, int], Measured],
):
    m = cell(200, 3)
    assert (m.agents, m.steps, m.answers, m.calls) == (200, 3, 200 * 3, 200 * 2)
    assert m.cpu > 0
    assert m.transcript_bytes > 0


def test_the_same_agents_as_subagents_add_two_answers_for_each_orchestrator():
    m = OURS["swarm_subagents"](200, 3)
    assert (m.answers, m.calls) == (200 * 3 + 2 * 2, 200 * 2)


@pytest.mark.slow
def test_the_real_chat_format_does_the_same_work():
    m = OURS["swarm_hermes"](100, 3)
    assert (m.answers, m.calls) == (100 * 3, 100 * 2)


async def test_an_agent_is_one_task_however_many_steps_of_one_call_it_takes():
    few, _ = await spawned(harness(says(ONCE), steps=3), 20)
    many, rollouts = await spawned(harness(says(ONCE), steps=9), 20)
    assert few == many == 20
    assert [len(r.ledger.stages) for r in rollouts] == [9] * 20


async def test_calls_made_at_once_are_a_task_each():
    three = Turn("", (call("echo", text="x"),) * 3)
    tasks, rollouts = await spawned(harness(says(three, three, ONCE, Turn("done")), steps=20), 5)
    assert tasks == 5 * (1 + 3 + 3)
    assert {r.ledger.critical_steps for r in rollouts} == {3 + 3 + 1 + 1}


async def test_only_as_many_tasks_as_may_run_at_once_are_started():
    seen = Spawned()
    h = harness(says(Turn("done")))
    trio.lowlevel.add_instrument(seen)
    rollouts = await gather([Job(h, TASK, k, h.budget) for k in range(30)], at_once=4)
    trio.lowlevel.remove_instrument(seen)
    assert seen.tasks == 4
    assert len(rollouts) == 30
    with pytest.raises(ValueError, match="at_once = 0, want at least 1"):
        await gather([], at_once=0)


async def test_while_agents_run_the_collector_leaves_older_objects_alone_and_looks_less_often():
    h, seen, before = harness(says(Turn("done"))), [], gc.get_threshold()
    gc.unfreeze()
    await gather(
        [Job(h, TASK, 0, h.budget)], done=lambda _: seen.append((gc.get_freeze_count() > 0, gc.get_threshold()))
    )
    assert seen == [(True, (50_000, *before[1:]))]
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


async def test_what_was_frozen_before_agents_ran_stays_frozen():
    h, before = harness(says(Turn("done"))), gc.get_threshold()
    gc.freeze()
    try:
        await gather([Job(h, TASK, 0, h.budget)])
        assert (gc.get_freeze_count() > 0, gc.get_threshold()) == (True, before)
    finally:
        gc.unfreeze()


async def test_what_is_spent_is_the_sum_of_the_stages_after_every_turn():
    limits = SpawnLimits()
    child = harness(says(ONCE, Turn("done")))
    spawn = Turn("", (call("create_subagent", name="a", system_prompt="b"), call("assign_task", agent="a", prompt="c")))
    lead = says(Turn("", (call("echo", text="x"),) * 2), spawn, Turn("done"))
    h = harness(lead, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits))
    state, spent = begin(h, TASK, seed=1), []
    while state.status == "running":
        state = await step(h, state)
        assert state.spent == state.ledger.critical_steps
        spent.append(state.spent)
    assert spent == [2, 2 + 1 + 2, 2 + 1 + 2 + 1]


def test_a_ratio_is_the_median_of_those_of_the_turns():
    mine = scale.Cell("swarm", 1, tuple(measurement("swarm", cpu) for cpu in (2.0, 9.0, 4.0)))
    base = scale.Cell("trio_deadline", 1, tuple(measurement("trio_deadline", cpu) for cpu in (1.0, 3.0, 1.0)))
    assert scale.ratio(mine, base) == 3.0
    assert scale.ratio(mine, None) is None
    assert mine.step_us == (200_000.0, 900_000.0, 400_000.0)
    assert (mine.idle_kb, mine.transcript_kb) == (3.0, 1.0)


def test_a_process_over_its_time_is_stopped_and_says_so():
    assert scale.measured("trio", 10, 3, limit=0.001) == "more than 0.001 s"


def test_unknown_systems_and_numbers_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="fibres: want of asyncio, trio"):
        scale.names("trio,fibres")
    with pytest.raises(argparse.ArgumentTypeError, match="1000,0: want numbers from 1"):
        scale.counts("1000,0")
    assert scale.counts("1000,10") == [10, 1000]
