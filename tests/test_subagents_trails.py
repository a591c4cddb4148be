"""The scripted follower of trails: what it does, what it says, and what it still knows after a rewrite."""

from __future__ import annotations

import random

import pytest

from envs.tools import Access, Search
from envs.trails import Shape, TrailSet, make_task
from envs.world import World, WorldConfig, world_of
from rewards.trails import trail_scores
from subagents.trails import SummaryStyle, follow, recall
from swarm.context import ContextPolicy
from swarm.loop import Harness, begin, run
from swarm.transcript import Exchange, Policy, Transcript
from swarm.types import Budget, Rollout, Sampling, Task, ToolCall, Turn
from tests.ring import ring
from tests.swarm_cases import chat, engine

QUESTION = "Find all: nearest airport | nearest city | population\na: Town 3\nb: Town 11\nc: Town 7\nRules.\n[left 20]"
TOWN = "#1\nc nearest airport: [Doc #5](w/5) Field 3\na population: 1,003"
FIELD = "#5\nb nearest city: #8\na elevation: 203"
END = "#8\na population (2019): 7\nA population (2024): 1,004"


def shown(*exchanges: Exchange, summary: str = "", summarize: bool = False, last: bool = False) -> Transcript:
    return Transcript("Work.", QUESTION, exchanges, 20, last, summary=summary, summarize=summarize)


def searched(letter: str, result: str, content: str = "") -> Exchange:
    return Exchange(content, (ToolCall("search", {"query": f"#0.{letter}"}),), (result,))


def opened(page: int, content: str, result: str) -> Exchange:
    return Exchange(content, (ToolCall("access", {"url": f"#{page}"}),), (result,))


def searches(letter: str, content: str = "") -> Turn:
    return Turn(content, (ToolCall("search", {"query": f"#0.{letter}"}),))


def opens(page: int, content: str) -> Turn:
    return Turn(content, (ToolCall("access", {"url": f"#{page}"}),))


# --- one turn -----------------------------------------------------------------------------


def test_it_begins_with_the_start_of_the_first_trail() -> None:
    assert follow()(shown()) == searches("a")


@pytest.mark.parametrize(
    "hits",
    [
        "[Doc #1](w/1) Town 3\n[Doc #2](w/2) Town",
        "[Doc #4](w/4) cities on Town 3 list, 7 pages\n[Doc #1](w/1) Town 3",
        "#4 list, 7 pages\n#1\n#2",
    ],
)
def test_it_opens_the_first_hit_that_is_no_list(hits: str) -> None:
    assert follow()(shown(searched("a", hits))) == opens(1, "a nearest airport | nearest city | population")


def test_it_follows_a_link_and_says_what_is_still_to_be_read() -> None:
    turn = follow()(shown(opened(1, "a nearest airport | nearest city | population", TOWN)))
    assert turn == opens(5, "a nearest city | population")


def test_it_follows_the_newest_revision_and_notes_where_it_stands() -> None:
    assert follow()(shown(opened(8, "a population", END))) == searches("b", "a#8.A")


def test_a_value_that_is_not_there_is_noted_as_absent() -> None:
    assert follow()(shown(opened(8, "a population", "#8\nb latitude: 1.0"))) == searches("b", "a N/A")


def test_a_link_that_is_not_there_ends_its_trail() -> None:
    assert follow()(shown(opened(5, "b nearest city | population", "#5\na code: X"))) == searches("c", "b N/A")


def test_a_search_without_hits_ends_its_trail() -> None:
    assert follow()(shown(searched("a", "no hits"))) == searches("b", "a N/A")


@pytest.mark.parametrize(
    ("exchange", "again"),
    [
        (searched("a", "tool_failure: try again"), searches("a")),
        (opened(5, "a nearest city | population", "tool_failure: try again"), opens(5, "a nearest city | population")),
    ],
)
def test_a_call_that_failed_is_made_again(exchange: Exchange, again: Turn) -> None:
    assert follow()(shown(exchange)) == again


def test_after_the_last_trail_it_answers() -> None:
    seen = (searched("b", "#2", "a#8.A"), searched("c", "#1", "b N/A"), opened(8, "c population", END))
    assert follow()(shown(*seen)) == Turn("|a|#8.A|\n|b|N/A|\n|c|#8.A|")


def test_the_last_turn_answers_what_is_known() -> None:
    assert follow()(shown(searched("b", "#2", "a#8.A"), last=True)) == Turn("|a|#8.A|\n|b|N/A|\n|c|N/A|")


def test_the_last_turn_uses_the_value_that_was_just_shown() -> None:
    assert follow()(shown(opened(8, "c population", END), last=True)) == Turn("|a|N/A|\n|b|N/A|\n|c|#8.A|")


# --- summaries ----------------------------------------------------------------------------


def test_a_summary_says_what_is_found_and_what_comes_next() -> None:
    seen = (searched("b", "#1", "a#8.A"), opened(1, "b nearest airport | nearest city | population", TOWN))
    assert follow()(shown(*seen, summarize=True)) == Turn("a#8.A\nb#5 nearest city | population")


def test_a_summary_carries_the_summary_before() -> None:
    seen = shown(opened(5, "c nearest city | population", FIELD), summary="a#8.A\nb N/A", summarize=True)
    assert follow()(seen) == Turn("a#8.A\nb N/A\nc#8 population")


def test_between_two_trails_a_summary_says_only_what_is_found() -> None:
    assert follow()(shown(opened(8, "a population", END), summarize=True)) == Turn("a#8.A")


@pytest.mark.parametrize(
    ("summary", "turn"),
    [
        ("a#8.A\nb#5 nearest city | population", opens(5, "b nearest city | population")),
        ("a#8.A\nb#12.c", searches("c")),
        ("a#8.A", searches("b")),
        ("", searches("a")),
        ("a#8.A\nb N/A\nc#12.c", Turn("|a|#8.A|\n|b|N/A|\n|c|#12.c|")),
    ],
)
def test_it_goes_on_from_a_summary_alone(summary: str, turn: Turn) -> None:
    assert follow()(shown(summary=summary)) == turn


def test_visible_turns_are_newer_than_the_summary() -> None:
    seen = opened(5, "b nearest city | population", FIELD)
    assert follow()(shown(seen, summary="a#8.A\nb#5 nearest city | population")) == opens(8, "b population")


def test_a_turn_kept_beside_its_summary_is_gone_on_from_once() -> None:
    seen = shown(opened(8, "a population", END), summary="a#8.A")
    assert follow()(seen) == searches("b", "a#8.A")


def test_what_neither_summary_nor_turns_say_is_lost() -> None:
    assert follow()(shown(searched("c", "#1", "b#9.a"), last=True)) == Turn("|a|N/A|\n|b|#9.a|\n|c|N/A|")


def test_all_that_is_dropped_is_given_as_absent_and_never_comes_back() -> None:
    policy = follow(SummaryStyle(drop=1.0))
    seen = shown(opened(5, "c nearest city | population", FIELD), summary="a#8.A\nb#9.b", summarize=True)
    assert policy(seen) == Turn("a N/A\nb N/A\nc#8 population")


def test_a_muddled_summary_does_not_say_what_comes_next() -> None:
    seen = shown(opened(5, "c nearest city | population", FIELD), summary="a#8.A\nb#9.b", summarize=True)
    assert follow(SummaryStyle(muddle=1.0))(seen) == Turn("a#8.A\nb#9.b")


def test_values_are_dropped_at_the_stated_rate_and_alike_for_alike_seeds() -> None:
    seen = shown(summary="a#8.A\nb#9.b\nc#7.c", summarize=True)
    said = [follow(SummaryStyle(drop=0.3), seed)(seen).content for seed in range(400)]
    assert said == [follow(SummaryStyle(drop=0.3), seed)(seen).content for seed in range(400)]
    lost = sum(text.count("N/A") for text in said) / 1200
    assert lost == pytest.approx(0.3, abs=0.04)  # three deviations: 3 · √(0.3 · 0.7 / 1200) = 0.0397


@pytest.mark.parametrize("style", [{"drop": 1.5}, {"muddle": -0.1}])
def test_rates_out_of_range_are_refused(style: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"summary: \w+ = -?\d\.\d, want 0 to 1"):
        SummaryStyle(**style)


def test_recall_reads_any_text_without_failing() -> None:
    odd = Transcript(
        "", "Hello.", (Exchange("x", (), ()), opened(3, "", "?")), 3, False, summary="b #x d", summarize=False
    )
    assert recall(odd).position is None


# --- in the loop --------------------------------------------------------------------------


def _world(**knobs: float) -> World:
    return world_of(ring(30), WorldConfig(distractors=0.0, **knobs))  # pyright: ignore[reportArgumentType]


def _task(world: World, count: int, links: int) -> Task:
    names = ("nearest airport", "nearest city") * links
    shape = Shape("city", names[:links], "population" if links % 2 == 0 else "elevation")
    walks = sorted(TrailSet(world).walks[shape.path], key=lambda walk: walk[0].title)
    return make_task(world, shape, random.Random(1).sample(walks, count), "train")


async def _rollout(
    world: World, policy: Policy, context: ContextPolicy, *, steps: int = 99, window: int = 6000
) -> Rollout:
    budget = Budget(steps, window, seconds=1e6)
    tools = (Search(world), Access(world))
    h = Harness(
        engine(policy), chat(), tools, "Work.", Sampling(96, stop=chat().stop), budget, context, scratchpad=False
    )
    return await run(h, begin(h, _task(world, 5, 2), seed=1))


async def test_everything_is_found_in_a_window_that_holds_all() -> None:
    r = await _rollout(_world(), follow(), ContextPolicy())
    assert trail_scores(r.task, r.table)["score"] == 1.0
    assert len(r.ledger.stages) == r.task.meta["steps"]


async def test_revisions_and_failing_calls_change_nothing() -> None:
    world = _world(conflicts=0.5, tool_failures=0.3)
    r = await _rollout(world, follow(), ContextPolicy())
    assert trail_scores(r.task, r.table)["score"] == 1.0


@pytest.mark.parametrize("keep", [0, 1, 2])
async def test_everything_is_found_across_compactions(keep: int) -> None:
    context = ContextPolicy("compaction", threshold=900, keep=keep, summary_tokens=128, limit=99)
    r = await _rollout(_world(), follow(), context, window=1400)
    assert r.ledger.counts["compactions"] >= 2
    assert trail_scores(r.task, r.table)["score"] == 1.0


async def test_truncation_loses_what_was_found_early() -> None:
    context = ContextPolicy("truncation", threshold=900, keep=2, limit=99)
    r = await _rollout(_world(), follow(), context, window=1400)
    assert r.trace.status == "answered"
    assert r.table[0] == ("a", "N/A")
    assert 0 < trail_scores(r.task, r.table)["score"] < 1


async def test_dropped_values_are_missing_in_the_answer() -> None:
    context = ContextPolicy("compaction", threshold=900, keep=0, summary_tokens=128, limit=99)
    r = await _rollout(_world(), follow(SummaryStyle(drop=1.0)), context, window=1400)
    assert r.trace.status == "answered"
    assert 0 < trail_scores(r.task, r.table)["score"] < 1


async def test_a_budget_that_runs_out_is_answered_with_what_is_known() -> None:
    r = await _rollout(_world(), follow(), ContextPolicy(), steps=9)
    assert r.trace.status == "exhausted"
    # Eight calls: two trails of a search and three pages.
    assert trail_scores(r.task, r.table)["score"] == pytest.approx(2 / 5)
