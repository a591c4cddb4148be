"""The load of `benchmarks.scale` run by the one agent loop, as it is: `swarm.loop.run` under `swarm.gather`.

    swarm             each agent is a root; a chat format whose tokens are whole texts, the least that one can cost
    swarm_subagents   the same agents as subagents, up to a hundred for each orchestrator, assigned in one turn
    swarm_hermes      each agent is a root; the real chat format over the tokenizer of the demo

    python -m benchmarks.scale_swarm SYSTEM AGENTS STEPS      one line of JSON

Not here: the load itself, and what others do with it (`benchmarks.scale_cells`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio

from benchmarks.scale_cells import DEADLINE, Cell, Clocks, Measured, Ticks, look, measure, messages
from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from recipes.tokenizer import build_tokenizer
from swarm.chat import HermesChat
from swarm.gather import Job, gather
from swarm.loop import Harness, Subagent
from swarm.tools import CallContext, Tool
from swarm.types import (
    Budget,
    ChatFormat,
    CheckpointRef,
    Completion,
    Engine,
    EngineError,
    Rollout,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Turn,
)
from swarm.workspace import Workspace

WIDTH = 100
"""Subagents of an orchestrator."""

TASK = Task("scale", "List the airports.", "airports", "airport", ("airport", "elevation"), ())
LOOK = ToolSpec("look", "Look at a page.", {"type": "object", "properties": {}})


class WholeTexts:
    """A `ChatFormat` in which every text is one token: the least that a format can cost."""

    def __init__(self) -> None:
        self._texts = [""]
        self._ids = {"": 0}

    @property
    def stop(self) -> tuple[int, ...]:
        return (0,)

    def encode(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        return [self.encode(system), self.encode(user)]

    def observe(self, results: Sequence[str], note: str, *, closed: bool) -> list[int]:
        return [self.encode(text) for text in (*results, note)]

    def clipped(self, text: str, tokens: int) -> str:
        return text if tokens else ""

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Turn:
        message = json.loads(self._texts[ids[0]])
        if "answer" in message:
            return Turn(message["answer"])
        if "calls" in message:
            return Turn("", tuple(ToolCall(c["name"], c["arguments"]) for c in message["calls"]))
        return Turn("", (ToolCall(message["name"], message["arguments"]),))


@dataclass
class Look:
    """The load's tool; counts its calls."""

    calls: int = 0
    spec: ToolSpec = LOOK

    def prepare(self, call: ToolCall, context: CallContext) -> Workspace:
        return context.workspace

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        self.calls += 1
        return ToolResult((look(call.arguments),))


class Rehearsal:
    """An engine that says the messages in turn, and notes at which length of the prompt: there the others say them."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._left = list(reversed(completions))
        self.said: dict[int, Completion] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        await trio.lowlevel.checkpoint()
        self.said[len(ids)] = self._left.pop()
        return self.said[len(ids)]

    async def load(self, ref: CheckpointRef) -> None:
        raise EngineError("has no weights")


class TickEngine:
    """Says at each length of the prompt what was rehearsed, at the next tick. Keeps no prompt while it waits."""

    def __init__(self, ticks: Ticks, said: Mapping[int, Completion]) -> None:
        self._ticks, self._said, self._last = ticks, said, list(said.values())[-1]

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = self._said[len(ids)]
        del ids
        await self._ticks.next(completion is self._last)
        return completion

    async def load(self, ref: CheckpointRef) -> None:
        raise EngineError("has no weights")


def completion(ids: Sequence[int]) -> Completion:
    return Completion(tuple(ids), (0.0,) * len(ids), 0, "stop")


def harness(engine: Engine, chat: ChatFormat, tools: tuple[Tool, ...], steps: int) -> Harness:
    sampling = Sampling(256, stop=chat.stop)
    return Harness(engine, chat, tools, "Work.", sampling, Budget(steps + 1, 1 << 16, seconds=DEADLINE))


def roots(system: str, chat: ChatFormat, spoken: Sequence[Sequence[int]], agents: int) -> Measured:
    """Every agent by itself; `spoken`: the ids of what each says."""
    steps, tool = len(spoken), Look()
    said = rehearse(chat, spoken)
    ticks, clocks = Ticks(agents, trio.Event, trio.sleep), Clocks()
    h = harness(TickEngine(ticks, said), chat, (tool,), steps)
    rollouts = trio.run(play, h, agents, ticks)
    return clocks.measured(system, agents, steps, ticks, tool.calls, transcript_bytes(rollouts))


async def play(harness: Harness, agents: int, *clocks: Ticks) -> list[Rollout]:
    async with trio.open_nursery() as nursery:
        for ticks in clocks:
            nursery.start_soon(ticks.drive)
        jobs = [Job(harness, TASK, seed, harness.budget) for seed in range(agents)]
        return await gather(jobs, at_once=agents)


def subagents(agents: int, steps: int) -> Measured:
    """One orchestrator for each hundred: it creates a subagent, assigns all tasks at once, and answers."""
    if agents % WIDTH:
        raise SystemExit(f"agents = {agents}, want a multiple of {WIDTH}: each orchestrator has as many")
    chat, tool = WholeTexts(), Look()
    rehearsed = rehearse(chat, whole(chat, messages(steps)))
    above, below = (Ticks(n, trio.Event, trio.sleep) for n in (agents // WIDTH, agents))
    clocks = Clocks()
    child = harness(TickEngine(below, rehearsed), chat, (tool,), steps)
    limits = SpawnLimits(agents=1, assignments=WIDTH)
    spawning = (CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits))
    h = harness(TickEngine(above, leading(chat)), chat, spawning, steps + 1)
    rollouts = trio.run(play, h, agents // WIDTH, above, below)
    below.answers += above.answers
    return clocks.measured("swarm_subagents", agents, steps, below, tool.calls, transcript_bytes(rollouts))


def leading(chat: WholeTexts) -> dict[int, Completion]:
    """What an orchestrator says to its first prompt of two texts, and to that with its turn, its results and a note."""
    create = {"name": "create_subagent", "arguments": {"name": "reader", "system_prompt": "Read."}}
    assign = [
        {"name": "assign_task", "arguments": {"agent": "reader", "prompt": f"Pages from {k}."}} for k in range(WIDTH)
    ]
    spawn, answer = whole(chat, (json.dumps({"calls": [create, *assign]}), json.dumps({"answer": "done"})))
    return {2: completion(spawn), 2 + 2 + len((create, *assign)) + 1: completion(answer)}


def rehearse(chat: ChatFormat, spoken: Sequence[Sequence[int]]) -> dict[int, Completion]:
    """Runs one agent alone, that says this turn by turn."""
    engine = Rehearsal([completion(ids) for ids in spoken])
    trio.run(play, harness(engine, chat, (Look(),), len(spoken)), 1)
    return engine.said


def whole(chat: WholeTexts, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Each text and its end, as ids."""
    return [(chat.encode(text), 0) for text in texts]


def transcript_bytes(rollouts: Sequence[Rollout]) -> int:
    """Bytes of the spans and acts of a tree and of the tuples that they consist of, each object counted once.

    The ids and log-probabilities themselves are the same objects for all agents, and so is what each agent says.
    """
    seen: dict[int, int] = {}
    waiting = list(rollouts)
    while waiting:
        rollout = waiting.pop()
        waiting += rollout.children
        for segment in rollout.trace.segments:
            for part in (segment.spans, *segment.spans, *(x for s in segment.spans for x in (s.ids, s.logprobs))):
                seen[id(part)] = sys.getsizeof(part)
        acts = rollout.trace.acts
        for part in (acts, *acts, *(x for a in acts for r in a.results for x in (a.results, r, r.parts, *r.parts))):
            seen[id(part)] = sys.getsizeof(part)
    return sum(seen.values())


def plain(agents: int, steps: int) -> Measured:
    chat = WholeTexts()
    return roots("swarm", chat, whole(chat, messages(steps)), agents)


def hermes(agents: int, steps: int) -> Measured:
    texts = messages(steps)
    chat = HermesChat(build_tokenizer([TASK.query, *texts]), terse_tools=True)
    calls = [json.loads(text) for text in texts[:-1]]
    spoken = [chat.encode_turn("", (ToolCall(c["name"], c["arguments"]),)) for c in calls]
    return roots("swarm_hermes", chat, [*spoken, chat.encode_turn(json.loads(texts[-1])["answer"])], agents)


CELLS: Mapping[str, Cell] = {"swarm": plain, "swarm_subagents": subagents, "swarm_hermes": hermes}

if __name__ == "__main__":
    measure(CELLS, sys.argv[1:])
