"""Conversations as token ids, in the Qwen/Hermes style: renders prompts and observations, reads turns back.

    <|im_start|>system ⏎ … <|im_end|> ⏎ <|im_start|>user ⏎ … <|im_end|> ⏎ <|im_start|>assistant ⏎
    (sampled)  words ⏎ <tool_call> ⏎ {"name": "access", "arguments": {"url": "#17"}} ⏎ </tool_call> <|im_end|>
    ⏎ <|im_start|>user ⏎ <tool_response> ⏎ … ⏎ </tool_response> ⏎ [left 12] <|im_end|> ⏎ <|im_start|>assistant ⏎

Everything is append-only: ids of earlier turns are never made again from text. Markers enter as ids of
the template; text from pages, users and other agents goes through an encoder that knows no added token,
so a page that contains `<|im_end|>` is only letters.

Not here: the loop, and what a call means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from swarm.types import ToolCall, ToolSpec, Turn

END = "<|im_end|>"
_SYSTEM = "<|im_start|>system\n"
_USER = "\n<|im_start|>user\n"
_ASSISTANT = "\n<|im_start|>assistant\n"
_RESPONSE = ("<tool_response>\n", "\n</tool_response>\n")
_CALL = ("<tool_call>", "</tool_call>")
_DEEPEST = 8
_SIGNATURES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class HermesChat:
    """A `ChatFormat` over a fast tokenizer: `HermesChat(tokenizer).observe(["no such page"], "[left 3]", closed=True)`.

    `terse_tools` shows the tools by name only, which is all that a model with built-in knowledge of
    them needs; else their JSON signatures are shown. Raises ValueError for a tokenizer without `<|im_end|>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, terse_tools: bool = False, cache: int = 1 << 16) -> None:
        self.tokenizer = tokenizer
        self._terse = terse_tools
        self._full = tokenizer.backend_tokenizer
        end = self._full.token_to_id(END)
        if end is None:
            raise ValueError(f"tokenizer has no {END} token, want one with the Qwen/Hermes markers")
        self._end: int = end
        self._plain_ids = _cached(_without_added_tokens(self._full), cache)
        self._marker_ids = _cached(self._full, 1 << 10)

    @property
    def stop(self) -> tuple[int, ...]:
        return (self._end,)

    def encode(self, text: str) -> list[int]:
        """Ids of foreign text, without any added token: what it spells out stays letters."""
        return list(self._plain_ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, markers included; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        shown = self._marker_ids(_tools_text(tools, self._terse, after=bool(system)))
        return [*self._marker_ids(_SYSTEM), *self._plain_ids(system), *shown, self._end, *self._user(user)]

    def observe(self, results: Sequence[str], note: str, *, closed: bool) -> list[int]:
        """See `ChatFormat`. One newline at the end of a result is dropped: the marker brings its own."""
        opening, closing = (self._marker_ids(m) for m in _RESPONSE)
        ids = [] if closed else [self._end]
        ids += self._marker_ids(_USER)
        for text in results:
            ids += [*opening, *self._plain_ids(text.removesuffix("\n")), *closing]
        return [*ids, *self._plain_ids(note), self._end, *self._marker_ids(_ASSISTANT)]

    def encode_turn(self, content: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """The ids with which a policy says this, end-of-turn id included: `parse` gives it back.

        For scripted policies and demonstrations. `content` comes back without outer white space,
        and must not spell out a tool call.
        """
        between = "\n" if content and calls and not content.endswith("\n") else ""
        spoken = "\n".join(_call_text(call) for call in calls)
        return [*self._plain_ids(content + between), *self._marker_ids(spoken), self._end]

    def parse(self, ids: Sequence[int]) -> Turn:
        """Reads a sampled turn; what does not parse becomes a reason in `malformed`, never an exception."""
        if ids and ids[-1] == self._end:
            ids = ids[:-1]
        content, *chunks = self.decode(ids).split(_CALL[0])
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for chunk in chunks:
            body, closed, after = chunk.partition(_CALL[1])
            read = _read_call(body) if closed else f"unclosed {_CALL[0]}"
            calls += [read] if isinstance(read, ToolCall) else []
            malformed += [read] if isinstance(read, str) else []
            content += after
        return Turn(content.strip(), tuple(calls), tuple(malformed))

    def _user(self, text: str) -> list[int]:
        return [*self._marker_ids(_USER), *self._plain_ids(text), self._end, *self._marker_ids(_ASSISTANT)]


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))


def _cached(tokenizer: Tokenizer, size: int) -> Callable[[str], tuple[int, ...]]:
    """Observations repeat a lot: the same page is read in many rollouts."""

    @lru_cache(maxsize=size)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def _tools_text(tools: Sequence[ToolSpec], terse: bool, *, after: bool) -> str:
    if not tools:
        return ""
    if terse:
        return ("\n" if after else "") + "tools: " + " ".join(t.name for t in tools)
    signatures = "\n".join(json.dumps(_signature(t), ensure_ascii=False) for t in tools)
    return ("\n\n" if after else "") + _SIGNATURES.format(signatures=signatures)


def _signature(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _call_text(call: ToolCall) -> str:
    """JSON without `<`, so that no argument can spell out a marker."""
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"{_CALL[0]}\n{body.replace('<', chr(92) + 'u003c')}\n{_CALL[1]}"


def _read_call(body: str) -> ToolCall | str:
    """The call, or in a few words why it is none."""
    try:
        value: object = json.loads(body, parse_constant=_refuse)
        if "\\u" in body:  # an escaped lone surrogate is no text: nothing later could encode it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(value, Mapping):
        return "not a JSON object"
    fields = cast(Mapping[str, object], value)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not name:
        return "no name"
    if not isinstance(arguments, Mapping):
        return "no arguments"
    if _deeper(cast(object, arguments), _DEEPEST):
        return "arguments nested too deep"
    return ToolCall(name, cast(Mapping[str, Any], arguments))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _deeper(value: object, levels: int) -> bool:
    children: Iterable[object] = ()
    if isinstance(value, Mapping):
        children = cast(Mapping[str, object], value).values()
    elif isinstance(value, list):
        children = cast(list[object], value)
    return levels < 0 or any(_deeper(child, levels - 1) for child in children)
