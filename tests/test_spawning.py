"""Subagents: one loop in another, refusals, cost, sharding of context."""

import pytest

from orchestrator.tools import REFUSALS, AssignTask, CreateSubagent, SpawnLimits
from rewards.parl import REFUSED_SPAWNS
from swarm.loop import Harness, Subagent, begin, run
from swarm.transcript import Transcript
from swarm.types import Rollout, Turn
from tests.swarm_cases import TASK, call, chat, harness, says

CREATE = call("create_subagent", name="a", system_prompt="Read.")
READ = says(Turn("", (call("echo", text="secret"),)), Turn("| A | 1 |\nfound it"))


def assign(prompt: str, agent: str = "a"):
    return call("assign_task", agent=agent, prompt=prompt)


def swarm(policy, child: Harness | None = None, steps: int = 20, limits: SpawnLimits | None = None) -> Harness:
    limits = limits or SpawnLimits()
    child = child or harness(READ, steps=20)
    return harness(policy, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits), steps=steps)


async def rollout(h: Harness) -> Rollout:
    return await run(h, begin(h, TASK, seed=1))


def text(r: Rollout) -> str:
    return chat().decode(r.trace.segments[0].ids)


async def test_an_agent_can_be_created_and_given_work_in_one_turn():
    r = await rollout(swarm(says(Turn("", (CREATE, assign("p"), assign("q"))), Turn("#1 #2"))))
    assert [c.trace.agent for c in r.children] == ["main/1:a", "main/2:a"]
    assert r.table == (("A", "1"),)
    assert r.ledger.counts == {"calls": 3}


async def test_a_stage_costs_its_slowest_child_and_the_total_all_of_them():
    def child(t: Transcript) -> Turn:
        work = 4 if "long" in t.user else 1
        return Turn("", (call("echo", text="x"),)) if len(t.exchanges) < work else Turn("done")

    r = await rollout(swarm(says(Turn("", (CREATE, assign("long"), assign("short"))), Turn("ok")), harness(child)))
    assert [c.ledger.critical_steps for c in r.children] == [5, 2]
    assert r.ledger.critical_steps == (1 + 5) + 1
    assert r.total_steps == 1 + 5 + 2 + 1


async def test_only_one_bounded_message_and_a_handle_return():
    limits = SpawnLimits(reply_chars=5)
    r = await rollout(swarm(says(Turn("", (CREATE, assign("p"))), Turn("#1")), limits=limits))
    assert "#1: 1 rows\nfound\n</tool_response>" in text(r)
    assert "secret" not in text(r)
    assert "secret" in text(r.children[0])


async def test_a_handle_in_a_prompt_is_written_out_for_the_child_which_sees_no_more():
    r = await rollout(swarm(says(Turn("", (CREATE, assign("do #0"))), Turn("x"))))
    child = text(r.children[0])
    assert "do #0\n#0: List the airports.\n" in child
    assert child.startswith("<|im_start|>system\nRead.\n")


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ((assign("p"),), "unknown_agent"),
        ((CREATE, assign("p"), assign("p")), "duplicate_assignment"),
        ((CREATE, assign("  ")), "empty_assignment"),
        ((CREATE, CREATE), "duplicate_agent"),
        ((CREATE, *(assign(str(k)) for k in range(4))), "over_limit"),
        ((CREATE, call("assign_task", agent="a")), "bad_arguments"),
    ],
)
async def test_a_senseless_spawn_is_refused_with_a_short_reason_and_counted(calls, kind):
    r = await rollout(swarm(says(Turn("", calls), Turn("x")), limits=SpawnLimits(assignments=3)))
    assert r.ledger.counts[kind] == 1
    assert text(r).count("error: ") == 1


def test_the_reward_counts_every_kind_of_refused_assignment():
    assert set(REFUSED_SPAWNS) == set(REFUSALS)


async def test_a_child_never_outspends_its_parent():
    def endless(t: Transcript) -> Turn:
        return Turn("| A | 1 |") if t.last else Turn("", (call("echo", text="x"),))

    r = await rollout(swarm(says(Turn("", (CREATE, assign("p"))), Turn("#1")), harness(endless, steps=99), steps=7))
    assert r.ledger.critical_steps == 7
    assert r.children[0].ledger.critical_steps == 5
    assert r.table == (("A", "1"),)


async def test_a_spawn_without_steps_for_it_is_refused():
    r = await rollout(swarm(says(Turn("", (CREATE, assign("p"))), Turn("x")), steps=3))
    assert r.ledger.counts["no_budget"] == 1


async def test_spawning_nests_to_the_depth_limit_and_no_further():
    limits = SpawnLimits(depth=2)
    policy = says(Turn("", (CREATE, assign("deeper"))), Turn("end"))
    tools: list = [CreateSubagent(limits)]
    h = harness(policy, *tools, AssignTask(lambda *_: Subagent(h), limits), steps=30)
    r = await rollout(h)
    grandchild = r.children[0].children[0]
    assert grandchild.trace.agent == "main/1:a/1:a"
    assert grandchild.ledger.counts["depth_limit"] == 1
    assert not grandchild.children
    # leaf: turn + answer = 2; its parent: 1 + 2 + 1 = 4; the root: 1 + 4 + 1
    assert r.ledger.critical_steps == 6


async def test_a_hanging_child_is_cut_at_its_deadline_and_its_siblings_return(autojump_clock):
    def child(t: Transcript) -> Turn:
        if "hang" in t.user and not t.exchanges:
            return Turn("| B | 2 |", (call("echo", text="x"),))
        return Turn("", (call("echo", text="x", seconds=1e9),)) if "hang" in t.user else Turn("| A | 1 |")

    h = swarm(says(Turn("", (CREATE, assign("hang"), assign("ok"))), Turn("#1 #2")), harness(child))
    r = await run(h, begin(h, TASK, seed=1, budget=h.budget.__class__(20, 4096, 1e4)))
    assert [c.trace.status for c in r.children] == ["truncated", "answered"]
    assert r.ledger.counts["subagent_truncated"] == 1
    assert r.table == (("B", "2"), ("A", "1"))


async def test_a_childs_infrastructure_error_marks_the_whole_rollout():
    r = await rollout(swarm(says(Turn("", (CREATE, assign("p"))), Turn("x")), harness(READ, fail_at=[0])))
    assert r.trace.status == "answered"
    assert r.failed
    assert "error: the subagent failed" in text(r)
