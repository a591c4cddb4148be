"""A reply as OpenAI's API gives it: as one object, in pieces as they are streamed, or as an error.

An engine gives whole turns: a stream has the pieces of a finished one, its words first, then its calls.
Not here: what was asked (`swarm.gateway_asked`), and HTTP (`swarm.gateway`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from swarm.chat import Chat
from swarm.dialogue import Reply
from swarm.gateway_asked import Asked, Refusal
from swarm.types import Completion, ToolCall

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
_PIECE = re.compile(r"\S*\s*", re.DOTALL)
_CALL_PIECE = 24

Json = dict[str, Any]


class Answer(Struct, frozen=True):
    """A reply to be told: `id` is its name, `model` whose it is said to be."""

    id: str
    model: str
    asked: Asked
    reply: Reply
    completion: Completion

    @property
    def finish(self) -> str:
        if self.reply.said.calls:
            return "tool_calls"
        return self.completion.finish

    @property
    def usage(self) -> Json:
        prompt, said = self.reply.prompt_tokens, len(self.completion.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": self.completion.cached},
        }


def error(refusal: Refusal) -> Json:
    """A body in OpenAI's error shape."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def event(body: Json) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def whole(answer: Answer, chat: Chat) -> Json:
    """The body of a reply that is not streamed."""
    choice: Json = {"index": 0, "logprobs": _logprobs(answer, chat), "finish_reason": answer.finish}
    said = answer.reply.said
    if answer.asked.prompt is not None:
        return _object(answer, "text_completion", {**choice, "text": said.content}, usage=answer.usage)
    calls = [_call(name, call) for name, call in zip(said.ids, said.calls, strict=True)]
    content = said.content if said.content or not calls else None
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return _object(answer, "chat.completion", {**choice, "message": message}, usage=answer.usage)


def pieces(answer: Answer, chat: Chat) -> Iterator[Json]:
    """The bodies of the events of a streamed reply, [DONE] not among them."""
    is_text = answer.asked.prompt is not None
    usage: Json = {"usage": None} if answer.asked.usage else {}
    logprobs = _logprobs(answer, chat)
    for delta in _texts(answer) if is_text else _deltas(answer):
        choice = {"index": 0, **delta, "logprobs": logprobs, "finish_reason": None}
        logprobs = None  # those of the whole turn stand in its first piece
        yield _object(answer, _streamed(is_text), choice, **usage)
    last: Json = {"text": ""} if is_text else {"delta": {}}
    choice = {"index": 0, **last, "logprobs": None, "finish_reason": answer.finish}
    yield _object(answer, _streamed(is_text), choice, **usage)
    if answer.asked.usage:
        yield {**_object(answer, _streamed(is_text), {}, usage=answer.usage), "choices": []}


def _streamed(is_text: bool) -> str:
    return "text_completion" if is_text else "chat.completion.chunk"


def _texts(answer: Answer) -> Iterator[Json]:
    return ({"text": piece} for piece in _PIECE.findall(answer.reply.said.content) if piece)


def _deltas(answer: Answer) -> Iterator[Json]:
    said = answer.reply.said
    yield {"delta": {"role": "assistant", "content": None if said.calls and not said.content else ""}}
    for piece in _PIECE.findall(said.content):
        if piece:
            yield {"delta": {"content": piece}}
    for k, (name, call) in enumerate(zip(said.ids, said.calls, strict=True)):
        whole = _call(name, call)
        text = whole["function"]["arguments"]
        yield {"delta": {"tool_calls": [{**whole, "index": k, "function": {"name": call.name, "arguments": ""}}]}}
        for at in range(0, len(text), _CALL_PIECE):
            yield {"delta": {"tool_calls": [{"index": k, "function": {"arguments": text[at : at + _CALL_PIECE]}}]}}


def _call(name: str, call: ToolCall) -> Json:
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=dict)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(answer: Answer, chat: Chat) -> Json | None:
    """Of every sampled id, the end of the turn included, as the engine gave them."""
    if not answer.asked.logprobs:
        return None
    tokens = [chat.decode([i]) for i in answer.completion.ids]
    values = answer.completion.logprobs
    if answer.asked.prompt is not None:
        return {"tokens": tokens, "token_logprobs": list(values), "top_logprobs": None, "text_offset": []}
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
        for token, value in zip(tokens, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def _object(answer: Answer, kind: str, choice: Json, **more: Any) -> Json:
    head: Mapping[str, Any] = {"id": answer.id, "object": kind, "created": int(time.time()), "model": answer.model}
    return {**head, "choices": [choice], **more}
