"""The command `swarm-rl gateway`: a run's policy behind an OpenAI-compatible address, for an agent started by hand.

    task ─▶ address and key shown ─▶ … the agent works … ─▶ POST /answer ─▶ scores shown, rollout recorded ─▶ next task

An agent that is a program needs none of this: `swarm-rl eval RUN --harness program --program COMMAND` starts it.
Not here: the gateway itself (`swarm.gateway`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import trio
from rich.console import Console
from rich.markup import escape

from recipes.arguments import UsageError, parser_of, positive, rows_range
from recipes.cast.book import last_cast
from recipes.config import Recipe
from recipes.grid.runs import read_recipe
from recipes.harnesses import System, load
from recipes.session import load_tokenizer, session
from rewards.table import table_scores
from swarm.context import ContextPolicy
from swarm.gateway import Gateway, serving
from swarm.gateway_agent import environment_of
from swarm.gateway_guest import guest_of
from swarm.loop import Harness
from swarm.records import write
from swarm.seeds import derive
from swarm.types import Budget, Rollout, Task

_POLICY = System("gateway", "orchestrator", "policy")


def gateway_command(argv: Sequence[str], console: Console) -> int:
    """Serves one task after the other until all are answered; the exit code. Raises UsageError, OSError and others."""
    o = _parser().parse_args(argv)
    recipe = read_recipe(o.run)
    if not isinstance(recipe, Recipe):
        raise UsageError(f"gateway: {o.run} is a run on trails, want one on tables")
    trio.run(_serve, recipe, o, console)
    return 0


def _parser() -> argparse.ArgumentParser:
    words = (
        "Serves a run's policy in OpenAI's protocol, one held-out task after the other. Shows for each the address\n"
        "and the key that an agent needs, waits for its answer, and prints how good it is."
    )
    parser = parser_of("gateway", "RUN [options]", words, "swarm-rl gateway runs/wide_search --record agent.rec")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--tasks", type=positive, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--task-seed", type=int, default=0, help="other tasks (default: %(default)s)")
    parser.add_argument("--rows", type=rows_range, default=(3, 80), help="sizes of the tables (default: 3-80)")
    parser.add_argument("--seconds", type=positive, default=3600, help="a task may take (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="whom it listens to (default: this machine alone)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the rollouts to FILE")
    return parser


async def _serve(recipe: Recipe, o: argparse.Namespace, console: Console) -> None:
    policy = o.run / "policy"
    async with session(recipe, load_tokenizer(policy)) as s, serving(Gateway(), o.host, o.port) as gateway:
        await s.recast(await trio.to_thread.run_sync(last_cast, o.run))
        await load(s, _POLICY, policy)
        harness = replace(s.harness(), context=ContextPolicy())
        budget = Budget(recipe.evaluation.budget, harness.budget.tokens, o.seconds)
        for k, task in enumerate(s.tasks.draw("heldout", o.tasks, o.task_seed, rows=o.rows)):
            rollout = await visited(gateway, harness, task, derive(o.task_seed, "gateway", k), budget, console)
            console.print(_outcome(rollout))
            if o.record:
                write(o.record, [rollout])


async def visited(
    gateway: Gateway, harness: Harness, task: Task, seed: int, budget: Budget, console: Console
) -> Rollout:
    """Shows how an agent reaches the gateway for this task, and waits for its answer, or for the deadline."""
    guest = guest_of(harness, task, seed, budget, note=True)
    with gateway.opened(guest) as url:
        console.print(_invitation(task, url, environment_of(url, gateway.model, harness.system)))
        with trio.move_on_after(budget.seconds):
            return guest.rollout(await guest.answer(), "answered")
    return guest.rollout("", "truncated", "deadline")


def _invitation(task: Task, url: str, environment: dict[str, str]) -> str:
    told = [name for name in environment if name.lower() != "no_proxy"]
    lines = [f"export {name}='{environment[name]}'" for name in told]
    answer = f"""curl {url}/answer -d '{{"content": "…"}}'"""
    return escape("\n".join(["", task.query, "", *lines, "", f"answer: {answer}"]))


def _outcome(r: Rollout) -> str:
    f1 = table_scores(r.task, r.table)["item_f1"]
    why = f" ({r.trace.error})" if r.trace.error else ""
    turns, segments = len(r.ledger.stages), len(r.trace.segments)
    spent = f"{turns} turns in {segments} segments, {r.ledger.critical_steps} critical steps"
    return f"{r.trace.status}{escape(why)}: item-F1 {f1:.2f}, {spent}, {r.ledger.tokens_sampled} tokens sampled"
