"""Small random models for the engine's tests."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
import trio
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.checkpoint import save
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.server import Server, ServerConfig, server
from swarm.engine.thread import Thread
from swarm.engine.vllm import shared_thread
from swarm.engine.vllm_core import Core, VLLMConfig

VOCAB = 40


def tiny(seed: int = 0, *, tied: bool = True, heads: int = 4, head_dim: int = 16) -> Qwen3ForCausalLM:
    """Two layers, 40 tokens; weights large enough that its choices differ."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=48,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        # Gains of exactly 1 would hide one that is left out.
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return model


def compile_kernels() -> None:
    """Entering an engine compiles, which takes seconds on a fresh machine: for a fixture, so that no test pays."""

    async def enter() -> None:
        async with EmbeddedEngine(tiny()):
            pass

    trio.run(enter)


_STARTED: list[tuple[Core, Thread]] = []
_HELD = ExitStack()


async def started_vllm() -> tuple[Core, Thread]:
    """vLLM takes seconds to start, and does so once in a process: one core for all tests, each with its own weights."""
    if not _STARTED:
        folder = Path(mkdtemp(prefix="swarm-vllm-")) / "m"
        save(tiny(1, head_dim=32), None, folder, 0)
        thread = _HELD.enter_context(shared_thread(120.0))
        config = VLLMConfig(max_len=256, cache_bytes=16 << 20)
        _STARTED.append((await thread.call(partial(Core, folder, config), 300.0), thread))
    return _STARTED[0]


@dataclass(frozen=True)
class _Held:
    """A server that a thread of its own keeps, as long as its event is not set."""

    process: Server
    token: trio.lowlevel.TrioToken
    end: trio.Event
    thread: threading.Thread


_SERVERS: list[_Held] = []


def started_server() -> Server:
    """A real vLLM server, which takes a minute to start: one for all tests, each with its own weights.

    It ends with `end_server`, or with this process.
    """
    if not _SERVERS:
        folder = Path(mkdtemp(prefix="swarm-vllm-")) / "m"
        save(tiny(1, head_dim=32), None, folder, 0)
        ready = threading.Event()

        async def hold() -> None:
            async with server(folder, ServerConfig(VLLMConfig(max_len=256, cache_bytes=16 << 20))) as process:
                held = _Held(process, trio.lowlevel.current_trio_token(), trio.Event(), threading.current_thread())
                _SERVERS.append(held)
                ready.set()
                await held.end.wait()

        def run() -> None:
            try:
                trio.run(hold)
            finally:
                ready.set()

        threading.Thread(target=run, daemon=True).start()
        ready.wait()
    return _SERVERS[0].process


def end_server() -> None:
    while _SERVERS:
        held = _SERVERS.pop()
        held.token.run_sync_soon(held.end.set)
        held.thread.join()
