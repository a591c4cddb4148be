"""A rollout of somebody else's graph while it is under way: its turns, its workspace, and its tools' calls.

    reply ─▶ the policy's turn is recorded ─▶ its calls are checked in call order (`swarm.calls`), none is run
    call  ─▶ one of them is run, when the graph asks for it; what it shows waits for those called before it

So a turn's calls come to the same as in the native loop, in whatever order and however many at once a graph runs
them. One workspace serves all agents of the graph: what one of them writes as `#4.b` means the same to another, and
a document has its whole label wherever the asking agent's own conversation does not show it. The handles that an
agent's first message names are written out below it, as for a subagent.

Not here: messages of LangChain (`swarm.graphs`), threads (`swarm.graph_bridge`), ids (`swarm.dialogue`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_lowercase

import trio
from msgspec import structs

from swarm.calls import Accepted, Checked, prepare
from swarm.chat import Chat
from swarm.dialogue import Dialogues, Reply, Said
from swarm.loop import Harness
from swarm.tools import CallContext
from swarm.types import Artifact, Budget, Rollout, Status, Task, ToolCall, ToolResult, ToolSpec, Turn
from swarm.workspace import Workspace


@dataclass(slots=True)
class _Calls:
    """A turn's calls of our tools. `texts`: what the conversation shows; `ended`: of the calls that were begun."""

    names: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    checked: Checked
    texts: list[str]
    ended: dict[int, trio.Event] = field(default_factory=dict[int, trio.Event])
    shown: dict[int, str] = field(default_factory=dict[int, str])


class Underway:
    """One rollout of an agent that a graph runs: `Underway(harness, chat, task, seed, budget, note=True)`."""

    def __init__(self, harness: Harness, chat: Chat, task: Task, seed: int, budget: Budget, *, note: bool) -> None:
        self.harness, self.task, self.seed = harness, task, seed
        lettered = dict(zip(ascii_lowercase, task.names, strict=False))
        self.workspace = Workspace((Artifact(task.subject, cells={"text": task.query, **lettered}),))
        self._recorder = Dialogues(
            harness.engine,
            chat,
            task=task,
            seed=seed,
            budget=budget,
            sampling=harness.sampling,
            note=note,
            checkpoint=harness.checkpoint,
        )
        self._calls: dict[str, tuple[_Calls, int]] = {}
        self._children: dict[int, Rollout] = {}
        self._expanded = {task.query: task.query}
        self._asked = 0

    def count(self, kind: str) -> None:
        """Counts an event in the ledger."""
        self._recorder.count(kind)

    async def reply(self, messages: Sequence[Said], tools: Sequence[ToolSpec], max_tokens: int) -> Reply:
        """What the policy says next, in at most so many tokens. Raises DialogueError and EngineError (`Dialogues`)."""
        sampling = structs.replace(self.harness.sampling, max_tokens=max_tokens)
        messages = self._explained(messages)
        reply = await self._recorder.reply(messages, tools, sampling)
        if self.harness.scratchpad:
            self.workspace = self.workspace.written(reply.said.content)
        if reply.said.calls:
            self._check([m.content for m in messages], reply.said, tools)
        return reply

    def call(self, name: str, call: ToolCall) -> Awaitable[str]:
        """Begins the call of this name, to be awaited for what the policy is to read; again, it gives the same.

        Raises ValueError where the policy made no such call of our tools, or with other arguments.
        """
        if name not in self._calls:
            raise ValueError(f"{call.name}: no call {name!r} by the policy, want a tool call of one of its messages")
        calls, place = self._calls[name]
        if call != calls.calls[place]:
            given = calls.calls[place].arguments
            raise ValueError(f"{call.name}: arguments {call.arguments}, want the policy's own, {given}")
        under_way = calls.ended.get(place)
        if under_way is not None:
            return self._again(calls, place, under_way)
        calls.ended[place] = trio.Event()
        return self._run(calls, place)

    def rollout(self, answer: str, status: Status, error: str) -> Rollout:
        """The rollout as it ended. One that was cut hands in the rows that it had written."""
        cut = status in ("truncated", "exhausted")
        table = self.workspace.rows if cut else self.workspace.written(answer).table(answer)
        children = tuple(child for _, child in sorted(self._children.items(), key=lambda item: item[0]))
        return replace(self._recorder.rollout(answer, table, status, error), children=children)

    def _explained(self, messages: Sequence[Said]) -> list[Said]:
        """The messages, with the handles of what the user says first written out: once, so that it stays the same."""
        opening = next((k for k, m in enumerate(messages) if m.role == "assistant"), len(messages))
        known, expand = self._expanded, self.workspace.expand
        first = [
            structs.replace(m, content=known.setdefault(m.content, expand(m.content))) if m.role == "user" else m
            for m in messages[:opening]
        ]
        return [*first, *messages[opening:]]

    def _check(self, heard: list[str], said: Said, tools: Sequence[ToolSpec]) -> None:
        """Checks the calls of our tools; the graph's own are its business, others nobody's."""
        known, ordinary = {tool.name for tool in tools}, {tool.name for tool in tools if tool.ordinary}
        own = [(n, c) for n, c in zip(said.ids, said.calls, strict=True) if c.name in self.harness.by_name]
        foreign = sum(c.name in ordinary and c.name not in self.harness.by_name for c in said.calls)
        self._recorder.count("unknown_tool", sum(c.name not in known for c in said.calls))
        paid = max(1, sum(c.name in ordinary for c in said.calls))
        affordable = self._recorder.left + paid - 1 - foreign
        context = CallContext("main", 0, self._asked, self.seed, affordable, self.task, self.workspace)
        checked = prepare(self.harness.by_name, Turn("", tuple(c for _, c in own)), context)
        self.workspace = checked.workspace
        self._asked += len(own)
        self._recorder.ran(said.ids[0], checked.ordinary + foreign)
        calls = _Calls(tuple(n for n, _ in own), tuple(c for _, c in own), checked, [*heard, said.content])
        self._calls.update({name: (calls, place) for place, name in enumerate(calls.names)})

    async def _run(self, calls: _Calls, place: int) -> str:
        before = [event for k, event in calls.ended.items() if k < place]
        try:
            result = await _result(calls.checked, place)
            for event in before:
                await event.wait()
            return self._shown(calls, place, result)
        finally:
            calls.ended[place].set()

    async def _again(self, calls: _Calls, place: int, under_way: trio.Event) -> str:
        """What the call gave, or gives where it was cancelled."""
        await under_way.wait()
        if place in calls.shown:
            return calls.shown[place]
        calls.ended[place] = trio.Event()
        return await self._run(calls, place)

    def _shown(self, calls: _Calls, place: int, result: ToolResult) -> str:
        """Files what a call brought, as the conversation of its turn shows it."""
        seen = self.workspace.forgotten(calls.texts)
        workspace, text = seen.show(result.parts)
        self.workspace = structs.replace(workspace, faded=frozenset())
        calls.texts.append(text)
        calls.shown[place] = text
        if result.error:
            self._recorder.count(result.error)
        if result.child is not None:
            self._children[_context(calls.checked, place).index] = result.child
            self._recorder.spawned(calls.names[place], result.child.ledger.critical_steps)
        return text


async def _result(checked: Checked, place: int) -> ToolResult:
    accepted = _accepted(checked, place)
    return checked.results[place] if accepted is None else await accepted.tool.run(accepted.call, accepted.context)


def _accepted(checked: Checked, place: int) -> Accepted | None:
    return next((a for a in checked.accepted if a.place == place), None)


def _context(checked: Checked, place: int) -> CallContext:
    accepted = _accepted(checked, place)
    assert accepted is not None
    return accepted.context
