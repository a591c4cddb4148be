"""Which family a tokenizer speaks for: the one whose layout is what its own chat template renders.

A short conversation (a prompt with a tool, a turn with two calls, their results and a note) is rendered by the
template of the checkpoint, and laid out by each family whose markers the tokenizer has; the first that agrees to the
letter is it. A checkpoint without a template, as base models are, is told by its markers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from swarm.chat_gemma import GEMMA3
from swarm.chat_hermes import QWEN3, TERSE
from swarm.chat_json import signature
from swarm.chat_layout import Fixed, Layout, Parts
from swarm.chat_xml import QWEN3_CODER
from swarm.types import ToolCall, ToolSpec

_SYSTEM, _USER, _WORDS, _NOTE = "Work.", "Ask.", "Look.", "[left 2]"
_RESULTS = ("one", "two")
_TOOL = ToolSpec("see", "Sees.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})
_CALLS = (ToolCall("see", {"at": "1"}), ToolCall("see", {"at": "2"}))
_NATIVE: Sequence[Mapping[str, Any]] = (
    {"role": "system", "content": _SYSTEM},
    {"role": "user", "content": _USER},
    {
        "role": "assistant",
        "content": _WORDS,
        "tool_calls": [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in _CALLS],
    },
    *({"role": "tool", "content": text} for text in _RESULTS),
    {"role": "user", "content": _NOTE},
)


@dataclass(frozen=True, slots=True)
class Family:
    """A layout, and the conversation as its template takes it, `tools` beside the messages if that knows tools."""

    layout: Layout
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = (signature(_TOOL),)


def _words_between(parts: Parts, layout: Layout) -> str:
    """A message's words, without the markers of turns around them and the roles that they name."""
    return "".join(p for p in parts if not (isinstance(p, Fixed) and any(marker in p for marker in layout.needs)))


FAMILIES = (
    Family(TERSE, _NATIVE),
    Family(QWEN3, _NATIVE),
    Family(QWEN3_CODER, _NATIVE),
    Family(
        GEMMA3,
        (
            {"role": "user", "content": _words_between(GEMMA3.opening(_SYSTEM, (_TOOL,), _USER), GEMMA3)},
            {"role": "assistant", "content": "".join(GEMMA3.spoken(_WORDS, _CALLS))},
            {"role": "user", "content": _words_between(GEMMA3.observed(_RESULTS, _NOTE), GEMMA3)},
        ),
        tools=None,
    ),
)


def layout_of(tokenizer: PreTrainedTokenizerFast) -> Layout:
    """Raises ValueError if no family has the tokenizer's markers, or none renders what its chat template does."""
    token = tokenizer.backend_tokenizer.token_to_id
    able = [f for f in FAMILIES if all(token(marker) is not None for marker in f.layout.needs)]
    if not able:
        wanted = "; ".join(f"{' '.join(f.layout.needs)} ({f.layout.name})" for f in FAMILIES[1:])
        raise ValueError(f"tokenizer: no turn markers of a known family, want {wanted}")
    if not cast(Any, tokenizer).chat_template:
        return able[0].layout
    for family in able:
        if _rendered(tokenizer, family) == _laid_out(family.layout):
            return family.layout
    names = ", ".join(f.layout.name for f in able)
    raise ValueError(f"tokenizer: a chat template that renders unlike {names}, want one of these or Chat(tokenizer, …)")


def _rendered(tokenizer: PreTrainedTokenizerFast, family: Family) -> str:
    """What the checkpoint's template makes of the conversation; nothing where it refuses it."""
    try:
        text = cast(Any, tokenizer).apply_chat_template(
            [dict(m) for m in family.messages], tools=family.tools, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError):
        return ""
    return str(text)


def _laid_out(layout: Layout) -> str:
    opening, heard = layout.opening(_SYSTEM, (_TOOL,), _USER), layout.observed(_RESULTS, _NOTE)
    return "".join((*opening, *layout.spoken(_WORDS, _CALLS), layout.end, *heard))
