"""A rollout at the gateway: what its agent may ask of the policy, and the tools of its world.

Rows that the policy writes and handles that it is shown are kept in a workspace, as in the native loop. Nothing is
raised for an agent's mistakes: it gets a refusal. Not here: keys and HTTP (`swarm.gateway`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from string import ascii_lowercase
from typing import Any

import trio

from swarm.calls import prepare, run_all
from swarm.chat import Chat
from swarm.dialogue import DialogueError, Dialogues, Reply
from swarm.gateway_asked import Asked, Refusal
from swarm.tools import CallContext, Tool
from swarm.types import Artifact, EngineError, Rollout, Sampling, Status, Task, ToolCall, Turn
from swarm.workspace import Workspace

_OVER = {
    "budget": ("the rollout has no steps left, want an answer from what there is", "budget_exhausted"),
    "context": ("the context is longer than the rollout's may be, want shorter messages", "context_length_exceeded"),
}


class Guest:
    """One rollout: `Guest(Dialogues(…), (Search(world), Access(world)), seed=1)`."""

    def __init__(self, dialogues: Dialogues, tools: Sequence[Tool], seed: int) -> None:
        self.tools: Mapping[str, Tool] = {tool.spec.name: tool for tool in tools}
        self.workspace = workspace_of(dialogues.task)
        self._dialogues, self._seed = dialogues, seed
        self._called = 0
        self._scopes: set[trio.CancelScope] = set()

    @property
    def chat(self) -> Chat:
        return self._dialogues.chat

    @property
    def sampling(self) -> Sampling:
        return self._dialogues.sampling

    async def reply(self, asked: Asked) -> Reply | Refusal:
        """What the policy says, or why it says nothing."""
        try:
            if asked.prompt is None:
                reply = await self._dialogues.reply(asked.messages, asked.tools, asked.sampling)
            else:
                reply = await self._dialogues.complete(asked.prompt, asked.sampling)
        except DialogueError as e:
            return Refusal(400, str(e), code="invalid_value")
        except EngineError as e:
            return Refusal(500, f"the engine failed: {e}")
        if reply.over:
            message, code = _OVER[reply.over]
            return Refusal(400, message, code=code)
        self.workspace = self.workspace.written(reply.turn.content)
        return reply

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """What a tool answers, as the policy would read it, and the kind of error or nothing."""
        index, self._called = self._called, self._called + 1
        left = max(1, self._dialogues.left)  # the turn that asked for the call has paid for it
        caller = CallContext("main", 0, index, self._seed, left, self._dialogues.task, self.workspace)
        checked = prepare(self.tools, Turn("", (ToolCall(name, arguments),)), caller)
        self.workspace = checked.workspace
        [result] = await run_all(checked)
        self.workspace, text = self.workspace.show(result.parts)
        if result.error:
            self._dialogues.count(result.error)
        return text, result.error

    def rollout(self, answer: str, status: Status, error: str = "") -> Rollout:
        """What was recorded, with the table that the answer hands in; of an agent that was cut, the rows it wrote."""
        self.workspace = self.workspace.written(answer)
        table = self.workspace.rows if status == "truncated" else self.workspace.table(answer)
        return self._dialogues.rollout(answer, table, status, error)

    @contextmanager
    def visit(self, scope: trio.CancelScope) -> Generator[None]:
        """While a request is under way; `close` cancels it."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.discard(scope)

    def close(self) -> None:
        """Cancels all requests."""
        for scope in self._scopes:
            scope.cancel()


def workspace_of(task: Task) -> Workspace:
    """The workspace in which an agent begins, as the native loop's: handle `#0` is the question."""
    lettered = dict(zip(ascii_lowercase, task.names, strict=False))
    return Workspace((Artifact(task.subject, cells={"text": task.query, **lettered}),))
