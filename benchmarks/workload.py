"""The models and the batch that every system is given. Not here: any system.

64 sequences of several turns: a prompt, then sampled and observed spans in turn, lengths as an agent's
transcripts have them: 29,222 tokens, the longest 698, 39 % of them sampled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers import Qwen3Config

VOCAB = 1024
SEQUENCES = 64
LONGEST = 698


@dataclass(frozen=True, slots=True)
class Sequence:
    """Ids and whether each was sampled; the first `prompt` were not, nor looked at by a loss."""

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    prompt: int


def model_config(name: str) -> Qwen3Config:
    """`a`: 0.7 million parameters. `b`: 3.2 million."""
    sizes = {"a": (128, 3, 32, 384), "b": (256, 4, 64, 768)}
    if name not in sizes:
        raise ValueError(f"model = {name!r}, want one of {', '.join(sizes)}")
    hidden, layers, head_dim, ffn = sizes[name]
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=ffn,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_id=1,
        pad_token_id=0,
    )


def sequences(seed: int = 0) -> list[Sequence]:
    """Always the same for a seed, on every machine."""
    rng = random.Random(seed)
    return [_sequence(rng, LONGEST if k == 0 else rng.randint(240, 670)) for k in range(SEQUENCES)]


def _sequence(rng: random.Random, length: int) -> Sequence:
    prompt = rng.randint(60, 140)
    sampled = [False] * prompt
    while len(sampled) < length:
        # A transcript ends with what was sampled, so that the last token is an answer's.
        sampled += [False] * rng.randint(20, 80) + [True] * rng.randint(20, 80)
    sampled = sampled[:length]
    sampled[-8:] = [True] * 8
    ids = tuple(rng.randrange(2, VOCAB) for _ in range(length))
    return Sequence(ids, tuple(sampled), prompt)
