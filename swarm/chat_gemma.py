"""The layout of Gemma 3, whose turns have markers and whose tools have none.

    <bos><start_of_turn>user ⏎ system, tools ⏎⏎ … <end_of_turn> ⏎ <start_of_turn>model ⏎
    (sampled)  words ⏎ <tool_call> ⏎ {"name": "access", "arguments": {"url": "#17"}} ⏎ </tool_call> <end_of_turn>
    ⏎ <start_of_turn>user ⏎ <tool_response> ⏎ … ⏎ </tool_response> ⏎ [left 12] <end_of_turn> ⏎ <start_of_turn>model ⏎

What Gemma's published template renders, where the system's words and the tools stand before the first message, and
results and note are one user message. Like there, messages lose outer white space. Calls and results are in the
words of Hermes, spelled in letters. Gemma 2 has the same turns. Not here: ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.chat_json import calls_block, read_json_call, tools_block
from swarm.chat_layout import CALL, RESPONSE, THOUGHT, Fixed, Layout, Parts
from swarm.types import ToolCall, ToolSpec

BEGIN, START, END = "<bos>", "<start_of_turn>", "<end_of_turn>"
_OPEN, _CLOSE, _NEXT = Fixed(f"{RESPONSE[0]}\n"), Fixed(f"\n{RESPONSE[1]}"), Fixed("\n")
_USER = Fixed(f"\n{START}user\n")
_GAP = Fixed("\n\n")
_MODEL = Fixed(f"{END}\n{START}model\n")


def _opening(system: str, tools: Sequence[ToolSpec], user: str) -> Parts:
    shown = (*((_GAP,) if system else ()), *tools_block(tools)) if tools else ()
    before = (system, *shown, _GAP) if system or tools else ()
    return (Fixed(f"{BEGIN}{START}user\n"), *before, user.strip(), _MODEL)


def _spoken(content: str, calls: Sequence[ToolCall]) -> Parts:
    content = content.strip()
    return (content, Fixed("\n" if content and calls else ""), *calls_block(calls))


def _observed(results: Sequence[str], note: str) -> Parts:
    note = note.strip()
    parts: list[str] = [_USER]
    for text in results:
        parts += (_OPEN, text, _CLOSE, _NEXT)
    return (*(parts if note or not results else parts[:-1]), note, _MODEL)


GEMMA3 = Layout(
    name="Gemma 3",
    needs=(BEGIN, START, END),
    end=END,
    markers=(*CALL, *RESPONSE, *THOUGHT),
    response=RESPONSE,
    opening=_opening,
    spoken=_spoken,
    observed=_observed,
    read=read_json_call,
)
