"""The engines of a run, of the kind that its recipe names, opened together and closed together.

    embedded, vllm   one for each checkpoint, in this process; on vLLM a checkpoint may be a LoRA adapter of the
                     subagents' own
    server           vLLM servers: a pool for the policy, a pool for the subagents, one for each other checkpoint;
                     servers move between the first two as the queues ask

Where the placement says so, the subagents' checkpoints take turns on one engine instead. A checkpoint that is named
only later gets an engine of its own, of the same kind or of another, or its turn.

Not here: what the engines do, and what is run on them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import trio
from transformers import Qwen3ForCausalLM

from recipes.config import Recipe, Training
from recipes.named import resolve
from recipes.placement import EngineKind
from swarm.alike import check_alike
from swarm.checkpoint import ADAPTER_CONFIG, frozen_ref, load_model, ref_of
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.http import http_engines
from swarm.engine.pool import Pool, pool
from swarm.engine.qwen3 import dense
from swarm.engine.server import ServerConfig
from swarm.engine.settle import running
from swarm.engine.shares import Shares
from swarm.engine.turns import Turns, turns
from swarm.engine.vllm import vllm_engines
from swarm.engine.vllm_core import VLLMConfig
from swarm.folders import CheckpointError, read_json
from swarm.types import CheckpointRef, EngineError, ServingEngine

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """One engine for each folder, in their order; `shares` where servers move between the first two."""

    each: tuple[ServingEngine, ...]
    shares: Shares | None = None


@dataclass(eq=False, slots=True)
class _Late:
    """An engine that is opened while others serve; one that `stays` is closed at the end."""

    ref: CheckpointRef
    kind: EngineKind
    at: int
    stays: bool = False
    ready: trio.Event = field(default_factory=trio.Event)
    stop: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)
    engine: ServingEngine | None = None
    error: CheckpointError | EngineError | None = None


class Engines:
    """The policy's engine, and those of frozen checkpoints, by sha256: opened at first, or when they are asked for."""

    def __init__(
        self, recipe: Training, max_len: int, threads: int, refs: Sequence[CheckpointRef], opened: Opened,
        shared: Turns | None,
    ) -> None:  # fmt: skip
        self.each = opened.each
        self._recipe, self._max_len, self._threads = recipe, max_len, threads
        self._shares, self._shared = opened.shares, shared
        self._like = refs[1] if len(refs) > 1 else None
        self._kinds = {ref.sha256: recipe.engine for ref in refs[1:]}
        self._first = dict(zip((ref.sha256 for ref in refs[1:]), opened.each[1:], strict=True))
        self._late: dict[tuple[str, EngineKind], _Late] = {}
        self._places = recipe.placement.engines + max(0, len(refs) - 2)
        self._asked, self._asks = trio.open_memory_channel[_Late](math.inf)

    async def serve(
        self, ref: CheckpointRef, kind: EngineKind | Literal[""] = "", *, stays: bool = False
    ) -> ServingEngine:
        """The engine of a frozen checkpoint, of this kind or of the run's own; it is opened unless it is there.

        One that `stays` takes no turns with the subagents, whose checkpoints it need not be like, and is never retired.
        Raises CheckpointError for one that cannot be served so, EngineError for an engine that does not start.
        """
        kind = kind or self._recipe.engine
        if self._kinds.get(ref.sha256) == kind:
            return self._first[ref.sha256]
        if self._shared is not None and not stays and kind == self._recipe.engine and self._like is not None:
            check_alike(ref.path, self._like.path)
            self._first[ref.sha256], self._kinds[ref.sha256] = self._shared.view(ref), kind
            return self._first[ref.sha256]
        late = self._late.get((ref.sha256, kind))
        if late is None:
            late = self._late[ref.sha256, kind] = _Late(ref, kind, self._places)
            self._places += 1
            await self._asked.send(late)
        late.stays |= stays
        await late.ready.wait()
        if late.engine is None:
            self._late.pop((ref.sha256, kind), None)
            raise late.error or EngineError(f"{ref.path}: its engine was closed before it was up")
        return late.engine

    async def retire(self, keep: Collection[str]) -> None:
        """Closes the engines that were opened late for checkpoints that are not in `keep`, by sha256."""
        for key, late in list(self._late.items()):
            if late.ref.sha256 not in keep and not late.stays:
                late.stop.set()
                await late.gone.wait()
                del self._late[key]

    async def checksums(self) -> dict[str, str]:
        """sha256 of the frozen weights as they are served, by that of their checkpoint, with the kind of engine where
        that is not the run's."""
        own = self._recipe.engine
        up = {key: x.engine for key, x in self._late.items() if x.engine is not None}
        late = {sha if kind == own else f"{sha} on {kind}": engine for (sha, kind), engine in up.items()}
        return {name: await engine.checksum() for name, engine in {**self._first, **late}.items()}

    async def rebalance(self) -> Mapping[str, float]:
        """To be called between iterations, before the policy's update; metrics of both sides, where there are sides."""
        return {} if self._shares is None else await self._shares.rebalance()

    async def keep(self) -> None:
        """The background task: opens what is asked for, and holds it open."""
        async with trio.open_nursery() as nursery:
            async for late in self._asks:
                nursery.start_soon(self._hold, late)

    async def _hold(self, late: _Late) -> None:
        recipe = replace(self._recipe, engine=late.kind)
        try:
            async with _one_each(recipe, (late.ref.path,), self._max_len, self._threads, late.at) as opened:
                late.engine = opened.each[0]
                late.ready.set()
                await late.stop.wait()
        except (CheckpointError, EngineError) as e:
            late.error = e
        finally:
            late.engine = None
            late.ready.set()
            late.gone.set()


@asynccontextmanager
async def open_engines(
    recipe: Training, folders: Sequence[Path], max_len: int, threads: int
) -> AsyncGenerator[Engines]:
    """Engines for the checkpoints, the policy's first, with contexts of up to `max_len` tokens, on so many cores.

    Raises CheckpointError for a folder that is none, EngineError for an engine that does not start.
    """
    refs = [frozen_ref(folder) for folder in folders]
    each = recipe.placement.subagents == "each" or len(folders) < 2
    async with AsyncExitStack() as stack:
        first = folders if each else folders[:2]
        opened = await stack.enter_async_context(_one_each(recipe, first, max_len, threads))
        shared = None
        if not each:
            for ref in refs[2:]:
                check_alike(ref.path, refs[1].path)
            shared = await stack.enter_async_context(turns(opened.each[1]))
            views = [shared.view(ref) for ref in refs[1:]]
            opened = replace(opened, each=(opened.each[0], *views))
        engines = Engines(recipe, max_len, threads, refs, opened, shared)
        async with running(engines.keep):
            yield engines


@asynccontextmanager
async def _one_each(
    recipe: Training, folders: Sequence[Path], max_len: int, threads: int, at: int = 0
) -> AsyncGenerator[Opened]:
    """`at`: how many servers there are already, whose GPUs are taken."""
    async with AsyncExitStack() as stack:
        match recipe.engine:
            case "embedded":
                embedded = [_embedded(recipe, f, max_len, threads) for f in folders]
                yield Opened(tuple([await stack.enter_async_context(e) for e in embedded]))
            case "vllm":
                yield Opened(await _vllm(stack, folders, vllm_config(recipe, max_len, threads)))
            case "server":
                yield await _servers(stack, recipe, folders, max_len, threads, at)


def check_served(recipe: Training, folder: Path, kind: EngineKind | Literal[""] = "") -> None:
    """Raises CheckpointError, from the files alone, for a checkpoint that the run could not serve to its subagents.

    Those that take turns must be alike; the embedded engine runs dense Qwen3.
    """
    if (folder / ADAPTER_CONFIG).exists():
        return
    kind = kind or recipe.engine
    family = read_json(folder / "config.json").get("architectures")
    if kind == "embedded" and family != [Qwen3ForCausalLM.__name__]:
        wanted = f"['{Qwen3ForCausalLM.__name__}'] for the embedded engine, or --engine vllm"
        raise CheckpointError(f"{folder}: architectures = {family}, want {wanted}")
    if recipe.placement.subagents == "turns" and kind == recipe.engine and isinstance(recipe, Recipe):
        check_alike(folder, resolve(str(recipe.players()[0])))


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
    stack: AsyncExitStack, recipe: Training, folders: Sequence[Path], max_len: int, threads: int, at: int
) -> Opened:
    """`placement.engines` servers for the first two checkpoints, half each to begin with, and one for each other."""
    count = recipe.placement.engines if len(folders) > 1 else 1
    first = count // 2 if len(folders) > 1 else 1
    serves = [*[folders[0]] * first, *[f for f in folders[1:2] for _ in range(count - first)], *folders[2:]]
    config = vllm_config(recipe, max_len, max(1, threads // len(serves)))
    configs = [ServerConfig(config, _gpus(recipe, at + k)) for k in range(len(serves))]
    engines = await stack.enter_async_context(http_engines(serves, configs))
    named = {f"server {k}": engine for k, engine in enumerate(engines)}
    policy = await _pool(stack, list(named)[:first], named)
    if len(folders) == 1:
        return Opened((policy,))
    subagents = await _pool(stack, list(named)[first:count], named, folders[1])
    shares = Shares(policy, subagents) if recipe.placement.balance else None
    return Opened((policy, subagents, *engines[count:]), shares)


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
