"""What a family of chat models makes of a conversation: a layout of fixed words and foreign text, side by side.

    opening   system, tools, user                    one whole first prompt
    spoken    words ⏎ <tool_call> … </tool_call>     what a policy says, without its end-of-turn marker
    observed  results, note                          what follows a closed turn, up to where the policy speaks again

A layout never sees an earlier turn, so that nothing can be laid out anew: a conversation only grows.
Not here: ids, and the layouts of the families (`swarm.chat_hermes`, `swarm.chat_xml`, `swarm.chat_gemma`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.types import ToolCall, ToolSpec, Turn

CALL = ("<tool_call>", "</tool_call>")
RESPONSE = ("<tool_response>", "</tool_response>")
THOUGHT = ("<think>", "</think>")


class Fixed(str):
    """Words of the template itself, in which a marker is a marker: `Fixed("<|im_end|>")`.

    Any other str is foreign, only letters, and so is whatever is joined or cut out of a Fixed.
    """

    __slots__ = ()


Parts = Sequence[str]
"""Text in reading order. Letters that touch are encoded together, across the parts."""

Reader = Callable[[str, Sequence[ToolSpec]], ToolCall | str]
"""What stands between the markers of a call, and the tools → the call, or in a few words why it is none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One family's layout: `QWEN3.observed(["no such page"], "[left 3]")`.

    `needs`: the markers that a tokenizer must have as tokens, `end` (of a turn) among them; `markers`: those that
    count wherever it has them. `response`: what encloses a result.
    """

    name: str
    needs: tuple[str, ...]
    end: str
    markers: tuple[str, ...]
    response: tuple[str, str]
    opening: Callable[[str, Sequence[ToolSpec], str], Parts]
    spoken: Callable[[str, Sequence[ToolCall]], Parts]
    observed: Callable[[Sequence[str], str], Parts]
    read: Reader


def read_turn(text: str, read: Reader, tools: Sequence[ToolSpec] = ()) -> Turn:
    """Reads what a policy said, without its end-of-turn marker; never raises.

    A thought at its beginning is no content and calls nothing. What does not parse becomes a reason in `malformed`.
    """
    if text.lstrip().startswith(THOUGHT[0]):
        _, closed, text = text.partition(THOUGHT[1])
        if not closed:
            return Turn("", (), (f"unclosed {THOUGHT[0]}",))
    content, *chunks = text.split(CALL[0])
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for chunk in chunks:
        body, closed, after = chunk.partition(CALL[1])
        found = read(body, tools) if closed else f"unclosed {CALL[0]}"
        calls += [found] if isinstance(found, ToolCall) else []
        malformed += [found] if isinstance(found, str) else []
        content += after
    return Turn(content.strip(), tuple(calls), tuple(malformed))
