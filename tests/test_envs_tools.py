"""What an agent reads when it searches and opens pages."""

from __future__ import annotations

from typing import Any

import pytest

from envs.search import Bm25Searcher
from envs.tools import Access, Search, access, search
from envs.world import World, WorldConfig, world_of
from swarm.tools import CallContext
from swarm.types import Artifact, Task, ToolCall, ToolResult
from swarm.workspace import Workspace
from tests.island import SUBJECT, island

START = Workspace((Artifact(SUBJECT, cells={"text": "List all."}),))


@pytest.fixture(scope="module")
def world() -> World:
    return world_of(island(), WorldConfig(distractors=0.0, list_page_size=4))


def _url(world: World, title: str) -> str:
    return next(p.url for p in world.pages.values() if p.title == title)


def test_search_by_the_question_handle_shows_the_list_with_its_number_of_pages(world: World) -> None:
    _, text = START.show(search(world, START, {"query": "#0", "topk": 1}).parts)
    assert text == f"[Doc #1]({_url(world, SUBJECT)}) {SUBJECT} list, 3 pages\n"


def test_a_hit_that_is_an_entity_shows_no_attribute(world: World) -> None:
    _, text = START.show(search(world, START, {"query": "hazel", "topk": 1}).parts)
    assert text == f"[Doc #1]({_url(world, 'Hazel')}) Hazel\n"


def test_a_snippet_shows_names_of_fields_only() -> None:
    snippets = world_of(island(), WorldConfig(snippet=10))
    _, text = START.show(search(snippets, START, {"query": "hazel", "topk": 1}).parts)
    assert len(text.strip().split("Hazel ")[1]) <= 10
    assert "1,007" not in text


def test_search_returns_three_hits_unless_told_and_never_more_than_ten(world: World) -> None:
    assert len(search(world, START, {"query": "field airport"}).parts) == 6
    assert len(search(world, START, {"query": "nearest", "topk": "50"}).parts) == 20


def test_a_query_without_a_known_word_has_no_hits(world: World) -> None:
    assert search(world, START, {"query": "zzz"}) == ToolResult(("no hits\n",))


def test_a_list_page_shows_its_entries(world: World) -> None:
    ws, text = START.show(access(world, START, {"url": _url(world, SUBJECT), "page": 3}).parts)
    head, *entries = text.splitlines()
    assert head == f"[Doc #1]({_url(world, SUBJECT)}) {SUBJECT} page 3 of 3"
    assert entries == [f"[Doc #{k}]({ws.items[k].url}) {ws.items[k].title}" for k in (2, 3)]


def test_an_entity_page_shows_lettered_fields_and_its_cells_can_be_copied(world: World) -> None:
    ws, text = START.show(access(world, START, {"url": _url(world, "Ash")}).parts)
    page = world.entity(_url(world, "Ash"))
    assert page is not None
    shown = {
        "population": "1,000",
        "latitude": "0.50",
        "nearest airport": f"[Doc #2]({_url(world, 'Ash Field')}) Ash Field",
    }
    assert text.splitlines()[1:] == [f"{f.letter} {f.name}: {shown[f.name]}" for f in page.fields]
    letter = next(f.letter for f in page.fields if f.name == "nearest airport")
    assert ws.written(f"| #1 | #1.{letter} |").rows == (("Ash", "Ash Field"),)


def test_a_handle_stands_for_an_address(world: World) -> None:
    ws, _ = START.show(search(world, START, {"query": "#0", "topk": 1}).parts)
    assert access(world, ws, {"url": "#1", "page": "2"}).parts[1] == " page 2 of 3\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"url": "w/999999x"}, "no_such_page", "no such page: w/999999x"),
        ({"url": 7}, "bad_arguments", "bad_arguments: want url, a string, and page, a number"),
        ({"url": "w/1", "page": "two"}, "bad_arguments", "bad_arguments: want url, a string, and page, a number"),
        ({"url": "w/1", "page": True}, "bad_arguments", "bad_arguments: want url, a string, and page, a number"),
        ({"url": "w/1", "size": 3}, "bad_arguments", "bad_arguments: want url, a string, and page, a number"),
    ],
)
def test_a_wrong_access_is_answered_in_words(world: World, arguments: dict[str, Any], kind: str, text: str) -> None:
    assert access(world, START, arguments) == ToolResult((text,), error=kind)


def test_a_page_out_of_range_says_how_many_there_are(world: World) -> None:
    result = access(world, START, {"url": _url(world, SUBJECT), "page": 9})
    assert result == ToolResult(("page 9 of a list of 3 pages",), error="page_out_of_range")


def test_an_empty_query_and_a_wrong_one_are_errors(world: World) -> None:
    assert search(world, START, {"query": "  "}) == ToolResult(("empty_query",), error="empty_query")
    assert search(world, START, {"topk": 2}).error == "bad_arguments"


def _context(seed: int) -> CallContext:
    task = Task("t", "List all.", SUBJECT, "city", ("city",), ())
    return CallContext("main", 0, 0, seed, 10, task, START)


async def test_the_tools_answer_as_the_functions_do(world: World) -> None:
    context = _context(0)
    call = ToolCall("search", {"query": "#0"})
    assert await Search(world).run(call, context) == search(world, START, call.arguments)
    call = ToolCall("access", {"url": _url(world, "Ash")})
    assert await Access(world).run(call, context) == access(world, START, call.arguments)
    assert Access(world).prepare(call, context) is START


async def test_failures_are_injected_by_the_seed_of_the_call() -> None:
    broken = world_of(island(), WorldConfig(tool_failures=0.5))
    call = ToolCall("search", {"query": "#0"})
    first = [(await Search(broken).run(call, _context(s))).error for s in range(100)]
    again = [(await Search(broken).run(call, _context(s))).error for s in range(100)]
    assert first == again
    assert set(first) == {"", "tool_failure"}
    assert 30 <= first.count("tool_failure") <= 70


def test_equal_scores_are_ordered_by_document() -> None:
    searcher = Bm25Searcher(["w/3", "w/1", "w/2"], ["red fox", "red fox", "blue hen"])
    assert searcher.search("fox", 3) == ("w/3", "w/1")
    assert searcher.search("fox", 1) == ("w/3",)
