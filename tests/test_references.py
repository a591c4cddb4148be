"""The scripted reference policies, in the one loop and through the real tools, on a table of sixty rows."""

from functools import cache

import pytest

from envs.tasks import Column, make_task
from envs.world import WorldConfig, world_of
from orchestrator.scripted import Style, copies, empty, orchestrate, scattered, split
from recipes.config import Limits, Recipe
from recipes.systems import Builder
from recipes.tokenizer import build_tokenizer
from rewards.parl import spawning
from rewards.table import table_scores
from subagents.scripted import keys_only, read_table
from swarm.chat import HermesChat
from swarm.loop import Harness, begin, run
from swarm.types import Budget, Rollout, Task
from tests.island import SUBJECT, island

ROWS = 60


@cache
def builder() -> Builder:
    world = world_of(island(ROWS), WorldConfig(distractors=1.0, conflicts=0.3, missing=0.1))
    return Builder(
        world,
        HermesChat(build_tokenizer(["cities in Oak Island"]), terse_tools=True),
        Recipe(main=Limits(2048, 1 << 20, 40)),
    )


@cache
def task() -> Task:
    listed = next(x for x in builder().world.lists if x.group.subject == SUBJECT)
    wanted = (Column("population"), Column("latitude"), Column("elevation", "nearest airport"))
    return make_task(builder().world, listed, wanted, "heldout", 0)


async def play(harness: Harness, steps: int = 40) -> tuple[Rollout, float]:
    rollout = await run(harness, begin(harness, task(), 7, budget=Budget(steps, 1 << 20)))
    return rollout, table_scores(task(), rollout.table)["item_f1"]


def swarm(policy, reader=read_table) -> Harness:
    return builder().swarm(builder().scripted(policy), builder().everybody(builder().scripted(reader)))


@pytest.mark.slow
async def test_oracle_parallel_finds_everything_within_the_budget():
    rollout, f1 = await play(builder().ceiling())
    assert f1 == 1.0
    assert rollout.ledger.critical_steps < 20
    assert spawning(rollout).finish_rate == 1.0


@pytest.mark.slow
async def test_a_serial_agent_finds_everything_given_the_steps_but_not_within_the_budget():
    single = builder().single(builder().scripted(read_table))
    _, cut = await play(single)
    rollout, whole = await play(single, steps=400)
    assert cut <= 0.8
    assert whole == 1.0
    # one search, 12 list pages, 60 towns, their 60 airfields at most, and the answer
    assert 60 + 12 + 2 <= rollout.ledger.critical_steps <= 60 + 60 + 12 + 2


@pytest.mark.slow
async def test_copies_of_one_assignment_gain_nothing_over_one_page():
    rollout, f1 = await play(swarm(copies(8)))
    assert f1 == pytest.approx(2 * 5 / (60 + 5))
    assert (spawning(rollout).assigned, spawning(rollout).useful) == (8, 1)


async def test_the_floors_are_where_they_must_be():
    assert (await play(swarm(empty, empty)))[1] == 0.0
    keys, f1 = await play(builder().single(builder().scripted(keys_only)))
    assert len(keys.table) == ROWS
    by_chance = sum(cell == "N/A" for row in task().gold for cell in row[1:]) / (4 * ROWS)
    assert f1 == pytest.approx(1 / 4 + by_chance)


@pytest.mark.slow
async def test_random_delegation_finds_little():
    _, f1 = await play(swarm(scattered(8)))
    assert f1 < 0.5


@pytest.mark.slow
async def test_wasteful_assignments_are_seen_as_spurious():
    rollout, _ = await play(swarm(orchestrate(Style(width=16, junk=0.5), seed=1)))
    assert 0.0 < spawning(rollout).spurious_rate < 1.0


def test_shares_are_equal_runs_of_pages_and_cover_them_all():
    assert split(5, 3) == [(1, 2), (3, 4), (5, 5)]
    assert split(1, 16) == [(1, 1)]
    for pages in range(1, 20):
        for width in range(1, 18):
            shares = split(pages, width)
            assert [p for a, b in shares for p in range(a, b + 1)] == list(range(1, pages + 1))
            assert len(shares) <= width
