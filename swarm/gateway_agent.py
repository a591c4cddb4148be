"""Any agent program as a way to run a task: started anew for each rollout, its model is the gateway.

    task ─▶ standard input ─▶ program ── OPENAI_BASE_URL, OPENAI_API_KEY ──▶ gateway (policy, tools)
    answer ◀─ standard output ◀──┘          (its log: standard error)

The program reads the question, works, prints its answer and ends. It runs on a leash (`swarm.engine.leash`): at its
deadline, and when this process is gone, it ends with everything that it started. Not here: what it asks
(`swarm.gateway`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from swarm.engine import leash
from swarm.gateway import Gateway
from swarm.gateway_guest import check_harness, guest_of
from swarm.loop import Harness
from swarm.types import Budget, Rollout, Task

QUESTION = "{task}"
"""An argument of the command in whose place the question is given, beside standard input."""

_SHELL = ("/bin/sh", "-c", 'exec "$@" < "$0"')
_LONGEST_ANSWER = 1 << 20
_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """A `Runner` of a program: `CommandAgent(gateway, builder.single(engine), ("python", "my_agent.py"))`.

    The program takes the place of the loop of `harness`; engine, chat, tools, system prompt, sampling and budget are
    the harness's. With `note` the policy is shown what is left of its budget. At its deadline the program has `grace`
    seconds before it is killed. Raises ValueError for a program that is not there, and for a harness that rewrites its
    context, which is the program's own business, or whose chat is of no known family.
    """

    gateway: Gateway
    harness: Harness
    command: tuple[str, ...]
    note: bool = True
    grace: float = 1.0

    def __post_init__(self) -> None:
        if not self.command or shutil.which(self.command[0]) is None:
            raise ValueError(f"agent: command {' '.join(self.command)!r}, want a program that can be run")
        check_harness(self.harness)

    @property
    def budget(self) -> Budget:
        return self.harness.budget

    def fits(self, task: Task) -> str:
        """See `Runner`: any task will do."""
        return ""

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        """See `Runner`. A program that fails is an error, unless its last request was refused for want of budget."""
        guest = guest_of(self.harness, task, seed, budget, note=self.note)
        command = [task.query if word == QUESTION else word for word in self.command]
        with self.gateway.opened(guest) as url:
            environment = environment_of(url, self.gateway.model, self.harness.system)
            ended = await run_program(command, task.query, environment, budget.seconds, self.grace)
        if ended is None:
            return guest.rollout("", "truncated", "deadline")
        if ended.status:
            return guest.rollout(ended.answer, "error", f"the agent ended with status {ended.status}: {ended.log}")
        return guest.rollout(ended.answer, "answered")


def environment_of(url: str, model: str, system: str) -> dict[str, str]:
    """What a program is told: how any OpenAI client finds the policy, and where the tools of the world are."""
    here = ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")))))
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": url.rpartition("/")[2],
        "OPENAI_MODEL": model,
        "SWARM_TOOLS_URL": f"{url}/tools",
        "SWARM_SYSTEM": system,
        "NO_PROXY": here,
        "no_proxy": here,
    }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: what it printed, its exit status, and the last line of its log."""

    answer: str
    status: int
    log: str


async def run_program(
    command: Sequence[str], text: str, environment: Mapping[str, str], seconds: float, grace: float
) -> Ended | None:
    """Runs a program with this text as its standard input; None if it was not through in time.

    Nothing of it is left when this returns or is cancelled.
    """
    with TemporaryDirectory(prefix="swarm-agent-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "task").write_text(text)
        process, out = _started(command, folder, environment, grace)
        answer: str | None = None
        async with out:
            try:
                with trio.move_on_after(seconds):
                    answer = await _last_of(out)
            finally:
                await _ended(process, grace)
        if answer is None:
            return None
        lines = (folder / "log").read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")
        return Ended(answer, process.returncode, last)


def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], grace: float
) -> tuple[subprocess.Popen[bytes], trio.lowlevel.FdStream]:
    words = [str(os.getpid()), str(grace), str(folder), "--", *_SHELL, str(folder / "task"), *command]
    out, theirs = os.pipe()
    try:
        with (folder / "log").open("wb") as log:
            # Not by trio's own means, which start it from a thread that ends.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__, *words],
                stdin=subprocess.PIPE,
                stdout=theirs,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
    finally:
        os.close(theirs)
    return process, trio.lowlevel.FdStream(out)


async def _last_of(out: trio.lowlevel.FdStream) -> str:
    """All that is printed up to the end, or the end of it where that is too much."""
    printed = bytearray()
    async for part in out:
        printed += part
        del printed[:-_LONGEST_ANSWER]
    return printed.decode(errors="replace").strip()


async def _ended(process: subprocess.Popen[bytes], grace: float) -> None:
    """Lets go of the leash and waits until nothing is left."""
    assert process.stdin is not None
    process.stdin.close()
    descriptor = os.pidfd_open(process.pid)
    try:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace + _KILL_SECONDS):
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
