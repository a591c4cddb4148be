"""Engines stepped inline, by the thread that asks: no tasks, no scheduling, no loop. Only a benchmark does this."""

from __future__ import annotations

from itertools import count

import torch

from benchmarks.programs import Call, Step
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.requests import Request
from swarm.engine.vllm_core import Core
from swarm.engine.vllm_core import Request as CoreRequest
from swarm.seeds import derive
from swarm.types import Sampling


def vllm_step(core: Core) -> Step:
    """vLLM's core, which samples until the number of tokens of a call is reached."""
    names = count()
    waiting: dict[str, Call] = {}

    def step(new: list[Call]) -> list[Call]:
        requests: list[CoreRequest] = []
        for call in new:
            name = f"inline-{next(names)}"
            waiting[name] = call
            sampling = Sampling(call.said, seed=derive(0, name))
            requests.append(CoreRequest(name, call.ids, sampling, 0.0, done=None))  # pyright: ignore[reportArgumentType]
        return [waiting.pop(o.name) for o in core.step(requests, ()) if o.finish]

    return step


def embedded_step(engine: EmbeddedEngine) -> Step:
    """The embedded engine's own step, in this thread."""
    seeds = count()
    waiting: dict[int, Call] = {}

    def step(new: list[Call]) -> list[Call]:
        for call in new:
            sampling = Sampling(call.said, seed=derive(0, next(seeds)))
            request = Request(call.ids, len(call.ids), len(call.ids) + call.said, sampling, 0.0)
            waiting[id(request)] = call
            engine._queue.append(request)
        engine._admit()
        batch = engine._plan()
        sampled = engine._compute(batch, torch.get_num_threads())
        for request, (token, logprob) in zip([r for part in batch for r in part], sampled, strict=True):
            engine._advance(request, token, logprob)
        done = [r for r in engine._active if r.done.is_set()]
        engine._active = [r for r in engine._active if not r.done.is_set()]
        return [waiting.pop(id(r)) for r in done]

    return step
