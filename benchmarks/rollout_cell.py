"""One engine and number of threads, in a process of its own: rollouts of the main job, and the same calls inline.

    python -m benchmarks.rollout_cell embedded|vllm THREADS REPEATS EPISODES 0|1 (prefix caching)

Prints one line of JSON. Not here: comparing cells (`benchmarks.rollout`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import trio

from benchmarks.inline import embedded_step, vllm_step
from benchmarks.process import peak_mb
from benchmarks.programs import Program, program_of, run_inline
from recipes.config import SHIPPED, Recipe
from recipes.engines import vllm_config
from recipes.session import load_tokenizer, open_world, roll_out
from recipes.systems import Builder
from recipes.wide_search import wide_search
from swarm.chat import HermesChat
from swarm.checkpoint import load_model, ref_of
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.probe import verify
from swarm.engine.thread import Thread
from swarm.engine.vllm import serving
from swarm.engine.vllm_core import Core
from swarm.loop import Harness
from swarm.types import Rollout, ServingEngine, Task

BUDGET = 40
MIB = 1 << 20


def inline_seconds(engine: EmbeddedEngine | Core, programs: list[Program]) -> float:
    began = perf_counter()
    run_inline(programs, vllm_step(engine) if isinstance(engine, Core) else embedded_step(engine))
    return perf_counter() - began


@asynccontextmanager
async def opened(kind: str, recipe: Recipe) -> AsyncGenerator[tuple[ServingEngine, Callable[[list[Program]], Any]]]:
    """An engine, and a way to run programs on it inline while it serves nobody."""
    if kind == "embedded":
        model = load_model(ref_of(SHIPPED))
        cache = recipe.serving.cache_mib * MIB
        async with EmbeddedEngine(model, max_len=recipe.main.context, threads=recipe.threads, cache_bytes=cache) as e:

            async def inline(programs: list[Program]) -> float:
                return inline_seconds(e, programs)

            yield e, inline
        return
    thread = Thread("vllm", 600.0)
    config = vllm_config(recipe, recipe.main.context, recipe.threads)
    core = await thread.call(lambda: Core(SHIPPED, config), 600.0)
    async with serving(core, thread) as engine:

        async def inline(programs: list[Program]) -> float:
            return await thread.call(lambda: inline_seconds(core, programs), 600.0)

        yield engine, inline
    await thread.call(core.shutdown)
    thread.close()


async def measured(kind: str, recipe: Recipe, repeats: int, episodes: int) -> dict[str, Any]:
    torch.set_num_threads(recipe.threads)
    world, tasks = open_world(recipe.world)
    builder = Builder(world, HermesChat(load_tokenizer(SHIPPED), terse_tools=True), recipe)
    drawn = tasks.draw("train", episodes, 0, rows=recipe.tasks.rows)
    model = load_model(ref_of(SHIPPED))
    started = perf_counter()
    async with opened(kind, recipe) as (engine, inline):
        start = perf_counter() - started
        harness = builder.swarm(engine, builder.everybody(engine))
        rollouts, _ = await swarm_seconds(harness, drawn)  # warms up, and says what is to be run inline
        programs = [program_of(r) for r in rollouts]
        found: dict[str, list[float]] = {"swarm": [], "inline": [], "update": []}
        for _ in range(repeats):
            for name in ("swarm", "inline"):
                began = perf_counter()
                await engine.update(model.state_dict(), 0)  # forgets what was cached, so that all begin alike
                await verify(engine, model, model.config.vocab_size, 0, bound=0.01)
                found["update"].append(perf_counter() - began)
                await engine.update(model.state_dict(), 0)
                found[name].append(
                    await inline(programs) if name == "inline" else (await swarm_seconds(harness, drawn))[1]
                )
    prompts, cached = (sum(_total(r, name) for r in rollouts) for name in ("tokens_prompt", "tokens_cached"))
    return found | {
        "tokens": sum(p.tokens for p in programs),
        "requests": sum(p.requests for p in programs),
        "agents": sum(_agents(r) for r in rollouts),
        "cached": cached / prompts,
        "start": start,
        "peak_mb": peak_mb(),
    }


async def swarm_seconds(harness: Harness, tasks: list[Task]) -> tuple[list[Rollout], float]:
    began = perf_counter()
    rollouts = await roll_out(harness, tasks, [BUDGET] * len(tasks), 0, at_once=len(tasks))
    return rollouts, perf_counter() - began


def _agents(rollout: Rollout) -> int:
    return 1 + sum(_agents(c) for c in rollout.children)


def _total(rollout: Rollout, name: str) -> int:
    own = rollout.ledger.tokens_prompt if name == "tokens_prompt" else rollout.ledger.tokens_cached
    return own + sum(_total(c, name) for c in rollout.children)


def main() -> None:
    kind, threads, repeats, episodes, prefix = sys.argv[1:]
    recipe = wide_search()
    serving_ = replace(recipe.serving, prefix_caching=prefix == "1")
    recipe = replace(recipe, threads=int(threads), engine=kind, serving=serving_)
    print(json.dumps(trio.run(measured, kind, recipe, int(repeats), int(episodes))))


if __name__ == "__main__":
    main()
