"""Forks: the past is kept to the token, one thing is changed, the rest is live."""

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from swarm.engine.scripted import ScriptedEngine
from swarm.fork import Edit, ForkError, fork
from swarm.fork_compare import compare
from swarm.fork_credit import Gain, credit, gain
from swarm.kept import RecordGap
from swarm.loop import Subagent
from swarm.records import read, write
from swarm.replay import differences, replay, timeless, tree
from swarm.transcript import Transcript
from swarm.types import Budget, Ledger, Reward, Rollout, Stage, Trace, Turn
from tests.debug_cases import CREATE, assign, language, lead, reader, rolled, swarm, text
from tests.swarm_cases import TASK, call, engine, harness, says


def agents(r: Rollout) -> dict[str, Rollout]:
    return {x.trace.agent: x for x in tree(r)}


async def exact(r: Rollout) -> bool:
    """Whether a rollout is replayed from its record, clock and all."""
    again = await replay(r, language)
    return not differences(r, again) and again == r


@pytest.mark.parametrize("turn", range(4))
async def test_a_fork_with_nothing_changed_is_the_rollout_again(turn):
    h = swarm()
    r = await rolled(h)
    branch = await fork(h, r, turn=turn)
    assert timeless(branch.rollout) == timeless(r)


@pytest.mark.parametrize("agent", ["main/2:a", "main/3:a"])
@pytest.mark.parametrize("turn", range(3))
async def test_a_fork_of_a_subagent_with_nothing_changed_is_the_rollout_again(agent, turn):
    h = swarm()
    r = await rolled(h)
    branch = await fork(h, r, agent, turn)
    assert timeless(branch.rollout) == timeless(r)


async def test_what_an_observation_is_changed_to_is_what_the_agent_reads():
    h = swarm(says(Turn("", (call("echo", text="cold"),)), Turn("done")))
    branch = await fork(h, await rolled(h), turn=0, edit=Edit(results={0: "warm"}))
    assert "warm" in text(branch.rollout)
    assert "\ncold\n" not in text(branch.rollout)
    assert await exact(branch.rollout)


async def test_what_a_subagent_returned_can_be_changed_and_its_cost_stays():
    h = swarm()
    r = await rolled(h)
    branch = (await fork(h, r, turn=1, edit=Edit(results={0: "nothing there"}))).rollout
    assert "nothing there" in text(branch)
    assert branch.ledger.stages[1] == r.ledger.stages[1]
    assert ("p", "2") in r.table
    assert ("p", "2") not in branch.table
    assert await exact(branch)


async def test_another_action_is_run_live_and_is_not_sampled():
    h = swarm()
    r = await rolled(h)
    branch = (await fork(h, r, turn=1, edit=Edit(action=assign("other")))).rollout
    assert [c.prompt for c in branch.children] == ["other"]
    assert [len(s.ids) for s in branch.trace.segments[0].spans if s.kind == "sampled"][1:] != [
        len(s.ids) for s in r.trace.segments[0].spans if s.kind == "sampled"
    ][1:]
    given = branch.trace.acts[1].given
    assert not any(s.ids == given and s.kind == "sampled" for s in branch.trace.segments[0].spans)
    assert await exact(branch)


async def test_a_result_can_be_given_to_one_call_of_another_action():
    h = swarm()
    action = Turn("", (*assign("x").calls, *assign("y").calls))
    branch = (await fork(h, await rolled(h), turn=1, edit=Edit(action, {0: "gone"}))).rollout
    assert [c.prompt for c in branch.children] == ["y"]
    assert "gone" in text(branch)


async def test_siblings_keep_their_record_and_ancestors_go_on_live():
    r = await rolled(swarm())
    changed = harness(says(Turn("| New | 9 |\nfound")), steps=9)
    branch = (await fork(swarm(child=changed), r, "main/3:a", 1)).rollout
    assert agents(branch)["main/2:a"] == agents(r)["main/2:a"]
    assert agents(branch)["main/3:a"].trace.segments[0].spans[:2] == agents(r)["main/3:a"].trace.segments[0].spans[:2]
    assert ("New", "9") in branch.table
    assert ("p", "2") in branch.table
    assert branch.ledger.stages[1].subagents == (3, 2)
    assert await exact(branch)


async def test_only_those_who_are_spawned_after_the_fork_play_another_roster():
    first, second = (Turn("", (CREATE, *assign("p").calls)), assign("q"))
    policy = says(first, second, Turn("#1 #2"))
    r = await rolled(swarm(policy))
    other = replace(harness(says(Turn("| Other | 1 |")), steps=9), checkpoint="f" * 64)
    branch = (await fork(swarm(policy, other), r, turn=1)).rollout
    assert [c.trace.checkpoint for c in branch.children] == ["", "f" * 64]
    assert branch.children[0] == r.children[0]


async def test_a_larger_budget_is_shown_from_the_fork_on_and_lets_the_agent_go_on():
    def policy(t):
        return Turn("end") if t.last else Turn("", (call("echo", text="x"),))

    h = harness(policy, steps=3)
    r = await rolled(h)
    branch = (await fork(h, r, turn=2, edit=Edit(budget=Budget(6, 4096)))).rollout
    assert [f"[left {k}]" in text(branch) for k in (3, 2, 4, 3)] == [True] * 4
    assert "[left 1] answer now" in text(branch)
    assert (r.ledger.critical_steps, branch.ledger.critical_steps) == (3, 6)
    assert await exact(branch)


async def test_a_budget_below_what_is_spent_is_refused():
    h = swarm()
    r = await rolled(h)
    with pytest.raises(ForkError, match="main: critical_steps = 5, want more than the 5 that turn 2 finds spent"):
        await fork(h, r, turn=2, edit=Edit(budget=Budget(5, 4096)))


async def test_another_prompt_for_a_subagent_is_what_it_works_on():
    h = swarm()
    branch = await fork(h, await rolled(h), "main/2:a", 0, Edit(prompt="w instead", system="Guess."))
    child = agents(branch.rollout)["main/2:a"]
    assert (child.prompt, child.table) == ("w instead", (("w", "2"),))
    assert "Guess." in text(child)
    assert await exact(branch.rollout)


async def test_a_deeper_agent_is_forked_under_both_its_ancestors():
    limits = SpawnLimits(depth=2)

    def policy(t):
        if "deep" in t.user:
            return reader(t)
        return Turn("#1") if t.exchanges else Turn("", (CREATE, *assign("deep" if "mid" in t.user else "mid").calls))

    h = harness(policy, CreateSubagent(limits), AssignTask(lambda *_: Subagent(h), limits), steps=30)
    r = await rolled(h)
    assert list(agents(r)) == ["main", "main/1:a", "main/1:a/1:a"]
    assert timeless((await fork(h, r, "main/1:a/1:a", 1)).rollout) == timeless(r)
    branch = await fork(h, r, "main/1:a/1:a", 0, Edit(results={0: "changed"}))
    assert "changed" in text(agents(branch.rollout)["main/1:a/1:a"])
    assert await exact(branch.rollout)


async def test_a_branch_is_recorded_replayed_and_forked_again(tmp_path: Path):
    h = swarm()
    first = await fork(h, await rolled(h), "main/2:a", 1, Edit(results={0: "changed"}))
    write(tmp_path / "b.rollouts", [first.rollout])
    [kept] = read(tmp_path / "b.rollouts")
    assert kept == first.rollout
    second = await fork(h, kept, "main", 2)
    assert timeless(second.rollout) == timeless(first.rollout)


async def test_the_kept_past_is_a_prompt_to_a_learner_and_what_follows_is_trained():
    h = swarm()
    r = await rolled(h)
    branch = await fork(h, r, turn=2)
    [segment] = branch.trainable.trace.segments
    assert segment.opened_by == "fork"
    assert segment.ids == r.trace.segments[0].ids
    sampled = [s for s in r.trace.segments[0].spans if s.kind == "sampled"]
    assert [s for s in segment.spans if s.kind == "sampled"] == sampled[2:]


async def test_what_a_fork_of_a_subagent_keeps_of_its_ancestor_is_not_trained_again():
    h = swarm()
    r = await rolled(h)
    branch = await fork(h, r, "main/2:a", 1)
    sampled = [s for s in r.trace.segments[0].spans if s.kind == "sampled"]
    assert [s for s in branch.trainable.trace.segments[0].spans if s.kind == "sampled"] == sampled[2:]


async def test_an_agent_that_an_engine_failed_goes_on_from_there():
    h = harness(says(Turn("", (call("echo", text="x"),)), Turn("done")), fail_at=[1])
    r = await rolled(h)
    assert r.failed
    branch = (await fork(h, r, turn=1)).rollout
    assert (branch.trace.status, branch.answer) == ("answered", "done")


@pytest.mark.parametrize(
    ("agent", "turn", "edit", "message"),
    [
        ("main/9:z", 0, Edit(), "agent 'main/9:z': want one of main, main/2:a, main/3:a"),
        ("main", 4, Edit(), "main: turn 4, want one from 0 to 3"),
        ("main", -1, Edit(), "main: turn -1, want one from 0 to 3"),
        ("main", 1, Edit(results={2: "x"}), "a result of call 2 of turn 1, which has 2 calls"),
        ("main", 1, Edit(prompt="x"), "main: another prompt at turn 1, want it at turn 0"),
    ],
)
async def test_a_fork_that_has_no_place_is_refused(agent, turn, edit, message):
    h = swarm()
    r = await rolled(h)
    with pytest.raises(ForkError, match=message.replace("(", r"\(")):
        await fork(h, r, agent, turn, edit)


@pytest.mark.parametrize("agent", ["main", "main/2:a"])
async def test_a_harness_that_was_another_is_refused(agent):
    r = await rolled(swarm())
    longer = harness(reader, steps=9)
    longer = replace(longer, tools=(longer.tools[0], *swarm().tools[1:2]))
    h = swarm(child=longer) if agent != "main" else longer
    with pytest.raises(ForkError, match=rf"{agent}: token \d+ of context 0 is .* want the language and tools"):
        await fork(h, r, agent, 1)


async def test_a_rollout_of_another_harness_is_refused():
    r = await rolled(swarm())
    with pytest.raises(RecordGap, match="main: its record has no setup"):
        await fork(swarm(), replace(r, trace=replace(r.trace, setup=None)))


async def test_another_seed_reaches_the_sampler_and_the_calls():
    seen: list[int] = []

    def speaks(ids, sampling):
        seen.append(sampling.seed)
        return h.chat.encode_turn("end")  # type: ignore[attr-defined]

    h = harness(lead)
    r = await rolled(replace(h, engine=engine(says(Turn("", (call("echo", text="x"),)), Turn("end")))))
    live = replace(h, engine=ScriptedEngine(speaks))
    await fork(live, r, turn=1)
    await fork(live, r, turn=1, edit=Edit(seed=7))
    assert len(set(seen)) == 2


async def test_a_temperature_holds_from_the_fork_on():
    seen: list[float] = []

    def speaks(ids, sampling):
        seen.append(sampling.temperature)
        return h.chat.encode_turn("end")  # type: ignore[attr-defined]

    h = harness(says(Turn("", (call("echo", text="x"),)), Turn("end")))
    branch = await fork(replace(h, engine=ScriptedEngine(speaks)), await rolled(h), turn=1, edit=Edit(temperature=0.5))
    assert seen == [0.5]
    assert branch.rollout.trace.setup is not None
    assert branch.rollout.trace.setup.terms.sampling.temperature == 0.5


# --- branches side by side ---------------------------------------------------------------


def handed_in(*rows: tuple[str, str], reward: float | None = None) -> Rollout:
    parts = None if reward is None else Reward({"perf": reward, "steps": 3.0}, {"perf": 1.0, "steps": 0.0})
    return Rollout(TASK, Trace("main", (), "answered"), Ledger((Stage(2),)), table=rows, reward=parts)


def test_answers_are_compared_with_the_gold_table_and_with_each_other():
    # gold: A 1, B 2
    one, other = handed_in(("A", "1"), ("b ", "2")), handed_in(("A", "7"), ("C", "3"), reward=0.5)
    found = compare({"one": one, "other": other})
    assert [row.stands for row in found.rows] == [("right", "wrong"), ("right", "missing"), ("", "extra")]
    assert [(o.reward, o.right, o.rows) for o in found.outcomes] == [(None, 2, 2), (0.5, 0, 2)]
    assert len(found.changed) == 3
    assert found.outcomes[1].parts == {"perf": 0.5}


async def test_a_comparison_shows_itself_in_a_terminal_and_in_a_notebook():
    h = swarm()
    r = await rolled(h)
    branch = await fork(h, r, turn=1, edit=Edit(results={0: "<b>"}))
    shown = compare({"recorded": r, "<branch>": branch.rollout})
    console = Console(width=100, record=True, file=StringIO())
    console.print(shown)
    text = console.export_text()
    assert "critical steps" in text
    assert "rows that differ" in text
    html = shown._repr_html_()
    assert "&lt;branch&gt;" in html
    assert "<branch>" not in html


def test_rollouts_of_several_tasks_are_not_compared():
    other = replace(handed_in(), task=replace(TASK, id="u"))
    with pytest.raises(ValueError, match=r"compare: tasks \['t', 'u'\], want rollouts of one task"):
        compare({"a": handed_in(), "b": other})


# --- credit ------------------------------------------------------------------------------


async def rows_right(rollouts: Sequence[Rollout]) -> list[float | None]:
    return [float(len({row for row in r.table if row in TASK.gold})) for r in rollouts]


def finds(t: Transcript) -> Turn:
    """The reader of `p` finds a row that is wanted, that of `q` none; each after one look."""
    if not t.exchanges:
        return Turn("", (call("echo", text="x"),))
    return Turn("| A | 1 |" if t.user.startswith("p") else "| Z | 9 |")


async def test_a_spawn_that_found_what_is_wanted_has_its_credit_and_one_that_did_not_has_none():
    h = swarm(child=harness(finds, steps=9))
    r = await rolled(h)
    useful, useless = [await credit(h, r, "main", 1, place, score=rows_right, pairs=3) for place in (0, 1)]
    assert (useful.reward.mean, useless.reward.mean) == (1.0, 0.0)
    # Both readers take 2 steps: without one, the other is as slow.
    assert useful.critical_steps.mean == 0.0


async def test_the_credit_of_a_lone_spawn_counts_the_steps_that_it_took():
    h = swarm(says(Turn("", (CREATE, *assign("p").calls)), Turn("#1")), harness(finds, steps=9))
    found = await credit(h, await rolled(h), "main", 0, 1, score=rows_right, pairs=2)
    assert found.critical_steps == Gain(2.0, 2.0, 2.0)
    assert "main, turn 0, call 1: 2 pairs" in found._repr_html_()


async def test_pairs_of_which_one_has_no_reward_are_left_out_and_counted():
    async def half(rollouts: Sequence[Rollout]) -> list[float | None]:
        return [None if k == 3 else 1.0 for k in range(len(rollouts))]

    h = swarm()
    found = await credit(h, await rolled(h), "main", 1, 0, score=half, pairs=3)
    assert (len(found.pairs), found.failed) == (2, 1)


async def test_credit_is_asked_of_spawns_only():
    h = swarm()
    with pytest.raises(ForkError, match="main, turn 0, call 1: no subagent ran for it"):
        await credit(h, await rolled(h), "main", 0, 1, score=rows_right)


def test_the_interval_of_a_gain_is_the_percentile_bootstraps():
    assert gain([1.0, 1.0]) == Gain(1.0, 1.0, 1.0)
    # Of 0 and 1, resamples have mean 0 and 1 in a quarter each.
    assert gain([0.0, 1.0]) == Gain(0.5, 0.0, 1.0)
