"""The layouts with ChatML turns and calls as JSON: Qwen3's, and the short one of models that know their tools.

    <|im_start|>system ⏎ … <|im_end|> ⏎ <|im_start|>user ⏎ … <|im_end|> ⏎ <|im_start|>assistant ⏎
    (sampled)  words ⏎ <tool_call> ⏎ {"name": "access", "arguments": {"url": "#17"}} ⏎ </tool_call> <|im_end|>

    QWEN3  ⏎ <|im_start|>user ⏎ <tool_response> ⏎ … ⏎ </tool_response> ⏎ <tool_response> ⏎ … ⏎ </tool_response>
           <|im_end|> ⏎ <|im_start|>user ⏎ [left 12] <|im_end|> ⏎ <|im_start|>assistant ⏎
    TERSE  ⏎ <|im_start|>user ⏎ <tool_response> ⏎ … ⏎ </tool_response> ⏎ [left 12] <|im_end|> ⏎ <|im_start|>assistant ⏎

QWEN3 is what Qwen3's published template renders, the results of a turn as its tool messages and the note as a
user message of its own. Where that template forgets an earlier thought, the layout keeps it: it never goes back.
Not here: ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.chat_json import call_body, calls_block, escaped, read_json_call, tools_block
from swarm.chat_layout import CALL, RESPONSE, THOUGHT, Fixed, Layout, Parts
from swarm.types import ToolCall, ToolSpec

START, END = "<|im_start|>", "<|im_end|>"
_SYSTEM = Fixed(f"{START}system\n")
_END_USER = Fixed(f"{END}\n{START}user\n")
_USER = Fixed(f"\n{START}user\n")
_ASSISTANT = Fixed(f"{END}\n{START}assistant\n")
_OPEN, _CLOSE = Fixed(f"\n{RESPONSE[0]}\n"), Fixed(f"\n{RESPONSE[1]}")
_TERSE_OPEN, _TERSE_CLOSE = Fixed(f"{RESPONSE[0]}\n"), Fixed(f"\n{RESPONSE[1]}\n")
_HEARD, _HEARD_END = Fixed(f"\n{START}user"), Fixed(END)
_ASSISTANT_AFTER = Fixed(f"\n{START}assistant\n")


def chatml_note(note: str, heard: bool) -> Parts:
    """The note as a user turn of its own, and the opening of the policy's; without a note only if nothing was heard."""
    return (_USER, note, _ASSISTANT) if note or not heard else (_ASSISTANT_AFTER,)


def _opening(system: str, tools: Sequence[ToolSpec], user: str) -> Parts:
    if not system and not tools:
        return (Fixed(f"{START}user\n"), user, _ASSISTANT)
    gap = Fixed("\n\n" if system and tools else "")
    shown = tools_block(tools) if tools else ()
    return (_SYSTEM, system, gap, *shown, _END_USER, user, _ASSISTANT)


def _spoken(content: str, calls: Sequence[ToolCall]) -> Parts:
    return (content, Fixed("\n" if content and calls else ""), *calls_block(calls))


def _observed(results: Sequence[str], note: str) -> Parts:
    parts: list[str] = []
    for text in results:
        parts += (_OPEN, text, _CLOSE)
    heard = (_HEARD, *parts, _HEARD_END) if parts else ()
    return (*heard, *chatml_note(note, bool(results)))


def _terse_opening(system: str, tools: Sequence[ToolSpec], user: str) -> Parts:
    names = "tools: " + " ".join(t.name for t in tools) if tools else ""
    return (_SYSTEM, system, Fixed("\n" if system and tools else ""), names, _END_USER, user, _ASSISTANT)


def _terse_spoken(content: str, calls: Sequence[ToolCall]) -> Parts:
    """A call is the template's own as a whole: tokens of such a model hold parts of calls."""
    gap = "\n" if content and calls and not content.endswith("\n") else ""
    return (content + gap, Fixed("\n".join(f"{CALL[0]}\n{escaped(call_body(call))}\n{CALL[1]}" for call in calls)))


def _terse_observed(results: Sequence[str], note: str) -> Parts:
    parts: list[str] = [_USER]
    for text in results:
        parts += (_TERSE_OPEN, text, _TERSE_CLOSE)
    return (*parts, note, _ASSISTANT)


QWEN3 = Layout(
    name="Qwen3",
    needs=(START, END),
    end=END,
    markers=(*CALL, *RESPONSE, *THOUGHT),
    response=RESPONSE,
    opening=_opening,
    spoken=_spoken,
    observed=_observed,
    read=read_json_call,
)
TERSE = Layout(
    name="the embedded model",
    needs=(_SYSTEM, END),
    end=END,
    markers=(),
    response=(_TERSE_OPEN, _TERSE_CLOSE),
    opening=_terse_opening,
    spoken=_terse_spoken,
    observed=_terse_observed,
    read=read_json_call,
)
