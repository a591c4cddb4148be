"""The layout of Qwen3-Coder: ChatML turns, and calls in tags, their arguments as bare text.

    <tool_call> ⏎ <function=access> ⏎ <parameter=url> ⏎ #17 ⏎ </parameter> ⏎ </function> ⏎ </tool_call>

Bare text has no type: the tool's JSON schema gives it one when a call is read. A text that fits several types is the
first of null, integer, number, boolean, object, array and string; one for which the schema names no type is a string.
Of a parameter that is given twice the last counts. Not here: ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast

from swarm.chat_hermes import END, START, chatml_note
from swarm.chat_json import called, parsed
from swarm.chat_layout import CALL, RESPONSE, THOUGHT, Fixed, Layout, Parts
from swarm.types import ToolCall, ToolSpec

_NOBODY = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
_ASSISTANT = Fixed(f"{END}\n{START}assistant\n")
_OPEN, _CLOSE = Fixed(f"{RESPONSE[0]}\n"), Fixed(f"\n{RESPONSE[1]}\n")
_HEARD, _HEARD_END = Fixed(f"\n{START}user\n"), Fixed(END)
_TOOLS = Fixed("\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>")
_HOW = Fixed("""
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>""")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_CUT = 20
_UNKNOWN: Mapping[str, Any] = {}


def _opening(system: str, tools: Sequence[ToolSpec], user: str) -> Parts:
    asked = (Fixed(f"{START}user\n"), user, _ASSISTANT)
    if not system and not tools:
        return asked
    shown = (_TOOLS, "".join(_shown(tool) for tool in tools), _HOW) if tools else ()
    return (Fixed(f"{START}system\n"), system or Fixed(_NOBODY), *shown, Fixed(f"{END}\n"), *asked)


def _spoken(content: str, calls: Sequence[ToolCall]) -> Parts:
    """Raises ValueError for a call that holds its own tags: nothing in this form can say it."""
    if not calls:
        return (content,)
    content = content.strip()
    parts: list[str] = [content, Fixed("\n\n" if content else "")]
    for call in calls:
        parts += [Fixed(f"{CALL[0]}\n"), _body(call), Fixed(f"\n{CALL[1]}"), Fixed("\n")]
    return parts[:-1]


def _observed(results: Sequence[str], note: str) -> Parts:
    parts: list[str] = []
    for text in results:
        parts += (_OPEN, text, _CLOSE)
    heard = (_HEARD, *parts, _HEARD_END) if parts else ()
    return (*heard, *chatml_note(note, bool(results)))


def _shown(tool: ToolSpec) -> str:
    fields = _properties(tool.parameters).items()
    inner = "".join(f"\n<parameter>\n<name>{name}</name>{_field(field)}\n</parameter>" for name, field in fields)
    return (
        f"\n<function>\n<name>{tool.name}</name>\n<description>{tool.description.strip()}</description>"
        f"\n<parameters>{inner}{_others(tool.parameters, ('type', 'properties'))}\n</parameters>\n</function>"
    )


def _field(field: object) -> str:
    if not isinstance(field, Mapping):
        return ""
    known = cast(Mapping[str, Any], field)
    kind = f"\n<type>{known['type']}</type>" if "type" in known else ""
    words = f"\n<description>{known['description'].strip()}</description>" if "description" in known else ""
    return kind + words + _others(known, ("name", "type", "description"))


def _others(fields: Mapping[str, object], handled: Container[str]) -> str:
    return "".join(f"\n<{key}>{_text(value)}</{key}>" for key, value in fields.items() if key not in handled)


def _text(value: object) -> str:
    """A value as the published template writes it: mappings and sequences as JSON, the rest as Python prints it."""
    nested = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
    return json.dumps(value, ensure_ascii=False) if nested else str(cast(object, value))


def _body(call: ToolCall) -> str:
    texts = {key: _text(value) for key, value in call.arguments.items()}
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    body = f"<function={call.name}>\n{inner}</function>"
    if _raw(body) != (call.name, texts) or any(marker in body for marker in CALL):
        raise ValueError(f"call of {call.name[:_CUT]!r} holds a tag of its own form, want names and values without")
    return body


def _raw(body: str) -> tuple[str, dict[str, str]] | str:
    """A call's name and the texts of its parameters, or in a few words why it is none."""
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return "no <function=…> … </function>"
    name, inner = function.groups()
    texts: dict[str, str] = {}
    at = 0
    while parameter := _PARAMETER.match(inner, at):
        texts[parameter[1]] = parameter[2]
        at = parameter.end()
    if inner[at:].strip():
        return "no <parameter=…> … </parameter>"
    return (name, texts) if name else "no name"


def _read(body: str, tools: Sequence[ToolSpec]) -> ToolCall | str:
    found = _raw(body)
    if isinstance(found, str):
        return found
    name, texts = found
    schemas = _properties(next((tool.parameters for tool in tools if tool.name == name), _UNKNOWN))
    arguments: dict[str, object] = {}
    for key, text in texts.items():
        kinds = _kinds(schemas.get(key))
        try:
            arguments[key] = _typed(text, kinds)
        except ValueError:
            return f"{key[:_CUT]} = {text[:_CUT]!r}, want {' or '.join(kinds)}"
    return called(name, arguments)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties: object = schema.get("properties")
    return cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else {}


def _kinds(schema: object) -> list[str]:
    """The types that a JSON schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return []
    fields = cast(Mapping[str, Any], schema)
    named = fields.get("type", [])
    kinds: list[str] = [named] if isinstance(named, str) else list(named)
    for choice in (*fields.get("anyOf", ()), *fields.get("oneOf", ())):
        kinds += _kinds(choice)
    return [kind for kind in (*_TYPED, "string") if kind in kinds]


def _typed(text: str, kinds: Sequence[str]) -> object:
    """Raises ValueError if the text is of none of these types."""
    for kind in kinds:
        if kind == "string":
            return text
        try:
            return _TYPED[kind](text.strip())
        except ValueError:
            continue
    if kinds:
        raise ValueError
    return text


def _word(words: Mapping[str, object]) -> Callable[[str], object]:
    """JSON's words, and Python's, which the published template writes."""

    def read(text: str) -> object:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    return read


def _json(*kinds: type) -> Callable[[str], object]:
    def read(text: str) -> object:
        value = parsed(text)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError
        return value

    return read


_TYPED: Mapping[str, Callable[[str], object]] = {
    "null": _word({"null": None, "none": None}),
    "integer": _json(int),
    "number": _json(int, float),
    "boolean": _word({"true": True, "false": False}),
    "object": _json(dict),
    "array": _json(list),
}

QWEN3_CODER = Layout(
    name="Qwen3-Coder",
    needs=(START, END),
    end=END,
    markers=(*CALL, *RESPONSE, *THOUGHT),
    response=RESPONSE,
    opening=_opening,
    spoken=_spoken,
    observed=_observed,
    read=_read,
)
