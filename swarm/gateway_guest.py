"""A rollout at the gateway: what its agent may ask of the policy, and the tools of its world.

Rows that the policy writes and handles that it is shown are kept in a workspace, as in the native loop. A call of a
tool is known for the policy's own by what it says, so that a subagent costs the turn that asked for it; an agent that
calls one by itself is refused. Nothing is raised for an agent's mistakes. Not here: keys and HTTP (`swarm.gateway`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import trio
from msgspec import Struct

from swarm.calls import prepare, run_all
from swarm.chat import Chat
from swarm.dialogue import DialogueError, Dialogues, Reply
from swarm.gateway_asked import Asked, Refusal
from swarm.loop import Harness
from swarm.tools import CallContext, Tool
from swarm.types import Artifact, Budget, EngineError, Rollout, Sampling, Status, Task, ToolCall, ToolSpec, Turn
from swarm.workspace import Workspace

_OVER = {
    "budget": ("the rollout has no steps left, want an answer from what there is", "budget_exhausted"),
    "context": ("the context is longer than the rollout's may be, want shorter messages", "context_length_exceeded"),
}


class _Issued(Struct, frozen=True):
    """A call that has not been run, its place among all of the rollout, and the steps `left` after its turn."""

    index: int
    name: str
    call: ToolCall
    left: int


class Guest:
    """One rollout: `Guest(Dialogues(…), (Search(world), Access(world)), seed=1)`."""

    def __init__(self, dialogues: Dialogues, tools: Sequence[Tool], seed: int) -> None:
        self.tools: Mapping[str, Tool] = {tool.spec.name: tool for tool in tools}
        self.workspace = workspace_of(dialogues.task)
        self._dialogues, self._seed = dialogues, seed
        self._calls = 0
        self._issued: list[_Issued] = []
        self._children: list[tuple[int, Rollout]] = []
        self._scopes: set[trio.CancelScope] = set()
        self._answer = ""
        self._answered = trio.Event()

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
                tools = [self._priced(tool) for tool in asked.tools]
                reply = await self._dialogues.reply(asked.messages, tools, asked.sampling)
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
        self._issue(reply)
        self._dialogues.count("strict_not_enforced", int(asked.strict))
        return reply

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """What a tool answers, as the policy would read it, and the kind of error or nothing."""
        call = ToolCall(name, arguments)
        issued = next((i for i in self._issued if i.call == call), None)
        if issued is not None:
            self._issued.remove(issued)
        elif not self.tools[name].spec.ordinary:
            return self._failed("not_asked_for", f"error: the policy did not call {name} with these arguments")
        else:
            issued = self._numbered("", call)
        left = max(1, issued.left)  # the turn has paid for its calls
        caller = CallContext("main", 0, issued.index, self._seed, left, self._dialogues.task, self.workspace)
        checked = prepare(self.tools, Turn("", (call,)), caller)
        self.workspace = checked.workspace
        [result] = await run_all(checked)
        self.workspace, text = self.workspace.show(result.parts)
        if result.child is not None:
            self._children.append((issued.index, result.child))
            self._dialogues.spawned(issued.name, result.child.ledger.critical_steps)
        return self._failed(result.error, text) if result.error else (text, "")

    def _priced(self, tool: ToolSpec) -> ToolSpec:
        """Spawning costs no step of its own, whatever the client's list of tools leaves out."""
        own = self.tools.get(tool.name)
        return tool if own is None else replace(tool, ordinary=own.spec.ordinary)

    def _issue(self, reply: Reply) -> None:
        for name, call in zip(reply.said.ids, reply.said.calls, strict=True):
            self._issued.append(self._numbered(name, call))
        self._calls += len(reply.turn.malformed)

    def _numbered(self, name: str, call: ToolCall) -> _Issued:
        self._calls += 1
        return _Issued(self._calls - 1, name, call, self._dialogues.left)

    def _failed(self, kind: str, text: str) -> tuple[str, str]:
        self._dialogues.count(kind)
        return text, kind

    def hand_in(self, answer: str) -> None:
        """The agent's answer, once; for one that is nobody's subprocess."""
        if self._answered.is_set():
            raise Refusal(409, "the answer was handed in already, want one")
        self._answer = answer
        self._answered.set()

    async def answer(self) -> str:
        """Waits until the answer is handed in."""
        await self._answered.wait()
        return self._answer

    def rollout(self, answer: str, status: Status, error: str = "") -> Rollout:
        """What was recorded, with the table that the answer hands in; of an agent that was cut, the rows it wrote."""
        self.workspace = self.workspace.written(answer)
        table = self.workspace.rows if status == "truncated" else self.workspace.table(answer)
        children = tuple(child for _, child in sorted(self._children, key=lambda c: c[0]))
        return replace(self._dialogues.rollout(answer, table, status, error), children=children)

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


def check_harness(harness: Harness) -> Chat:
    """Its language. Raises ValueError for a harness that rewrites its context, which is the agent's own business, or
    whose chat is of no known family."""
    if harness.context.kind != "none":
        raise ValueError(f"gateway: context = {harness.context.kind}, want none: the agent keeps the messages")
    if not isinstance(harness.chat, Chat):
        raise ValueError(f"gateway: chat = {type(harness.chat).__name__}, want a Chat")
    return harness.chat


def guest_of(harness: Harness, task: Task, seed: int, budget: Budget, *, note: bool) -> Guest:
    """A guest in the place of the harness's loop. With `note` the policy is shown what is left of its budget.

    Raises ValueError as `check_harness`.
    """
    chat = check_harness(harness)
    recorder = Dialogues(
        harness.engine,
        chat,
        task=task,
        seed=seed,
        budget=budget,
        sampling=harness.sampling,
        note=note,
        checkpoint=harness.checkpoint,
    )
    return Guest(recorder, harness.tools, seed)


def workspace_of(task: Task) -> Workspace:
    """The workspace in which an agent begins, as the native loop's: handle `#0` is the question."""
    lettered = dict(zip(ascii_lowercase, task.names, strict=False))
    return Workspace((Artifact(task.subject, cells={"text": task.query, **lettered}),))
