"""What the tests of replay, fork and the debugging graph share: a swarm of scripted agents, and how it is run."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from swarm.chat import HermesChat
from swarm.loop import Harness, Subagent, begin, run
from swarm.transcript import Transcript
from swarm.types import Rollout, Trace, Turn
from tests.swarm_cases import TASK, call, chat, harness

CREATE = call("create_subagent", name="a", system_prompt="Read.")


def assign(prompt: str) -> Turn:
    return Turn("", (call("assign_task", agent="a", prompt=prompt),))


def lead(t: Transcript) -> Turn:
    """Creates a reader, looks something up, sets two to work at once, looks again, and hands in what came back."""
    echo = call("echo", text="look", url="w/1")
    turns = (Turn("| Z | 0 |", (CREATE, echo)), Turn("", (*assign("p").calls, *assign("q").calls)), Turn("", (echo,)))
    if t.last or len(t.exchanges) >= len(turns):
        return Turn("#rows #2 #3")
    return turns[len(t.exchanges)]


def reader(t: Transcript) -> Turn:
    """Looks twice, and answers with what it was told."""
    if t.last or len(t.exchanges) >= 2:
        return Turn(f"| {t.user.split()[0]} | {len(t.exchanges)} |\nfound")
    return Turn("", (call("echo", text=f"{t.user.split()[0]} {len(t.exchanges)}"),))


def swarm(
    policy: Callable[[Transcript], Turn] = lead,
    child: Harness | None = None,
    *,
    steps: int = 20,
    limits: SpawnLimits | None = None,
) -> Harness:
    limits, child = limits or SpawnLimits(), child or harness(reader, steps=9)
    return harness(policy, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits), steps=steps)


async def rolled(h: Harness, seed: int = 1) -> Rollout:
    return await run(h, begin(h, TASK, seed=seed))


def language(_: Trace) -> HermesChat:
    return chat()


def text(r: Rollout) -> str:
    return chat().decode([i for segment in r.trace.segments for i in segment.ids])
