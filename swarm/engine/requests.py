# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The requests of the embedded engine: what it knows of each, how a step shares them out, what a step makes of a share.

Not here: when a request joins a step and leaves (`swarm.engine.embedded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import trio

from swarm.engine import kernels
from swarm.engine.kv import Chain
from swarm.engine.ragged import Floats, FusedWeights, Stepper, rows_of
from swarm.types import Completion, EngineError, Sampling

_SEED_MASK = 2**64 - 1


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made. `cached`: prompt tokens not computed again; `queue`: requests waiting now."""

    sampled: int = 0
    prefilled: int = 0
    cached: int = 0
    steps: int = 0
    seconds: float = 0.0
    active: int = 0
    queue: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One generate call. `ids` grows by what is sampled; the first `computed` have keys and values."""

    ids: list[int]
    prompt: int
    limit: int
    sampling: Sampling
    born: float
    done: trio.Event = field(default_factory=trio.Event)
    chain: Chain | None = None
    computed: int = 0
    chunk: int = 0
    cached: int = 0
    queued: float = 0.0
    logprobs: list[float] = field(default_factory=list[float])
    dropped: bool = False
    error: EngineError | ValueError | None = None
    completion: Completion | None = None


def split(chosen: Sequence[Request], threads: int) -> list[list[Request]]:
    """Splits those of a step over the threads, in order, so that each has about as much to compute."""
    if threads == 1:
        return [list(chosen)]
    costs = np.cumsum([r.chunk * (1000 + r.computed + r.chunk / 2) for r in chosen])
    cuts = np.searchsorted(costs, costs[-1] * np.arange(1, threads) / threads)
    bounds = [0, *(int(c) for c in cuts), len(chosen)]
    return [list(chosen[a:b]) for a, b in pairwise(bounds) if b > a]


def sample(weights: FusedWeights, cache: Floats, stepper: Stepper, part: Sequence[Request]) -> list[tuple[int, float]]:
    """One token and logprob for each request, meaningless for one whose prompt is not yet all computed."""
    chunks = [r.ids[r.computed : r.computed + r.chunk] for r in part]
    rows = rows_of(chunks, [r.computed for r in part], [r.chain.blocks if r.chain else [] for r in part])
    with torch.inference_mode():
        logits_SV = stepper.logits(weights, cache, rows)
    ids, logprobs = kernels.sampled(
        logits_SV,
        np.array([r.sampling.temperature for r in part], np.float64),
        np.array([r.sampling.top_p for r in part], np.float64),
        np.array([r.sampling.seed & _SEED_MASK for r in part], np.uint64),
        np.array([len(r.ids) for r in part], np.uint64),
    )
    if ids.min() < 0:
        raise EngineError("the logits are not finite")
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))
