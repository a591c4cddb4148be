"""A conversation as somebody else's agent tells it: a list of messages, checked, and laid out in rounds.

    system, user │ assistant │ results, user │ assistant │ results, user │ …
    Talk         │ Round                     │ Round

Results stand in the order of their calls, however they came; messages of one role in a row are one, a blank line
between. What no layout can say is refused here. Not here: ids, and who said what (`swarm.dialogue`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

from msgspec import Struct

from swarm.types import ToolCall, ToolSpec

Role = Literal["system", "user", "assistant", "tool"]
_GAP = "\n\n"


class DialogueError(ValueError):
    """A request that cannot be answered as it is asked: which message, what is there, and what is wanted."""


class Said(Struct, frozen=True):
    """One message: `Said("assistant", "", (ToolCall("search", {"query": "#0"}),), ("c1",))`.

    `ids`: of an assistant's message the name of each call, of a tool's the one name of the call that it answers.
    """

    role: Role
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = ()


class Round(Struct, frozen=True):
    """What the assistant said, and what came back: the results in the order of its calls, and the user's words."""

    said: Said
    results: tuple[str, ...] = ()
    user: str = ""


class Talk(Struct, frozen=True):
    """A whole conversation, up to where the assistant speaks next."""

    system: str
    user: str
    rounds: tuple[Round, ...]

    def keys(self, tools: Sequence[ToolSpec]) -> tuple[bytes, ...]:
        """Digests of all that was said: up to the first turn, then up to the turn after each round.

        Equal for conversations that are equal part by part, whatever their calls are named.
        """
        shown = [[t.name, t.description, t.parameters] for t in tools]
        first = digest(b"", shown, self.system, self.user)
        return tuple(accumulate(self.rounds, lambda key, r: heard_key(said_key(key, r.said), r), initial=first))


def said_key(before: bytes, said: Said) -> bytes:
    """The key of a conversation with one more assistant message, to which nothing has come back."""
    return digest(before, said.content, [[c.name, c.arguments] for c in said.calls])


def heard_key(before: bytes, heard: Round) -> bytes:
    """The key with what came back."""
    return digest(before, heard.results, heard.user)


def digest(before: bytes, *parts: Any) -> bytes:
    """16 bytes that stand for the parts, JSON values, after what `before` stands for."""
    return blake2b(before + json.dumps(parts, sort_keys=True, default=dict).encode(), digest_size=16).digest()


def talk_of(messages: Sequence[Said]) -> Talk:
    """The conversation that the messages tell. Raises DialogueError for what cannot be said."""
    for k, message in enumerate(messages):
        _check(k, message)
    turns = [k for k, m in enumerate(messages) if m.role == "assistant"]
    opening = messages[: turns[0]] if turns else messages
    if turns and turns[-1] == len(messages) - 1:
        raise DialogueError(f"message {turns[-1]}: the assistant's own is the last, want one of a user or a tool")
    system, user = _opened(opening)
    ends = [*turns, len(messages)][1:]
    return Talk(system, user, tuple(_round(messages, a, b) for a, b in zip(turns, ends, strict=True)))


def _check(k: int, message: Said) -> None:
    names = len(message.calls) if message.role == "assistant" else int(message.role == "tool")
    if len(message.ids) != names or len(set(message.ids)) != names:
        raise DialogueError(f"message {k}: calls named {list(message.ids)}, want {names} names, each once")
    if message.calls and message.role != "assistant":
        raise DialogueError(f"message {k}: a call by the {message.role}, want calls by the assistant only")
    try:
        words = [message.content, message.ids, *((c.name, c.arguments) for c in message.calls)]
        json.dumps(words, default=dict, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DialogueError(f"message {k}: half of a surrogate pair, want text") from None


def _opened(messages: Sequence[Said]) -> tuple[str, str]:
    """The system's and the user's words."""
    first = next((k for k, m in enumerate(messages) if m.role != "system"), len(messages))
    for k, message in enumerate(messages[first:], first):
        _want_user(k, message)
    if first == len(messages):
        raise DialogueError(f"{first} messages before the assistant speaks, none by a user: want one")
    return _GAP.join(m.content for m in messages[:first]), _GAP.join(m.content for m in messages[first:])


def _round(messages: Sequence[Said], at: int, end: int) -> Round:
    said = messages[at]
    results: dict[str, str] = {}
    after = next((k for k in range(at + 1, end) if messages[k].role != "tool"), end)
    for k in range(at + 1, after):
        name = messages[k].ids[0]
        if name not in said.ids or name in results:
            raise DialogueError(f"message {k}: a result of call {name!r}, want one a call of message {at}")
        results[name] = messages[k].content
    missing = [name for name in said.ids if name not in results]
    if missing:
        raise DialogueError(f"message {at}: no result of call {missing[0]!r}, want one right after it")
    for k in range(after, end):
        _want_user(k, messages[k])
    return Round(said, tuple(results[name] for name in said.ids), _GAP.join(m.content for m in messages[after:end]))


def _want_user(k: int, message: Said) -> None:
    if message.role == "tool":
        raise DialogueError(f"message {k}: a result of call {message.ids[0]!r}, want it right after its call")
    if message.role != "user":
        raise DialogueError(f"message {k}: the {message.role} speaks, want the system at the beginning only")
