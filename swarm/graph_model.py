"""The policy as a LangChain chat model, and our tools as LangChain tools, for a graph that a runner runs.

    node ─ GraphModel ─┐                   ┌─▶ engine, recorded as spans
    node ─ GraphTool ──┴─▶ Desk ─▶ Underway┴─▶ tool, on the workspace

Both know the rollout at hand by a context variable, which asyncio's tasks and LangChain's worker threads inherit: it
holds in parallel branches and in graphs within graphs. The one file that imports langchain_core. Not here: who runs
graphs (`swarm.graphs`), what is recorded (`swarm.dialogue`), how calls cross to trio (`swarm.graph_bridge`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ValidationError

from swarm.dialogue import DialogueError, Over, Reply, Said
from swarm.graph_bridge import Desk
from swarm.graph_rollout import Underway
from swarm.types import ToolCall, ToolSpec

__all__ = ["BadOutput", "BudgetSpent", "GraphModel", "GraphTool", "Serving", "answer_of", "opening", "tool_of"]

BadOutput = OutputParserException
"""The policy gave no structured output where one was wanted."""

Tools = Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool]


class BudgetSpent(Exception):
    """The rollout has no steps or no room for another turn: ends the graph, and is no failure of it."""

    def __init__(self, over: Over) -> None:
        super().__init__(f"no turn is left for want of {over}")
        self.over: Over = over


@dataclass(frozen=True, slots=True)
class Serving:
    """What a graph's model and tools work for. `openings`: how the conversation began in which a message was said."""

    rollout: Underway
    desk: Desk
    openings: dict[str, list[Said]] = field(default_factory=dict[str, list[Said]])

    @contextmanager
    def at_hand(self) -> Generator[None]:
        """The models and tools that are called from here, by whatever task or thread, work for this rollout."""
        before = _AT_HAND.set(self)
        try:
            yield
        finally:
            _AT_HAND.reset(before)


_AT_HAND: ContextVar[Serving] = ContextVar("the rollout that a graph runs for")


def _serving() -> Serving:
    try:
        return _AT_HAND.get()
    except LookupError:
        raise RuntimeError("no rollout here, want a call by a graph while a GraphRunner runs it") from None


def _no_loop(what: str) -> None:
    """Raises RuntimeError in an async node, where waiting would stop every graph."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{what}.invoke in an async node, want await {what}.ainvoke")


# --- the chat model ----------------------------------------------------------------------


class GraphModel(BaseChatModel):
    """The policy of the rollout at hand as a LangChain chat model: `GraphModel().bind_tools(tools)`.

    How it samples is the runner's to say; of a call's options it takes `max_tokens`, and refuses all others with
    ValueError. A tool choice is what the policy is shown (all tools, none, the one that is named), never a
    constraint: a token that was forced would not be the policy's own. A call of a graph's own tool costs a step, unless
    the tool is made with `extras={"ordinary": False}`, as one is that hands work to another agent.
    """

    cache: bool | None = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Never: a reply that was not sampled would not be recorded."""

    @property
    def _llm_type(self) -> str:
        return "swarm-rl"

    def bind_tools(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tools: Tools, *, tool_choice: str | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools. `tool_choice`: auto, any, required, none or a tool's name."""
        shown = [_shown(tool) for tool in tools]
        names = [t["function"]["name"] for t in shown]
        if isinstance(tool_choice, str) and tool_choice not in ("auto", "any", "required", "none", *names):
            raise ValueError(f"tool_choice = {tool_choice!r}, want auto, any, required, none or one of {names}")
        if tool_choice in ("none", *names):
            shown = [t for t in shown if t["function"]["name"] == tool_choice]
        return self.bind(tools=shown, **kwargs)

    def with_structured_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, method: str = "function_calling"
    ) -> Runnable[LanguageModelInput, Any]:
        """The model's reply as a call of a tool with this schema, checked: a pydantic object, or a dict.

        Raises OutputParserException where the policy gave none that fits, which ends a rollout like an answer;
        with `include_raw` a dict of `raw`, `parsed` and `parsing_error`. Only by function calling: ValueError.
        """
        if method != "function_calling":
            raise ValueError(f"structured output: method = {method!r}, want function_calling")
        name = str(convert_to_openai_tool(schema)["function"]["name"])
        model = self.bind_tools([schema], tool_choice=name)
        return model | RunnableLambda(partial(_raw_and_parsed if include_raw else _parsed, schema))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        serving = _serving()
        return _result(await serving.desk.ask(_request(serving, messages, stop, kwargs)), serving, messages)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        serving = _serving()
        _no_loop("model")
        return _result(serving.desk.wait(_request(serving, messages, stop, kwargs)), serving, messages)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """The reply in pieces, once it is whole: engines answer whole."""
        for chunk in _chunks(await self._agenerate(messages, stop, **kwargs)):
            yield chunk

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield from _chunks(self._generate(messages, stop, **kwargs))


def _shown(tool: Mapping[str, Any] | type | Callable[..., Any] | BaseTool) -> dict[str, Any]:
    """A tool in OpenAI's form, ours as its specification has it; with `ordinary` as in `ToolSpec`."""
    if isinstance(tool, GraphTool):
        spec = tool.spec
        function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
        return {"type": "function", "function": function, "ordinary": spec.ordinary}
    extras = tool.extras if isinstance(tool, BaseTool) else None
    shown = convert_to_openai_tool(cast(Any, tool))
    return {**shown, "ordinary": (extras or {}).get("ordinary", True)}


def _request(
    serving: Serving, messages: Sequence[BaseMessage], stop: Sequence[str] | None, options: Mapping[str, Any]
) -> Callable[[], Awaitable[Reply]]:
    """What trio is to do. Raises DialogueError and ValueError for what cannot be asked."""
    unknown = {**options, **({"stop": stop} if stop else {})}.keys() - {"tools", "max_tokens"}
    if unknown:
        raise ValueError(f"model: {', '.join(sorted(unknown))} given by the graph, want sampling left to the runner")
    harness = serving.rollout.harness
    tools = [_spec(shown) for shown in options.get("tools", ())]
    most = options.get("max_tokens") or harness.sampling.max_tokens
    return partial(serving.rollout.reply, _told(messages, serving), tools, most)


def _spec(shown: Mapping[str, Any]) -> ToolSpec:
    function = shown["function"]
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    return ToolSpec(function["name"], function.get("description", ""), parameters, shown.get("ordinary", True))


def _result(reply: Reply, serving: Serving, messages: Sequence[BaseMessage]) -> ChatResult:
    if reply.completion is None:
        raise BudgetSpent(reply.over)
    message = _message(reply)
    serving.openings[str(message.id)] = _beginning(messages)
    return ChatResult(generations=[ChatGeneration(message=message)])


def _message(reply: Reply) -> AIMessage:
    assert reply.completion is not None
    said, n = reply.said, len(reply.completion.ids)
    calls = zip(said.ids, said.calls, strict=True)
    return AIMessage(
        said.content,
        id=f"said-{uuid4().hex}",
        tool_calls=[tool_call(name=c.name, args=dict(c.arguments), id=name) for name, c in calls],
        invalid_tool_calls=[invalid_tool_call(error=reason) for reason in reply.turn.malformed],
        usage_metadata=UsageMetadata(
            input_tokens=reply.prompt_tokens, output_tokens=n, total_tokens=reply.prompt_tokens + n
        ),
        response_metadata={"finish_reason": reply.completion.finish, "version": reply.completion.version},
    )


def _chunks(result: ChatResult) -> Iterator[ChatGenerationChunk]:
    """A reply's words one by one, then each of its calls, then the rest."""
    message = cast(AIMessage, result.generations[0].message)
    for words in filter(None, re.findall(r"\S*\s*", cast(str, message.content))):
        yield ChatGenerationChunk(message=AIMessageChunk(content=words, id=message.id))
    for k, c in enumerate(message.tool_calls):
        piece = tool_call_chunk(name=c["name"], args=json.dumps(c["args"], default=dict), id=c["id"], index=k)
        yield ChatGenerationChunk(message=AIMessageChunk(content="", id=message.id, tool_call_chunks=[piece]))
    last = AIMessageChunk(
        content="",
        id=message.id,
        invalid_tool_calls=message.invalid_tool_calls,
        usage_metadata=message.usage_metadata,
        response_metadata=message.response_metadata,
        chunk_position="last",
    )
    yield ChatGenerationChunk(message=last)


def _parsed(schema: dict[str, Any] | type, message: AIMessage) -> Any:
    function = convert_to_openai_tool(schema)["function"]
    name, required = function["name"], function.get("parameters", {}).get("required", ())
    given = next((c["args"] for c in message.tool_calls if c["name"] == name), None)
    if given is None:
        raise OutputParserException(f"no call of {name} in the reply, want one", llm_output=str(message.content))
    lacking = [key for key in required if key not in given]
    if lacking:
        raise OutputParserException(f"{name} without {', '.join(lacking)}, want {', '.join(required)}")
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return given
    try:
        return schema.model_validate(given)
    except ValidationError as e:
        raise OutputParserException(f"{name}: {e}") from e


def _raw_and_parsed(schema: dict[str, Any] | type, message: AIMessage) -> dict[str, Any]:
    try:
        return {"raw": message, "parsed": _parsed(schema, message), "parsing_error": None}
    except OutputParserException as e:
        return {"raw": message, "parsed": None, "parsing_error": e}


# --- messages ------------------------------------------------------------------------------


def _told(messages: Sequence[BaseMessage], serving: Serving) -> list[Said]:
    """The conversation as the recorder takes it. What the policy said in another one, as another agent, is told as
    the user's words here; where the policy's own are the last, it goes on after no words."""
    opening, told = _beginning(messages), list[Said]()
    for k, message in enumerate(messages):
        elsewhere = serving.openings.get(str(message.id), opening) != opening
        if isinstance(message, AIMessage) and elsewhere and not message.tool_calls:
            name = f"{message.name}:\n" if message.name else ""
            told.append(Said("user", name + _text(k, message)))
        else:
            told.append(_said(k, message))
    return [*told, Said("user")] if told and told[-1].role == "assistant" else told


def _beginning(messages: Sequence[BaseMessage]) -> list[Said]:
    """All before the first message of an assistant."""
    first = next((k for k, m in enumerate(messages) if isinstance(m, AIMessage)), len(messages))
    return [_said(k, m) for k, m in enumerate(messages[:first])]


def _said(k: int, message: BaseMessage) -> Said:
    text = _text(k, message)
    match message:
        case SystemMessage():
            return Said("system", text)
        case HumanMessage():
            return Said("user", text)
        case ToolMessage():
            return Said("tool", text, ids=(message.tool_call_id,))
        case AIMessage():
            calls = tuple(ToolCall(c["name"], c["args"]) for c in message.tool_calls)
            return Said("assistant", text, calls, tuple(c["id"] or "" for c in message.tool_calls))
        case _:
            kind = type(message).__name__
            raise DialogueError(f"message {k}: a {kind}, want a system's, a user's, an assistant's or a tool's")


def _text(k: int, message: BaseMessage) -> str:
    content = message.content
    parts = [content] if isinstance(content, str) else content
    for part in parts:
        if not isinstance(part, str) and part.get("type") != "text":
            raise DialogueError(f"message {k}: a part of type {part.get('type')!r}, want text")
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


# --- the tools ---------------------------------------------------------------------------


class GraphTool(BaseTool):
    """A tool of ours for a graph: it runs the policy's calls of it, on the workspace of the rollout at hand.

    Wants the whole tool call of a message, as every tool node gives it, with its arguments unchanged.
    """

    spec: ToolSpec

    def _to_args_and_kwargs(self, tool_input: Any, tool_call_id: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (tool_call_id or "", ToolCall(self.name, tool_input)), {}

    async def _arun(self, name: str, call: ToolCall) -> str:
        serving = _serving()
        return await serving.desk.ask(lambda: serving.rollout.call(name, call))

    def _run(self, name: str, call: ToolCall) -> str:
        serving = _serving()
        _no_loop("tool")
        return serving.desk.wait(lambda: serving.rollout.call(name, call))


def tool_of(spec: ToolSpec) -> GraphTool:
    """The tool of a graph that runs the calls of ours."""
    return GraphTool(name=spec.name, description=spec.description, args_schema=dict(spec.parameters), spec=spec)


# --- what a graph begins and ends with ---------------------------------------------------


def opening(system: str, query: str) -> dict[str, Any]:
    """The state that a graph begins with."""
    return {"messages": [*([SystemMessage(system)] if system else []), HumanMessage(query)]}


def answer_of(state: Mapping[str, Any]) -> str:
    """What the last message of an assistant says. Raises ValueError where there is none, or somebody is waited for."""
    if "__interrupt__" in state:
        raise ValueError("the graph waits for somebody (interrupt), want one that ends by itself")
    said = [m for m in state.get("messages", ()) if isinstance(m, AIMessage)]
    if not said:
        raise ValueError(f"the graph ended with {', '.join(state)}, want messages with one of an assistant")
    return _text(len(state["messages"]), said[-1])
