"""Agents of other houses, unmodified, each a program of its own, through the gateway; and what they leave."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing
from rich.console import Console

from recipes.gateway import visited
from swarm.gateway import Gateway, serving
from swarm.gateway_agent import CommandAgent
from swarm.loop import Harness, begin, run
from swarm.types import Budget, Rollout, Turn
from tests.swarm_cases import TASK, call, harness, says
from tests.test_spawning import CREATE, assign, swarm

AGENTS = Path(__file__).parent / "agents"
CALLS = (Turn("", (call("echo", text="x"), call("echo", text="y"))), Turn("", (call("echo", text="z"),)))
DONE = harness(says(Turn("done")))


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


@pytest.mark.slow
async def test_an_orchestrator_in_a_program_is_the_native_one_token_for_token() -> None:
    turns = (Turn("", (CREATE, assign("p"), assign("q"))), CALLS[0], Turn("#1 #2\n| B | #0 |"))
    h = swarm(says(*turns))
    native = await run(h, begin(h, TASK, 1))
    told = await rolled(h, program("openai"), note=True)
    assert told.trace.segments == native.trace.segments
    assert told.trace.status == native.trace.status
    assert [(c.trace.agent, c.trace.segments) for c in told.children] == [
        (c.trace.agent, c.trace.segments) for c in native.children
    ]
    assert (told.answer, told.table) == (native.answer, native.table)
    assert told.ledger.stages == native.ledger.stages
    assert told.ledger.counts == native.ledger.counts


# --- an agent that is started by hand ------------------------------------------------------------


async def test_whoever_is_shown_the_address_may_hand_in_one_answer() -> None:
    shown = Console(file=StringIO(), width=500)
    made: list[Rollout] = []
    async with serving(Gateway()) as gateway, trio.open_nursery() as nursery:

        async def visit() -> None:
            made.append(await visited(gateway, DONE, TASK, 1, Budget(9, 999), shown))

        nursery.start_soon(visit)
        await trio.testing.wait_all_tasks_blocked()
        text = shown.file.getvalue()
        [url] = set(re.findall(r"(http\S+)/v1'", text))
        assert TASK.query in text
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            assert (await http.post(f"{url}/answer", json={"content": 7})).status_code == 400
            assert (await http.post(f"{url}/answer", json={"content": "| A | 1 |"})).status_code == 200
    assert (made[0].trace.status, made[0].table) == ("answered", (("A", "1"),))


async def test_an_answer_that_does_not_come_is_a_deadline(autojump_clock: trio.testing.MockClock) -> None:
    made = await visited(Gateway(), DONE, TASK, 1, Budget(9, 999, seconds=5.0), Console(file=StringIO()))
    assert (made.trace.status, made.trace.error, made.ledger.seconds) == ("truncated", "deadline", 5.0)


# --- programs that fail ------------------------------------------------------------------------


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def test_the_question_comes_in_and_what_is_printed_is_the_answer() -> None:
    r = await rolled(DONE, ("/bin/sh", "-c", 'cat; echo; echo "| $0 | #0 |"; echo log >&2', "{task}"))
    assert r.answer == f"{TASK.query}\n| {TASK.query} | #0 |"
    assert r.table == ((TASK.query, TASK.subject),)
    assert (r.trace.status, r.trace.segments) == ("answered", ())


async def test_a_program_that_fails_is_an_error_with_the_last_line_of_its_log() -> None:
    r = await rolled(DONE, ("/bin/sh", "-c", "echo partly; echo 'no luck' >&2; exit 3"))
    assert (r.trace.status, r.trace.error) == ("error", "the agent ended with status 3: no luck")


@pytest.mark.slow
async def test_a_program_that_gives_up_for_want_of_steps_is_truncated_and_no_error() -> None:
    h = harness(says(Turn("", (call("echo", text="x"),))))
    h = replace(h, budget=replace(h.budget, critical_steps=2))
    r = await rolled(h, program("openai"))
    assert (r.trace.status, r.trace.error) == ("truncated", "budget")
    assert r.ledger.critical_steps == 2


def test_a_program_that_is_not_there_is_refused_before_anything_is_run() -> None:
    with pytest.raises(ValueError, match="command 'no-such-program', want a program"):
        CommandAgent(Gateway(), DONE, ("no-such-program",))


ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
{}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["time.sleep(600)", "print('done', flush=True)"])
async def test_nothing_is_left_of_a_program_at_its_deadline_or_its_end(ending: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = (*python(ESCAPES.format(f"while not os.path.getsize(sys.argv[1]): pass\n{ending}")), str(pid))
    pid.touch()
    async with serving(Gateway()) as gateway:
        agent = CommandAgent(gateway, DONE, command, grace=0.1)
        r = await agent.roll(TASK, 1, Budget(9, 999, seconds=2.0))
        assert len(gateway) == 0
    assert r.trace.status == ("truncated" if "sleep" in ending else "answered")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_a_rollout_that_is_cancelled_ends_its_program_and_its_key() -> None:
    async with serving(Gateway()) as gateway:
        agent = CommandAgent(gateway, DONE, ("/bin/sleep", "600"), grace=0.1)
        started = time.monotonic()
        with trio.move_on_after(0.05):
            await agent.roll(TASK, 1, Budget(9, 999))
        assert len(gateway) == 0
    assert time.monotonic() - started < 30
