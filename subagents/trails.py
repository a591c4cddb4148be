"""The scripted follower of trails: searches for each start, goes from link to link, and remembers in words.

What it knows it says, in a form that is short and easy to copy, so that whoever reads the conversation, or
what is left of it, can go on:

    d#31.b ⏎ search "#0.e"                  d's value is found; e begins
    e nearest airport | elevation ⏎ access  what is still to be read of e, the page that it opens included
    a#9.c ⏎ b N/A ⏎ c#31 elevation          a summary: the values found, then what it will open next and read there
    |a|#9.c| ⏎ |b|N/A| ⏎ |c|#31.b|          the answer, N/A for what it does not know

A value stands right behind its letter, as nothing else does on any page: a small model looks for just that.

It decides from the conversation's text alone and knows no more than that shows: what neither the summary nor a
visible turn says is lost to it. Not here: reading tables (`subagents.scripted`).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from subagents.scripted import ABSENT, newest
from swarm.seeds import derive
from swarm.transcript import Exchange, Policy, Transcript
from swarm.types import ToolCall, Turn

SEPARATOR = " | "
_SHAPE = re.compile(r"^Find all: (.+)$", re.MULTILINE)
_TRAIL = re.compile(r"^([a-z]): ", re.MULTILINE)
_FOUND = re.compile(r"^([a-z]) ?(#\d+\.[a-zA-Z]|N/A)$", re.MULTILINE)
_STANDS = re.compile(r"^([a-z])#(\d+) (.+)$", re.MULTILINE)
_START = re.compile(r"#0\.([a-z])")
_LABEL = re.compile(r"(?:\[Doc #(\d+)\]|#(\d+)\b)")
_LIST = re.compile(r" list, \d+ pages$")
_FIELD = re.compile(r"^([a-zA-Z]) ([^:]+): (.*)$", re.MULTILINE)
_FAILED = "tool_failure"


@dataclass(frozen=True, slots=True)
class SummaryStyle:
    """How well summaries are written: `SummaryStyle(drop=0.15)` forgets about one found value in seven.

    `drop`: how likely a found value is given as N/A; `muddle`: how likely it is left out what to open next.
    Both are drawn anew for each summary, so that a value is the likelier lost the earlier it was found.
    """

    drop: float = 0.0
    muddle: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("drop", self.drop), ("muddle", self.muddle)):
            if not 0 <= value <= 1:
                raise ValueError(f"summary: {name} = {value}, want 0 to 1")


@dataclass(frozen=True, slots=True)
class Position:
    """What is to be done next: open `#page`, or, where that is 0, search for the start; `rest` is still to be read."""

    letter: str
    page: int
    rest: tuple[str, ...]


@dataclass(slots=True)
class Memory:
    """What the conversation still says: values by letter, what to do next (None: all is done), and what is news."""

    letters: tuple[str, ...]
    path: tuple[str, ...]
    position: Position | None = None
    found: dict[str, str] = field(default_factory=dict[str, str])
    news: str = ""
    """The letter of the trail that the last result ended."""

    def start(self, letter: str) -> Position | None:
        """At the beginning of a trail; None for a letter that no trail has."""
        return Position(letter, 0, self.path) if letter in self.letters else None

    def after(self, letter: str) -> Position | None:
        """At the beginning of the trail after this one."""
        return self.start(next((x for x in self.letters if x > letter), ""))


def follow(style: SummaryStyle | None = None, seed: int = 0) -> Policy:
    """The policy; `style` says how it summarizes (None: faultlessly), `seed` decides which values it forgets."""
    style = style or SummaryStyle()

    def policy(transcript: Transcript) -> Turn:
        memory = recall(transcript)
        if transcript.last:
            return Turn(_answer(memory))
        if transcript.summarize:
            return Turn(_summary(memory, style, random.Random(derive(seed, transcript.user, transcript.left))))
        return _next(memory)

    return policy


def recall(transcript: Transcript) -> Memory:
    """Reads the summary, then the visible turns; these come later, or are the ones last summarized."""
    shape = _SHAPE.search(transcript.user)
    path = tuple(shape[1].split(SEPARATOR)) if shape else ()
    memory = Memory(tuple(_TRAIL.findall(transcript.user)), path)
    memory.position = memory.after("")
    memory.found.update(_FOUND.findall(transcript.summary))
    stands = _STANDS.search(transcript.summary)
    if stands:
        memory.position = Position(stands[1], int(stands[2]), tuple(stands[3].split(SEPARATOR)))
    elif memory.found:
        memory.position = memory.after(max(memory.found))
    for exchange in transcript.exchanges:
        _read(memory, exchange)
    return memory


def _read(memory: Memory, exchange: Exchange) -> None:
    memory.news = ""
    memory.found.update(_FOUND.findall(exchange.content.partition("\n")[0]))
    if not exchange.calls or not exchange.results:
        return
    call, result = exchange.calls[0], exchange.results[0]
    start = _START.fullmatch(str(call.arguments.get("query", "")))
    letter, _, rest = exchange.content.rpartition("\n")[2].partition(" ")
    if start:
        position = memory.start(start[1])
    else:
        page = _number(str(call.arguments.get("url", "")))
        position = Position(letter, page, tuple(rest.split(SEPARATOR))) if letter in memory.letters else None
    if position is not None:
        memory.position = position
        if not result.startswith(_FAILED):
            _follow(memory, position, result)


def _follow(memory: Memory, at: Position, result: str) -> None:
    """Takes the step that a result allows: on to the page found, or to the next trail."""
    if not at.page:
        to = _first_hit(result)
        rest = at.rest
    else:
        fields = {m[2]: (m[1], m[3], _number(m[3])) for m in _FIELD.finditer(result)}
        read = newest(fields, at.rest[0])
        to = read[2] if read else 0
        rest = at.rest[1:]
        if read and not rest:
            memory.found[at.letter] = f"#{at.page}.{read[0]}"
    if to and rest:
        memory.position = Position(at.letter, to, rest)
        return
    memory.found.setdefault(at.letter, ABSENT)
    memory.news = at.letter
    memory.position = memory.after(at.letter)


def _next(memory: Memory) -> Turn:
    at = memory.position
    if at is None:
        return Turn(_answer(memory))
    note = _said(memory.news, memory.found[memory.news]) if memory.news else ""
    if not at.page:
        return Turn(note, (ToolCall("search", {"query": f"#0.{at.letter}"}),))
    return Turn(f"{at.letter} {SEPARATOR.join(at.rest)}", (ToolCall("access", {"url": f"#{at.page}"}),))


def _answer(memory: Memory) -> str:
    return "\n".join(f"|{letter}|{memory.found.get(letter, ABSENT)}|" for letter in memory.letters)


def _summary(memory: Memory, style: SummaryStyle, rng: random.Random) -> str:
    kept = {x: ABSENT if rng.random() < style.drop else memory.found[x] for x in memory.letters if x in memory.found}
    lines = [_said(letter, value) for letter, value in kept.items()]
    at = memory.position
    if at and at.page and rng.random() >= style.muddle:
        lines.append(f"{at.letter}#{at.page} {SEPARATOR.join(at.rest)}")
    return "\n".join(lines)


def _said(letter: str, value: str) -> str:
    return f"{letter} {value}" if value == ABSENT else f"{letter}{value}"


def _first_hit(result: str) -> int:
    """The first document found that is no list; 0 if there is none."""
    return next((_number(line) for line in result.splitlines() if _LABEL.match(line) and not _LIST.search(line)), 0)


def _number(label: str) -> int:
    """The number of `#17` or `[Doc #17](…) …` at the beginning; 0 where there is no handle."""
    m = _LABEL.match(label)
    return int(m[1] or m[2]) if m else 0
