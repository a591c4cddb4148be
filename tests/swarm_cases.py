"""What the loop's tests share: a small tokenizer, scripted agents, and a tool that echoes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import trio

from recipes.tokenizer import build_tokenizer
from swarm.chat import HermesChat
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness
from swarm.tools import CallContext, Refused
from swarm.transcript import Transcript, read
from swarm.types import Artifact, Budget, Sampling, Task, ToolCall, ToolResult, ToolSpec, Turn
from swarm.workspace import Workspace

TASK = Task("t", "List the airports.", "airports", "airport", ("airport", "code"), (("A", "1"), ("B", "2")))


@cache
def chat() -> HermesChat:
    return HermesChat(build_tokenizer(["List the airports.", "echo done"]), terse_tools=True)


def engine(policy: Callable[[Transcript], Turn], *, fail_at: Sequence[int] = (), delay: float = 0.0) -> ScriptedEngine:
    """An engine that speaks a policy's turns."""

    def speak(ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        turn = policy(read(chat().decode(ids)))
        return chat().encode_turn(turn.content, turn.calls)

    return ScriptedEngine(speak, fail_at=fail_at, delay=delay)


def says(*turns: Turn) -> Callable[[Transcript], Turn]:
    """One turn after another, whatever comes back; the last one again and again."""
    return lambda transcript: turns[min(len(transcript.exchanges), len(turns) - 1)]


def call(name: str, /, **arguments: object) -> ToolCall:
    return ToolCall(name, arguments)


ECHO = ToolSpec("echo", "Echo.", {"type": "object", "properties": {}})


@dataclass(frozen=True)
class Echo:
    """Answers `text` after `seconds`; files an artifact where there is a url."""

    spec: ToolSpec = ECHO

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace | Refused:
        if "text" not in call.arguments:
            return Refused("bad_arguments", "echo wants text")
        return context.workspace

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        await trio.sleep(float(call.arguments.get("seconds", 0)))
        url = str(call.arguments.get("url", ""))
        text = str(call.arguments["text"])
        return ToolResult((Artifact(text, url, {"a": text.upper()}),) if url else (text,))


def harness(policy: Callable[[Transcript], Turn], *tools: object, steps: int = 10, **engine_options: object) -> Harness:
    """An agent that follows the policy, with `echo` and more tools."""
    return Harness(
        engine(policy, **engine_options),  # type: ignore[arg-type]
        chat(),
        (Echo(), *tools),  # type: ignore[arg-type]
        "Work.",
        Sampling(512, stop=chat().stop),
        Budget(steps, 4096, seconds=100.0),
    )
