"""Recipes for GPUs, with models that are not shipped: planned here, not run here.

    wide_search_4b     one node of 8 GPUs: two learners, six servers that policy and subagents share
    wide_search_30b    two nodes of 8 GPUs: four learners, eleven rollout workers with engines of their own, and the
                       main process, which evaluates: Ray on its node is started without its GPU, the first

`swarm-rl plan` shows what they take, `swarm-rl doctor` whether a machine has it, and `train` begins only where it
has. The weights are looked for in `models/`, below the working folder. What differs from the shipped model's recipe:
adapters are trained, the critic is a head on the policy's trunk, and engines serve in bf16, whose log-probabilities
are further from the learner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.tools import SpawnLimits
from recipes.config import Limits, Recipe
from recipes.placement import Placement, Serving
from recipes.wide_search import wide_search
from swarm.rl.adapt import AdaptConfig
from swarm.rl.critic import CriticConfig
from swarm.rl.ppo import PPOConfig

MODELS = Path("models")

CARDS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-4B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
"""What the public config.json of each model says of its size; for plans where the weights are not here."""


def wide_search_4b() -> Recipe:
    """not run here: needs 8 GPUs of 80 GiB, vLLM, and Qwen3-4B in models/; orchestrator and subagents are Qwen3-4B."""
    return replace(
        _large(),
        start=MODELS / "Qwen3-4B",
        subagent=MODELS / "Qwen3-4B",
        engine="server",
        serving=Serving(dtype="bfloat16", cache_mib=48 << 10, probe_bound=_PROBE),
        placement=Placement(engines=6, learners=2, learner_gpus=1.0),
    )


def wide_search_30b() -> Recipe:
    """not run here: needs 2 nodes of 8 GPUs of 141 GiB on Ray, vLLM, and Qwen3-30B-A3B and Qwen3-4B in models/."""
    return replace(
        _large(),
        start=MODELS / "Qwen3-30B-A3B",
        subagent=MODELS / "Qwen3-4B",
        engine="vllm",
        serving=Serving(dtype="bfloat16", cache_mib=24 << 10, probe_bound=_PROBE),
        placement=Placement(workers=11, worker_cpus=8.0, worker_gpus=1.0, learners=4, learner_gpus=1.0, address="auto"),
    )


_PROBE = 0.5
"""Nats: bf16 engines are off by some tenths on single tokens, engines with the wrong weights by several nats."""


def _large() -> Recipe:
    """Tables of up to 80 rows, as for the shipped model; turns and contexts for a model that reasons in words."""
    ppo = PPOConfig(
        lr=2e-5,
        critic_lr=1e-4,
        lr_warmup=10,
        critic=CriticConfig(trunk="shared", layers=None, warmup_updates=5, coef=0.1),
        adapt=AdaptConfig("lora", rank=32, alpha=64.0),
        micro_tokens=8192,
        bf16=True,
    )
    return replace(
        wide_search(),
        iterations=200,
        episodes=256,
        at_once=256,
        ppo=ppo,
        main=Limits(turn_tokens=1024, context=8192, steps=40, seconds=900.0),
        child=Limits(turn_tokens=512, context=8192, steps=32, seconds=600.0, temperature=0.6),
        spawning=SpawnLimits(reply_chars=4000),
    )
