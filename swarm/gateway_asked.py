"""What OpenAI's API asks for, read from JSON: every field is understood, changes nothing, or is refused by its name.

    chat/completions   messages, tools, max_tokens, seed, stream, logprobs …  ─▶ Asked
    completions        prompt (text or ids), max_tokens …                     ─▶ Asked

A temperature other than the rollout's is refused: a trainer could not follow it. Not here: answers
(`swarm.gateway_said`), and HTTP (`swarm.gateway`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import Struct, structs

from swarm.chat_json import called, parsed
from swarm.said import Said
from swarm.types import Sampling, ToolCall, ToolSpec

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_NOTHING: Sequence[Any] = (None, [], {})
_UNCHANGING: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "modalities": (["text"],),
}
"""Options that are understood only where they ask for what is done anyway."""

_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Words of the client to itself."""

_SHARED = ("model", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "logprobs", *_LABELS)
_CHAT = (*_SHARED, "messages", "tools", "max_completion_tokens")
_TEXT = (*_SHARED, "prompt")


class Refusal(Exception):
    """An answer in OpenAI's error shape: `Refusal(404, "The model 'x' does not exist", code="model_not_found")`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


class Asked(Struct, frozen=True):
    """One request. `prompt` is a completion's, else there are `messages` and `tools`."""

    sampling: Sampling
    messages: tuple[Said, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    strict: bool = False


def read_chat(body: bytes, model: str, own: Sampling) -> Asked:
    """A request of `chat/completions` for `model`, with the sampling `own` but for what it asks. Raises Refusal."""
    fields = _fields(body, model, _CHAT)
    messages = _list(fields, "messages")
    if not messages:
        raise _wrong("messages", "[]", "one message or more")
    found = [_tool(f"tools.{k}", tool) for k, tool in enumerate(_list(fields, "tools"))]
    tools, strict = tuple(tool for tool, _ in found), any(strict for _, strict in found)
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        raise _wrong("tools", f"the names {', '.join(names)}", "each once")
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    logprobs = _flag(fields, "logprobs")
    said = tuple(_message(f"messages.{k}", m) for k, m in enumerate(messages))
    return _asked(fields, own, limit, Asked(own, said, tools, logprobs=logprobs, strict=strict))


def read_text(body: bytes, model: str, own: Sampling) -> Asked:
    """A request of `completions`; see `read_chat`. A prompt is one text, or one list of token ids."""
    fields = _fields(body, model, _TEXT)
    logprobs = fields.get("logprobs")
    if not (logprobs is None or (_is_int(logprobs) and logprobs in (0, 1))):
        raise _wrong("logprobs", _shown(logprobs), "0 or 1: only the sampled token's is known")
    prompt = _prompt(fields.get("prompt"))
    return _asked(fields, own, "max_tokens", Asked(own, prompt=prompt, logprobs=logprobs is not None))


def _prompt(value: Any) -> str | tuple[int, ...]:
    ids = tuple(cast(list[Any], value)) if isinstance(value, list) else ()
    if isinstance(value, str) and value:
        return value
    if not ids or not all(_is_int(i) for i in ids):
        raise _wrong("prompt", _shown(value), "one text, or one list of token ids, and not an empty one")
    return ids


def _fields(body: bytes, model: str, known: Sequence[str]) -> Mapping[str, Any]:
    fields = json_object(body)
    for name, value in fields.items():
        if name in known or value in _NOTHING or value in _UNCHANGING.get(name, ()):
            continue
        if name in _UNCHANGING:
            raise _wrong(name, _shown(value), f"{_shown(_UNCHANGING[name][0])} or none")
        raise Refusal(400, f"{name}: not supported here", param=name, code="unsupported_parameter")
    if fields.get("model") != model:
        shown = _shown(fields.get("model"))
        raise Refusal(404, f"The model {shown} does not exist, want {model!r}", param="model", code="model_not_found")
    return fields


def json_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object that a body is. Raises Refusal."""
    try:
        value = parsed(body.decode())
    except ValueError as e:
        raise Refusal(400, f"The body is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise Refusal(400, f"The body is {_shown(value)}, want a JSON object")
    return cast(dict[str, Any], value)


def _asked(fields: Mapping[str, Any], own: Sampling, limit: str, asked: Asked) -> Asked:
    """With the options that all requests share."""
    for name in ("temperature", "top_p"):
        value = fields.get(name)
        if value is not None and value != getattr(own, name):
            raise _wrong(name, _shown(value), f"the rollout's {getattr(own, name)} or none")
    most, seed = fields.get(limit), fields.get("seed")
    if most is not None and not (_is_int(most) and most >= 1):
        raise _wrong(limit, _shown(most), "a number of 1 or more")
    if seed is not None and not _is_int(seed):
        raise _wrong("seed", _shown(seed), "a whole number")
    most = own.max_tokens if most is None else min(most, own.max_tokens)
    sampling = structs.replace(own, max_tokens=most, seed=own.seed if seed is None else seed)
    return structs.replace(asked, sampling=sampling, stream=_flag(fields, "stream"), usage=_usage(fields))


def _usage(fields: Mapping[str, Any]) -> bool:
    found: Any = fields.get("stream_options")
    if found is None:
        return False
    options = cast(dict[str, Any], found) if isinstance(found, dict) else {}
    if not options or not _flag(fields, "stream"):
        raise _wrong("stream_options", _shown(found), "an object, with stream only")
    other = next((name for name in options if name not in ("include_usage", "include_obfuscation")), None)
    if other or options.get("include_obfuscation"):
        name = f"stream_options.{other or 'include_obfuscation'}"
        raise Refusal(400, f"{name}: not supported here", param=name, code="unsupported_parameter")
    return _flag(options, "include_usage")


def _message(at: str, value: object) -> Said:
    if not isinstance(value, dict):
        raise _wrong(at, _shown(value), "an object")
    fields = cast(dict[str, Any], value)
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise _wrong(f"{at}.role", _shown(fields.get("role")), f"one of {', '.join(_ROLES)}")
    own = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}.get(role, ())
    for name, content in fields.items():
        if name not in ("role", "content", *own) and content not in _NOTHING:
            raise Refusal(400, f"{at}.{name}: not supported here", param=f"{at}.{name}", code="unsupported_parameter")
    content = _content(f"{at}.content", fields.get("content"), empty=role == "assistant")
    if role == "tool":
        return Said("tool", content, ids=(_text(f"{at}.tool_call_id", fields.get("tool_call_id")),))
    calls = [_call(f"{at}.tool_calls.{k}", call) for k, call in enumerate(_list(fields, "tool_calls", at))]
    return Said(cast(Any, role), content, tuple(call for _, call in calls), tuple(name for name, _ in calls))


def _content(at: str, value: object, *, empty: bool) -> str:
    if value is None and empty:
        return ""
    if not isinstance(value, list):
        return _text(at, value)
    texts: list[str] = []
    for k, part in enumerate(cast(list[object], value)):
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
        if fields.get("type") != "text":
            raise _wrong(f"{at}.{k}", f"a part of type {_shown(fields.get('type'))}", "text")
        texts.append(_text(f"{at}.{k}.text", fields.get("text")))
    return "".join(texts)


def _call(at: str, value: object) -> tuple[str, ToolCall]:
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    function = _function(at, fields)
    text = _text(f"{at}.function.arguments", function.get("arguments"))
    try:
        arguments = parsed(text or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{at}.function.arguments", _shown(text), "a JSON object as text")
    name = _text(f"{at}.function.name", function.get("name"))
    call = called(name, cast(dict[str, object], arguments))
    if isinstance(call, str):
        raise _wrong(f"{at}.function.arguments", call, "fewer levels")
    return _text(f"{at}.id", fields.get("id")), call


def _tool(at: str, value: object) -> tuple[ToolSpec, bool]:
    """The tool, and whether it is a strict one."""
    function = _function(at, cast(dict[str, Any], value) if isinstance(value, dict) else {})
    for name, content in function.items():
        if name not in ("name", "description", "parameters", "strict") and content not in _NOTHING:
            at = f"{at}.function.{name}"
            raise Refusal(400, f"{at}: not supported here", param=at, code="unsupported_parameter")
    name = _text(f"{at}.function.name", function.get("name"))
    if not _NAME.fullmatch(name):
        raise _wrong(f"{at}.function.name", _shown(name), f"a name like {_NAME.pattern}")
    schema: object = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise _wrong(f"{at}.function.parameters", _shown(schema), "a JSON schema")
    description = _text(f"{at}.function.description", function.get("description") or "")
    return ToolSpec(name, description, cast(dict[str, Any], schema)), _flag(function, "strict")


def _function(at: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, function = fields.get("type", "function"), fields.get("function")
    if kind != "function" or not isinstance(function, dict):
        raise _wrong(at, f"type {_shown(kind)}", "a function, with its name")
    return cast(dict[str, Any], function)


def _list(fields: Mapping[str, Any], name: str, at: str = "") -> list[Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise _wrong(f"{at}.{name}".lstrip("."), _shown(value), "a list")
    return cast(list[Any], value or [])


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, _shown(value), "true or false")
    return bool(value)


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(at, _shown(value), "text")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(param: str, seen: str, wanted: str) -> Refusal:
    return Refusal(400, f"{param} is {seen}, want {wanted}", param=param, code="invalid_value")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
