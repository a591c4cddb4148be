"""The engines of a run, of the kind that its recipe names, opened together and closed together.

Not here: what the engines do, and what is run on them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from recipes.config import Training
from swarm.checkpoint import load_model, ref_of
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.qwen3 import dense
from swarm.engine.vllm import VLLMConfig, vllm_engines
from swarm.types import ServingEngine

_MIB = 1 << 20


@asynccontextmanager
async def open_engines(
    recipe: Training, folders: Sequence[Path], max_len: int, threads: int
) -> AsyncGenerator[tuple[ServingEngine, ...]]:
    """An engine for each checkpoint, with contexts of up to `max_len` tokens, on so many cores.

    Raises CheckpointError for a folder that is none, EngineError for an engine that does not start.
    """
    async with AsyncExitStack() as stack:
        match recipe.engine:
            case "embedded":
                engines = [await stack.enter_async_context(_embedded(recipe, f, max_len, threads)) for f in folders]
            case "vllm":
                config = vllm_config(recipe, max_len, threads)
                engines = await stack.enter_async_context(vllm_engines(folders, config))
            case "server":
                raise NotImplementedError
        yield tuple(engines)


def _embedded(recipe: Training, folder: Path, max_len: int, threads: int) -> EmbeddedEngine:
    model = dense(load_model(ref_of(folder)))
    return EmbeddedEngine(model, max_len=max_len, threads=threads, cache_bytes=recipe.serving.cache_mib * _MIB)


def vllm_config(recipe: Training, max_len: int, threads: int) -> VLLMConfig:
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
