"""What a batch of rollouts asked of an engine, as programs that can be run again with nothing between engine and calls.

    rollout ─▶ Program: call, children (all at once), call, children, …

Run inline, the next call of an agent is handed in as soon as the step before it is over: what a rollout would cost if
agents, tools and their scheduling cost nothing. Each call samples as many tokens after the same prompt as it did in
the rollout. Not here: what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.types import Rollout, Segment

Step = Callable[[list["Call"]], list["Call"]]
"""Takes new calls, makes one step of the engine, gives back the calls that are done."""


@dataclass(eq=False, slots=True)
class Call:
    """One turn: sample `said` tokens after `ids`."""

    ids: list[int]
    said: int
    owner: Running | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """An agent's turns, and the subagents that each of them started."""

    calls: tuple[tuple[tuple[int, ...], int], ...]
    children: tuple[tuple[Program, ...], ...]

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.calls) + sum(p.tokens for turn in self.children for p in turn)

    @property
    def requests(self) -> int:
        return len(self.calls) + sum(p.requests for turn in self.children for p in turn)


@dataclass(eq=False, slots=True)
class Running:
    """An agent under way: its next turn, and how many of the subagents that it waits for still run."""

    program: Program
    parent: Running | None
    at: int = 0
    waits: int = 0


def program_of(rollout: Rollout) -> Program:
    """The calls of a rollout's tree. A turn is a run of sampled spans that touch."""
    calls = [call for segment in rollout.trace.segments for call in _calls(segment)]
    children = iter(rollout.children)
    stages = rollout.ledger.stages
    started = [tuple(program_of(next(children)) for _ in stage.subagents) for stage in stages]
    return Program(tuple(calls), tuple(started[: len(calls)]) + ((),) * (len(calls) - len(started)))


def _calls(segment: Segment) -> list[tuple[tuple[int, ...], int]]:
    calls: list[tuple[tuple[int, ...], int]] = []
    before: tuple[int, ...] = ()
    touching = False
    for span in segment.spans:
        if span.kind == "sampled":
            ids, said = calls.pop() if touching else (before, 0)
            calls.append((ids, said + len(span.ids)))
        touching = span.kind == "sampled"
        before += tuple(span.ids)
    return calls


def run_inline(programs: Sequence[Program], step: Step) -> int:
    """Runs them all at once; returns the number of tokens."""
    new: list[Call] = []
    open_agents = 0
    for program in programs:
        open_agents += 1
        _next(Running(program, None), new)
    while open_agents:
        done = step(new)
        new = []
        for call in done:
            agent = call.owner
            assert agent is not None
            started = agent.program.children[agent.at]
            agent.at += 1
            agent.waits = len(started)
            for child in started:
                _next(Running(child, agent), new)
            if not started:
                open_agents -= _went_on(agent, new)
    return sum(p.tokens for p in programs)


def _went_on(agent: Running, new: list[Call]) -> int:
    """Hands in the next turn of whoever can go on; how many root agents have ended, 0 or 1."""
    while agent.at == len(agent.program.calls):
        if agent.parent is None:
            return 1
        agent = agent.parent
        agent.waits -= 1
        if agent.waits:
            return 0
    _next(agent, new)
    return 0


def _next(agent: Running, new: list[Call]) -> None:
    ids, said = agent.program.calls[agent.at]
    new.append(Call(list(ids), said, agent))
