"""The scripted reader: searches, pages through a list, opens each entry, writes its row.

It is the serial reference policy, the scripted subagent of the tests, and, recorded, the
demonstration that the embedded model's reading skill is learned from. It decides from the
conversation's text alone. Not here: splitting work between agents (`orchestrator.scripted`).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from swarm.seeds import derive
from swarm.transcript import Policy, Transcript
from swarm.types import ToolCall, Turn

_COLUMNS = re.compile(r"Columns: (.+)")
_PAGES = re.compile(r"#(\d+) p(\d+)(?:-(\d+))?")
_HIT = re.compile(r"^\[Doc #(\d+)\]\(\S+\) (.*?)(?: list, (\d+) pages?)?$")
_LABEL = r"^(?:\[Doc #(?P<new>\d+)\]\(\S+\) .*?|#(?P<known>\d+))"
_LIST = re.compile(_LABEL + r" page (?P<page>\d+) of (?P<pages>\d+)$")
_DOC = re.compile(_LABEL + "$")
_FIELD = re.compile(r"^([a-zA-Z]) ([^:]+): (.*)$")
_REVISION = re.compile(r"^(.*) \((\d{4})\)$")
ABSENT = "N/A"
NO_PAGE = "no such page"
_AT_END = 5
"""How many times more often the slipping reader slips where a page of the list ends."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result: `pages` is 0 unless it is a list."""

    number: int
    title: str
    pages: int


@dataclass(slots=True)
class Notes:
    """What the reader has seen: fields by document number, the entries still to open."""

    fields: dict[int, dict[str, tuple[str, str, int]]] = field(default_factory=dict)
    entries: list[int] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    list_doc: int = 0
    page: int = 0
    pages: int = 0


def columns(text: str) -> list[str]:
    """The wanted columns, as the question states them."""
    m = _COLUMNS.search(text)
    return [c.strip() for c in m[1].split("|")] if m else []


def hits(result: str) -> list[Hit]:
    """The documents of a search result, in order."""
    found = (_HIT.match(line) for line in result.splitlines())
    return [Hit(int(m[1]), m[2], int(m[3] or 0)) for m in found if m]


def take_notes(transcript: Transcript) -> Notes:
    """Reads all results so far."""
    notes = Notes()
    for exchange in transcript.exchanges:
        for call, result in zip(exchange.calls, exchange.results, strict=False):
            if call.name == "search":
                notes.hits = hits(result)
            elif call.name == "access":
                _read_page(notes, result)
    return notes


def _read_page(notes: Notes, result: str) -> None:
    lines = result.splitlines()
    listed = _LIST.match(lines[0]) if lines else None
    if listed:
        notes.list_doc, notes.page, notes.pages = _number(listed), int(listed["page"]), int(listed["pages"])
        notes.entries += [_number(m) for line in lines[1:] if (m := _DOC.match(line))]
        return
    doc = _DOC.match(lines[0]) if lines else None
    if doc:
        fields = (m for line in lines[1:] if (m := _FIELD.match(line)))
        notes.fields[_number(doc)] = {m[2]: (m[1], m[3], _linked(m[3])) for m in fields}


def _number(label: re.Match[str]) -> int:
    return int(label["new"] or label["known"])


def _linked(value: str) -> int:
    m = _DOC.match(value)
    return _number(m) if m else 0


def newest(fields: dict[str, tuple[str, str, int]], name: str) -> tuple[str, str, int] | None:
    """The field of a name, by the stated rule: of several revisions the latest wins."""
    dated = [(m[2], f) for key, f in fields.items() if (m := _REVISION.match(key)) and m[1] == name]
    return max(dated)[1] if dated else fields.get(name)


def row(notes: Notes, entry: int, wanted: list[str]) -> tuple[str, int]:
    """The row of an entry in handles, and the next document that must be opened for it (0: none)."""
    cells, missing = [f"#{entry}"], 0
    for column in wanted[1:]:
        name, _, via = column.partition(" of ")
        doc = entry
        if via:
            link = newest(notes.fields.get(entry, {}), via)
            doc = link[2] if link else -1
        if doc > 0 and doc not in notes.fields and not missing:
            missing = doc
        found = newest(notes.fields.get(doc, {}), name)
        cells.append(f"#{doc}.{found[0]}" if found else ABSENT)
    return "| " + " | ".join(cells) + " |", missing


def read_table(transcript: Transcript) -> Turn:
    """The policy: the next turn of a reader, asked by a task's query or by an assignment."""
    notes = take_notes(transcript)
    wanted = columns(transcript.user)
    spans = [(int(a), int(b), int(c or b)) for a, b, c in _PAGES.findall(transcript.user.splitlines()[0])]
    target, first, end = spans[0] if spans else (0, 1, 0)
    if not target and not notes.hits and not notes.page:
        return _call("search", query="#0") if not transcript.last else Turn("#rows")
    written, pending = _progress(transcript, notes, wanted)
    if _beyond_the_list(transcript):
        return Turn(_joined(written, "#rows"))
    if transcript.last:
        return Turn(_joined(written, row(notes, pending, wanted)[0] if pending in notes.fields else "", "#rows"))
    if pending:
        _, missing = row(notes, pending, wanted)
        return _call("access", written, url=f"#{pending if pending not in notes.fields else missing}")
    end = end or notes.pages
    if not notes.page:
        return _open_list(target or best_list(notes.hits, transcript.user), first)
    if notes.page < min(end, notes.pages):
        return _call("access", written, url=f"#{notes.list_doc}", page=notes.page + 1)
    return Turn(_joined(written, "#rows"))


def _beyond_the_list(transcript: Transcript) -> bool:
    """Whether the page just asked for does not exist: there is nothing more to read."""
    results = transcript.exchanges[-1].results if transcript.exchanges else ()
    return any(r.startswith("page ") for r in results)


def slipping(rate: float, seed: int) -> Policy:
    """The reader, but now and then, most often where a page of the list ends, it opens what is not there.

    What it does next shows how one recovers. The slips themselves are not for imitation: their
    answer begins with `NO_PAGE`.
    """

    def policy(transcript: Transcript) -> Turn:
        turn, notes = read_table(transcript), take_notes(transcript)
        if transcript.last or not notes.page or not turn.calls:
            return turn
        rng = random.Random(derive(seed, transcript.user, len(transcript.exchanges)))
        at_end = "page" in turn.calls[0].arguments
        if rng.random() >= rate * (_AT_END if at_end else 1):
            return turn
        links = [f[2] for fields in notes.fields.values() for f in fields.values()]
        return _call("access", turn.content, url=f"#{max([*notes.entries, *links]) + 1}")

    return policy


def keys_only(transcript: Transcript) -> Turn:
    """A floor: reads the list and writes its keys, every other cell absent."""
    notes, wanted = take_notes(transcript), columns(transcript.user)
    if notes.page and (transcript.last or notes.page == notes.pages):
        rows = [" | ".join([f"| #{k}", *[ABSENT] * (len(wanted) - 1)]) + " |" for k in notes.entries]
        return Turn(_joined(*rows, "#rows"))
    if notes.page:
        return _call("access", url=f"#{notes.list_doc}", page=notes.page + 1)
    return read_table(transcript)


def _open_list(doc: int, page: int) -> Turn:
    return _call("access", url=f"#{doc}", page=page) if page > 1 else _call("access", url=f"#{doc}")


def _progress(transcript: Transcript, notes: Notes, wanted: list[str]) -> tuple[str, int]:
    """The row that can be written now (just completed), and the entry that is being worked on."""
    done = {int(n) for e in transcript.exchanges for n in re.findall(r"^\| #(\d+)", e.content, re.MULTILINE)}
    text = ""
    for entry in notes.entries:
        if entry in done:
            continue
        if entry not in notes.fields:
            return text, entry
        line, missing = row(notes, entry, wanted)
        if missing:
            return text, entry
        text = _joined(text, line)
    return text, 0


def best_list(found: list[Hit], question: str) -> int:
    """The list that the question names; else the first list; else the first hit."""
    lists = [h for h in found if h.pages]
    exact = [h for h in lists if h.title.casefold() in question.casefold()]
    best = max(exact, key=lambda h: len(h.title), default=None)
    chosen = best or (lists[0] if lists else (found[0] if found else None))
    return chosen.number if chosen else 0


def _joined(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _call(name: str, content: str = "", **arguments: str | int) -> Turn:
    return Turn(content, (ToolCall(name, arguments),))
