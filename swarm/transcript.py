"""A conversation as text, read back from what a model sees: for scripted policies.

A scripted policy is a function `Transcript -> Turn`. It sees the very text that a model
would see at its place, and nothing else, so it runs in the one loop, through the real tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarm.types import ToolCall, Turn

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_NOTE = re.compile(r"\[left (\d+)\](?: (answer now|summarize))?\Z")


@dataclass(frozen=True, slots=True)
class Exchange:
    """An assistant turn with its calls, and the results that came back, in call order."""

    content: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """What stands in the context. `exchanges` are those still visible, `summary` the text that replaced earlier ones.

    `left` is the remaining budget last shown; `last`: this turn must be the answer; `summarize`: the summary.
    """

    system: str
    user: str
    exchanges: tuple[Exchange, ...]
    left: int
    last: bool
    summary: str = ""
    summarize: bool = False


Policy = Callable[[Transcript], Turn]


def read(text: str) -> Transcript:
    """Parses the decoded ids of a whole prompt (the layout of `swarm.chat`)."""
    messages = [(m[1], m[2]) for m in _MESSAGE.finditer(text)]
    system, user = messages[0][1], messages[1][1]
    turns = [(said, heard) for (role, said), (_, heard) in pairwise(messages[2:]) if role == "assistant"]
    # Every turn of the loop has a result a call; only a summary is followed by a bare note.
    bare = bool(turns) and _NOTE.match(turns[0][1]) is not None
    summary = turns[0][0].strip() if bare else ""
    exchanges = tuple(_exchange(said, heard) for said, heard in turns[bare:])
    note = _NOTE.search(messages[-2][1] if len(messages) > 3 else user)
    left, ask = (int(note[1]), note[2]) if note else (0, None)
    return Transcript(system, user, exchanges, left, ask == "answer now", summary, ask == "summarize")


def _exchange(said: str, heard: str) -> Exchange:
    calls = tuple(_calls(_CALL.findall(said)))
    return Exchange(_CALL.sub("", said).strip(), calls, tuple(_RESPONSE.findall(heard)))


def _calls(bodies: Sequence[str]) -> list[ToolCall]:
    parsed = [json.loads(body) for body in bodies]
    return [ToolCall(p["name"], p["arguments"]) for p in parsed]
