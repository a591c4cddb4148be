"""Tools and their calls as JSON, in the words of Hermes: what Qwen3 was taught, and what a model without call
markers of its own is told.

    <tool_call> ⏎ {"name": "access", "arguments": {"url": "#17"}} ⏎ </tool_call>

Of a key that is given twice the last counts. Not here: turns and their markers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, cast

from swarm.chat_layout import CALL, Fixed, Parts
from swarm.types import ToolCall, ToolSpec

_DEEPEST = 8
_TOOLS = Fixed("""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
""")
_HOW = Fixed("""
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""")


def tools_block(tools: Sequence[ToolSpec]) -> Parts:
    """The signatures, one a line, and how to call them."""
    return (_TOOLS, "\n".join(json.dumps(signature(tool), ensure_ascii=False) for tool in tools), _HOW)


def signature(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the form in which chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def calls_block(calls: Sequence[ToolCall]) -> Parts:
    """The calls, one below another; an argument that spells out a marker of a call has its `<` escaped."""
    parts: list[str] = []
    for call in calls:
        body = call_body(call)
        for marker in CALL:
            body = body.replace(marker, escaped(marker))
        parts += [Fixed("\n" if parts else ""), Fixed(f"{CALL[0]}\n"), body, Fixed(f"\n{CALL[1]}")]
    return parts


def call_body(call: ToolCall) -> str:
    """What stands between the markers of a call."""
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def escaped(body: str) -> str:
    """The same JSON without `<`, so that no argument spells out a marker."""
    return body.replace("<", "\\u003c")


def read_json_call(body: str, tools: Sequence[ToolSpec] = ()) -> ToolCall | str:
    """A `Reader`. JSON says itself of what type a value is: the tools' schemas are not asked."""
    try:
        value = parsed(body)
    except ValueError:
        return "not JSON"
    if not isinstance(value, Mapping):
        return "not a JSON object"
    fields = cast(Mapping[str, object], value)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not name:
        return "no name"
    if not isinstance(arguments, Mapping):
        return "no arguments"
    return called(name, cast(Mapping[str, object], arguments))


def called(name: str, arguments: Mapping[str, object]) -> ToolCall | str:
    """The call, unless its arguments are nested too deep to be walked safely."""
    return "arguments nested too deep" if _deeper(arguments, _DEEPEST) else ToolCall(name, arguments)


def parsed(text: str) -> object:
    """The value that the JSON text stands for. Raises ValueError for what is no JSON, or no text if decoded."""
    try:
        value: object = _READER.decode(text)
        if "\\u" in text:  # an escaped lone surrogate is no text: nothing later could encode it
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    """`1e999` is JSON, but nothing to count with."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


_READER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _deeper(value: object, levels: int) -> bool:
    children: Iterable[object] = ()
    if isinstance(value, Mapping):
        children = cast(Mapping[str, object], value).values()
    elif isinstance(value, list):
        children = cast(list[object], value)
    return levels < 0 or any(_deeper(child, levels - 1) for child in children)
