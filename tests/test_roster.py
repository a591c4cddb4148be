"""Who the subagents are: swaps while others run, mixtures, roles, and what a child says of who served it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from subagents.roster import Player, Role, Roster, RosterError
from swarm.folders import CheckpointError
from swarm.loop import begin, run
from swarm.types import Budget, CheckpointRef, Turn
from tests.swarm_cases import TASK, call, chat, engine, harness, says


def ref(name: str) -> CheckpointRef:
    return CheckpointRef(Path(name), name * 8)


class Served:
    """Scripted engines, each of which answers with its checkpoint's name; `fails` cannot be brought up."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, role: str, ref: CheckpointRef) -> Player:
        self.asked.append((role, str(ref.path)))
        if str(ref.path) == self.fails:
            raise CheckpointError(f"{ref.path}: no such checkpoint folder")
        return Player(engine(says(Turn(f"I am {ref.path}")), delay=1.0), chat())


def roster(served: Served, **roles: Role) -> Roster:
    return Roster({"": Role(harness(says(Turn("nobody")))), **roles}, served)


def orchestrator(who: Roster, *turns: Turn):
    limits = SpawnLimits()
    return harness(says(*turns), CreateSubagent(limits), AssignTask(who.subagent, limits), steps=40)


def spawn(name: str, *prompts: str) -> Turn:
    return Turn("", tuple(call("assign_task", agent=name, prompt=p) for p in prompts))


MAKE = Turn(
    "", tuple(call("create_subagent", name=n, system_prompt=f"the orchestrator's {n}") for n in ("a", "checker"))
)


async def played(who: Roster, *turns: Turn):
    h = orchestrator(who, MAKE, *turns, Turn("done"))
    return await run(h, begin(h, TASK, 1))


async def test_children_say_which_checkpoint_served_them(autojump_clock):
    who = roster(Served())
    await who.swap({"": ((ref("x"), 1.0),), "checker": ((ref("y"), 1.0),)})
    root = await played(who, spawn("a", "one"), spawn("checker", "two"))
    assert [(c.answer, c.trace.checkpoint) for c in root.children] == [("I am x", "x" * 8), ("I am y", "y" * 8)]
    assert root.trace.checkpoint == ""


async def test_who_runs_finishes_on_the_checkpoint_that_it_began_with(autojump_clock):
    who = roster(Served())
    await who.swap({"": ((ref("x"), 1.0),)})
    h = orchestrator(who, MAKE, spawn("a", "one"), spawn("a", "two"), Turn("done"))
    found = []

    async def swarm():
        found.append(await run(h, begin(h, TASK, 1, budget=Budget(40, 4096, 1e4))))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(swarm)
        await trio.sleep(0.5)  # the first child is being answered
        await who.swap({"": ((ref("y"), 1.0),)})
    assert [c.answer for c in found[0].children] == ["I am x", "I am y"]


async def test_a_mixture_is_drawn_by_weight_and_equal_seeds_draw_alike():
    who = roster(Served())
    await who.swap({"": ((ref("x"), 3.0), (ref("y"), 1.0))})
    drawn = [who.subagent("a", seed).harness.checkpoint[0] for seed in range(2000)]
    assert drawn == [who.subagent("b", seed).harness.checkpoint[0] for seed in range(2000)]
    assert Counter(drawn)["x"] / 2000 == pytest.approx(0.75, abs=0.03)


async def test_a_swap_that_cannot_be_served_leaves_the_cast_as_it_was():
    who = roster(Served(fails="z"))
    await who.swap({"": ((ref("x"), 1.0),)})
    with pytest.raises(CheckpointError, match="z: no such checkpoint"):
        await who.swap({"": ((ref("y"), 1.0),), "checker": ((ref("z"), 1.0),)})
    assert who.cast == {"": ((ref("x"), 1.0),)}
    assert who.subagent("a", 1).harness.checkpoint == "x" * 8


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ((), "role 'a' has no checkpoint"),
        (((ref("x"), 1.0), (ref("x"), 2.0)), "role 'a' has one checkpoint twice"),
        (((ref("x"), 0.0),), "weight 0.0 of x, want a finite number above 0"),
    ],
)
async def test_a_mixture_that_is_none_is_refused(mixture, words):
    served = Served()
    with pytest.raises(RosterError, match=words):
        await roster(served).swap({"a": mixture})
    assert served.asked == []


async def test_nobody_is_asked_before_somebody_plays():
    with pytest.raises(RosterError, match="nobody plays yet"):
        roster(Served()).subagent("a", 1)


async def test_a_role_has_limits_and_a_prompt_of_its_own(autojump_clock):
    base = harness(says(Turn("nobody")))
    own = Role(replace(base, budget=Budget(3, 999, 7.0)), "You check.", reply_tokens=2)
    who = roster(Served(), checker=own)
    await who.swap({"": ((ref("x"), 1.0),), "checker": ((ref("y"), 1.0),)})
    root = await played(who, spawn("checker", "one"), spawn("a", "two"))
    assert who.subagent("checker", 1).harness.budget == Budget(3, 999, 7.0)
    checker, other = (chat().decode(c.trace.segments[0].ids) for c in root.children)
    assert "You check." in checker
    assert "the orchestrator's checker" not in checker
    assert "the orchestrator's a" in other
    seen = chat().decode(root.trace.segments[-1].ids)
    assert "I am x" in seen
    assert "I am y" not in seen  # cut after two tokens


async def test_a_whole_cast_leaves_nobody_of_an_earlier_one():
    who = roster(Served())
    await who.swap({"": ((ref("x"), 1.0),), "a": ((ref("y"), 1.0),)})
    await who.swap({"": ((ref("z"), 1.0),)}, whole=True)
    assert who.cast == {"": ((ref("z"), 1.0),)}
    assert who.subagent("a", 1).harness.checkpoint == "z" * 8


async def test_a_name_without_a_role_is_cast_by_hand_and_run_as_everybody():
    who = roster(Served())
    await who.swap({"": ((ref("x"), 1.0),)})
    await who.swap({"a": ((ref("y"), 1.0),)})
    assert who.subagent("a", 1).harness.checkpoint == "y" * 8
    assert who.subagent("b", 1).harness.checkpoint == "x" * 8
