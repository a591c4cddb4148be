"""`search` and `access`: all that an agent can do in a world.

Output, with A(x) for an artifact, which a workspace shows as `[Doc #k](url) title`:

    search   A(list) " list, 7 pages"            one line a hit, of an entity only A(entity)
    access   A(list) " page 2 of 7"              then one line an entry: A(entity)
             A(entity with cells)                then one line a field: "a elevation: 4,023",
                                                 "b nearest city: " A(city)

Errors are text with a kind, for the policy to read. Nothing here waits, and nothing here knows a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from envs.pages import EntityPage, ListPage, Page
from envs.world import World
from swarm.tools import CallContext, Refused
from swarm.types import Artifact, ToolCall, ToolResult, ToolSpec
from swarm.workspace import Workspace

DEFAULT_TOPK, MAX_TOPK = 3, 10

Parts = list[str | Artifact]


class Search:
    """`search(query, topk)`: the best pages for a query, without any attribute of theirs."""

    spec = ToolSpec(
        "search",
        "Search the pages.",
        {
            "type": "object",
            "properties": {"query": {"type": "string"}, "topk": {"type": "integer", "default": DEFAULT_TOPK}},
            "required": ["query"],
        },
    )

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        return context.workspace

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        return failure(self._world, context.seed) or search(self._world, context.workspace, call.arguments)


class Access:
    """`access(url, page)`: an entity page, or one page of a list."""

    spec = ToolSpec(
        "access",
        "Open a page.",
        {
            "type": "object",
            "properties": {"url": {"type": "string"}, "page": {"type": "integer", "default": 1}},
            "required": ["url"],
        },
    )

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        return context.workspace

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        return failure(self._world, context.seed) or access(self._world, context.workspace, call.arguments)


def failure(world: World, seed: int) -> ToolResult | None:
    """The failure injected into the call with this seed, if any. The same call with another seed may succeed."""
    rate = world.config.tool_failures
    return _error("tool_failure", "tool_failure: try again") if rate and Random(seed).random() < rate else None


def search(world: World, workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
    """What `search` answers: arguments `query` (handles become titles) and `topk` (at most 10 are shown)."""
    query, topk = arguments.get("query"), _integer(arguments.get("topk", DEFAULT_TOPK))
    if not isinstance(query, str) or topk is None or topk < 1 or arguments.keys() - {"query", "topk"}:
        return _error("bad_arguments", "bad_arguments: want query, a string, and topk, a number from 1")
    query = workspace.text(query).strip()
    if not query:
        return _error("empty_query", "empty_query")
    hits = world.searcher.search(query, min(topk, MAX_TOPK))
    parts = [part for url in hits for part in _hit(world.pages[url], world.config.snippet)]
    return ToolResult(tuple(parts) or ("no hits\n",))


def access(world: World, workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
    """What `access` answers: arguments `url` (an address or a handle) and `page` (counted from 1)."""
    url, k = arguments.get("url"), _integer(arguments.get("page", 1))
    if not isinstance(url, str) or k is None or arguments.keys() - {"url", "page"}:
        return _error("bad_arguments", "bad_arguments: want url, a string, and page, a number")
    url = workspace.url(url)
    page = world.pages.get(url)
    if page is None:
        return _error("no_such_page", f"no such page: {url}")
    pages = page.pages if isinstance(page, ListPage) else 1
    if not 1 <= k <= pages:
        return _error("page_out_of_range", f"page {k} of a list of {pages} pages")
    parts = _list_parts(page, k, world) if isinstance(page, ListPage) else _entity_parts(page, world)
    return ToolResult(tuple(parts))


def _hit(page: Page, snippet: int) -> Parts:
    if isinstance(page, ListPage):
        return [_artifact(page), f" list, {page.pages} pages\n"]
    names = ", ".join(dict.fromkeys(f.plain_name for f in page.fields))[:snippet]
    return [_artifact(page), f" {names}\n" if names else "\n"]


def _list_parts(page: ListPage, k: int, world: World) -> Parts:
    entries = [part for url in page.page(k) for part in (_artifact(world.pages[url]), "\n")]
    return [_artifact(page), f" page {k} of {page.pages}\n", *entries]


def _entity_parts(page: EntityPage, world: World) -> Parts:
    cells = {f.letter: f.value for f in page.fields}
    parts: Parts = [Artifact(page.title, page.url, cells), "\n"]
    for f in page.fields:
        label = f"{f.letter} {f.name}: "
        parts += [label, _artifact(world.pages[f.link]), "\n"] if f.link else [f"{label}{f.value}\n"]
    return parts


def _artifact(page: Page) -> Artifact:
    return Artifact(page.title, page.url)


def _integer(value: object) -> int | None:
    """An integer, also one that was sent as a string or as `2.0`; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 10 else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _error(kind: str, text: str) -> ToolResult:
    return ToolResult((text,), error=kind)
