"""Scripted orchestrators: the ceiling, the floors, and the demonstrations of spawning.

    oracle    search, one assignment a share of list pages, merge what came back
    wasteful  the same, with a share of assignments that are duplicates, empty or beyond the list
    copies    k times the same assignment (parallel in form only)
    scattered k assignments at random
    empty     answers at once

Each is `Transcript -> Turn` and sees only the conversation.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from swarm.seeds import derive
from swarm.transcript import Policy, Transcript
from swarm.types import ToolCall, Turn

_HIT = re.compile(r"^\[Doc #(\d+)\]\(\S+\) (.*?) list, (\d+) pages?$", re.MULTILINE)
_HANDLE = re.compile(r"^#(\d+): \d+ rows", re.MULTILINE)
NAME, SYSTEM = "a", "Fill rows."


@dataclass(frozen=True, slots=True)
class Style:
    """How an orchestrator splits: at most `width` assignments; `junk` is the share of senseless ones.

    `skip` is the share of list pages that it forgets to assign.
    """

    width: int = 16
    junk: float = 0.0
    skip: float = 0.0


def orchestrate(style: Style, seed: int = 0) -> Policy:
    """A policy that searches, splits the list's pages over subagents, and merges their tables."""

    def policy(transcript: Transcript) -> Turn:
        exchanges = transcript.exchanges
        found = any(_HIT.search(r) for e in exchanges for r in e.results)
        if not found and not transcript.last:
            return Turn("", (ToolCall("search", {"query": "#0"}),))
        handles = [h for e in exchanges for r in e.results for h in _HANDLE.findall(r)]
        assigned = any(c.name == "assign_task" for e in exchanges for c in e.calls)
        if assigned or transcript.last:
            return Turn(" ".join(f"#{h}" for h in handles) or "#rows")
        rng = random.Random(derive(seed, transcript.user))
        doc, pages = chosen_list(transcript)
        shares = split(pages, style.width)
        prompts = [_prompt(doc, first, end) for first, end in shares]
        prompts = [p for p in prompts if rng.random() >= style.skip] or prompts[:1]
        prompts = _with_junk(prompts, doc, pages, style, rng)
        create = ToolCall("create_subagent", {"name": NAME, "system_prompt": SYSTEM})
        return Turn("", (create, *(ToolCall("assign_task", {"agent": NAME, "prompt": p}) for p in prompts)))

    return policy


def split(pages: int, width: int) -> list[tuple[int, int]]:
    """At most `width` equal runs of pages: `split(5, 3)` is [(1, 2), (3, 4), (5, 5)]."""
    size = -(-pages // max(1, min(width, pages)))
    return [(a, min(a + size - 1, pages)) for a in range(1, pages + 1, size)]


def chosen_list(transcript: Transcript) -> tuple[int, int]:
    """(document number, pages) of the list that the question names, by the last search."""
    found = [
        (int(k), title, int(n)) for e in transcript.exchanges for r in e.results for k, title, n in _HIT.findall(r)
    ]
    exact = [f for f in found if f[1].casefold() in transcript.user.casefold()]
    best = max(exact or found[:1] or [(1, "", 1)], key=lambda f: len(f[1]))
    return best[0], best[2]


def copies(k: int) -> Policy:
    """Bad-parallel: k assignments that differ in nothing but their wording, all for the first page."""

    def policy(transcript: Transcript) -> Turn:
        turn = orchestrate(Style(width=1))(transcript)
        if len(turn.calls) < 2:
            return turn
        doc, _ = chosen_list(transcript)
        prompts = [f"#0 #{doc} p1" + "." * i for i in range(k)]
        return Turn("", (turn.calls[0], *(ToolCall("assign_task", {"agent": NAME, "prompt": p}) for p in prompts)))

    return policy


def scattered(k: int, seed: int = 0) -> Policy:
    """A floor: k assignments for documents and pages drawn at random."""

    def policy(transcript: Transcript) -> Turn:
        turn = orchestrate(Style(width=1))(transcript)
        if len(turn.calls) < 2:
            return turn
        rng = random.Random(derive(seed, transcript.user))
        prompts = [_prompt(rng.randint(1, 9), page, page) for page in rng.sample(range(1, 40), k)]
        return Turn("", (turn.calls[0], *(ToolCall("assign_task", {"agent": NAME, "prompt": p}) for p in prompts)))

    return policy


def empty(transcript: Transcript) -> Turn:
    """The floor: no work, no rows."""
    return Turn("#rows")


def _prompt(doc: int, first: int, end: int) -> str:
    return f"#0 #{doc} p{first}" + (f"-{end}" if end > first else "")


def _with_junk(prompts: list[str], doc: int, pages: int, style: Style, rng: random.Random) -> list[str]:
    if not style.junk:
        return prompts
    out: list[str] = []
    for prompt in prompts:
        out.append(prompt)
        while rng.random() < style.junk and len(out) < style.width:
            beyond = pages + rng.randint(1, 3)
            out.append(rng.choice([prompt, _prompt(doc, beyond, beyond), _prompt(doc, rng.randint(1, pages), pages)]))
    return out
