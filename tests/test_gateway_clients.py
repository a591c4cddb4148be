"""Agents of other houses, unmodified, each a program of its own, through the gateway; and what they leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm.gateway import Gateway, serving
from swarm.gateway_agent import CommandAgent
from swarm.loop import Harness
from swarm.types import Budget, Rollout, Turn
from tests.swarm_cases import TASK, call, harness, says

AGENTS = Path(__file__).parent / "agents"
CALLS = (Turn("Look.", (call("echo", text="x"), call("echo", text="y"))), Turn("", (call("echo", text="z"),)))


def program(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(AGENTS / f"{name}_agent.py"), *options)


async def rolled(h: Harness, command: tuple[str, ...], *, note: bool = False, seed: int = 1) -> Rollout:
    async with serving(Gateway()) as gateway:
        agent = CommandAgent(gateway, h, command, note=note)
        return await agent.roll(TASK, seed, Budget(h.budget.critical_steps, 4096, 60.0))


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--stream",)])
@pytest.mark.parametrize("name", ["openai", "langchain", "pydantic"])
async def test_a_client_of_another_house_is_one_segment_that_only_grows(name: str, option: tuple[str, ...]) -> None:
    r = await rolled(harness(says(*CALLS, Turn("| A | 1 |\nfound it"))), program(name, *option))
    assert (r.trace.status, r.trace.error) == ("answered", "")
    assert r.answer == "| A | 1 |\nfound it"
    assert r.table == (("A", "1"),)
    assert [[s.kind for s in segment.spans] for segment in r.trace.segments] == [
        ["prompt", "sampled", "observed", "sampled", "observed", "sampled"]
    ]
    assert [s.main for s in r.ledger.stages] == [2, 1, 1]
