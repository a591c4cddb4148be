"""Small random models for the engine's tests."""

from __future__ import annotations

import torch
import trio
from transformers import Qwen3Config, Qwen3ForCausalLM

from swarm.engine.embedded import EmbeddedEngine

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
