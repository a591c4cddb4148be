"""The engines of a run, of the kind that its recipe names, opened together and closed together.

    embedded, vllm   one for each checkpoint, in this process; on vLLM a checkpoint may be a LoRA adapter of the
                     subagents' own
    server           vLLM servers: a pool for the policy, a pool for the subagents, one for each other checkpoint;
                     servers move between the first two as the queues ask

Where the placement says so, the subagents' checkpoints take turns on one engine instead.

Not here: what the engines do, and what is run on them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.config import Training
from swarm.checkpoint import load_model, ref_of
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.http import http_engines
from swarm.engine.pool import Pool, pool
from swarm.engine.qwen3 import dense
from swarm.engine.server import ServerConfig
from swarm.engine.shares import Shares
from swarm.engine.turns import turns
from swarm.engine.vllm import vllm_engines
from swarm.engine.vllm_core import VLLMConfig
from swarm.types import ServingEngine

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Engines:
    """One for each checkpoint, in the order in which they were asked for; the first is the policy's."""

    each: tuple[ServingEngine, ...]
    shares: Shares | None = None

    async def rebalance(self) -> Mapping[str, float]:
        """To be called between iterations, before the policy's update; metrics of both sides, where there are sides."""
        return {} if self.shares is None else await self.shares.rebalance()


@asynccontextmanager
async def open_engines(
    recipe: Training, folders: Sequence[Path], max_len: int, threads: int
) -> AsyncGenerator[Engines]:
    """Engines for the checkpoints, the policy's first, with contexts of up to `max_len` tokens, on so many cores.

    Raises CheckpointError for a folder that is none, EngineError for an engine that does not start.
    """
    if recipe.placement.subagents == "each":
        async with _one_each(recipe, folders, max_len, threads) as engines:
            yield engines
        return
    async with _one_each(recipe, folders[:2], max_len, threads) as engines, turns(engines.each[1]) as shared:
        views = [shared.view(ref_of(folder)) for folder in folders[1:]]
        yield Engines((engines.each[0], *views), engines.shares)


@asynccontextmanager
async def _one_each(recipe: Training, folders: Sequence[Path], max_len: int, threads: int) -> AsyncGenerator[Engines]:
    async with AsyncExitStack() as stack:
        match recipe.engine:
            case "embedded":
                embedded = [_embedded(recipe, f, max_len, threads) for f in folders]
                yield Engines(tuple([await stack.enter_async_context(e) for e in embedded]))
            case "vllm":
                yield Engines(await _vllm(stack, folders, vllm_config(recipe, max_len, threads)))
            case "server":
                yield await _servers(stack, recipe, folders, max_len, threads)


def _embedded(recipe: Training, folder: Path, max_len: int, threads: int) -> EmbeddedEngine:
    model = dense(load_model(ref_of(folder)))
    return EmbeddedEngine(model, max_len=max_len, threads=threads, cache_bytes=recipe.serving.cache_mib * _MIB)


def vllm_config(recipe: Training, max_len: int, threads: int) -> VLLMConfig:
    """What the recipe's settings are to vLLM."""
    s = recipe.serving
    return VLLMConfig(
        max_len=max_len,
        cache_bytes=s.cache_mib * _MIB,
        max_seqs=s.max_seqs,
        dtype=s.dtype,
        prefix_caching=s.prefix_caching,
        tensor_parallel=s.tensor_parallel,
        threads=threads,
        seconds=s.seconds,
    )


async def _vllm(stack: AsyncExitStack, folders: Sequence[Path], config: VLLMConfig) -> tuple[ServingEngine, ...]:
    """Folders that are LoRA adapters are served on the second checkpoint's engine, the subagents'."""
    adapters = [f for f in folders[2:] if (f / "adapter_config.json").exists()]
    whole = [f for f in folders if f not in adapters]
    order = [*whole[:1], *whole[2:], *whole[1:2]]
    engines = await stack.enter_async_context(vllm_engines(order, config, 0, adapters))
    serves = dict(zip([*order[1:], *adapters], engines[1:], strict=True))
    return (engines[0], *(serves[f] for f in folders[1:]))


async def _servers(
    stack: AsyncExitStack, recipe: Training, folders: Sequence[Path], max_len: int, threads: int
) -> Engines:
    """`placement.engines` servers for the first two checkpoints, half each to begin with, and one for each other."""
    count = recipe.placement.engines if len(folders) > 1 else 1
    first = count // 2 if len(folders) > 1 else 1
    serves = [*[folders[0]] * first, *[f for f in folders[1:2] for _ in range(count - first)], *folders[2:]]
    config = vllm_config(recipe, max_len, max(1, threads // len(serves)))
    configs = [ServerConfig(config, _gpus(recipe, k)) for k in range(len(serves))]
    engines = await stack.enter_async_context(http_engines(serves, configs))
    named = {f"server {k}": engine for k, engine in enumerate(engines)}
    policy = await _pool(stack, list(named)[:first], named)
    if len(folders) == 1:
        return Engines((policy,))
    subagents = await _pool(stack, list(named)[first:count], named, folders[1])
    shares = Shares(policy, subagents) if recipe.placement.balance else None
    return Engines((policy, subagents, *engines[count:]), shares)


async def _pool(
    stack: AsyncExitStack, names: Sequence[str], engines: Mapping[str, ServingEngine], folder: Path | None = None
) -> Pool:
    members = {name: engines[name] for name in names}
    return await stack.enter_async_context(pool(members, ref_of(folder) if folder is not None else None))


def _gpus(recipe: Training, k: int) -> tuple[int, ...]:
    """Those of the k-th server: behind the learners', `tensor_parallel` each; none where there are none."""
    if not torch.cuda.is_available():
        return ()
    behind = math.ceil(recipe.placement.learners * recipe.placement.learner_gpus)
    width = recipe.serving.tensor_parallel
    return tuple(range(behind + k * width, behind + (k + 1) * width))
