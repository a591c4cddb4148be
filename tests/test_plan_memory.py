"""The formulas of a plan: by hand on a small model, and against what models, optimizers and engines really take."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from recipes.config import SHIPPED
from recipes.gpu import CARDS
from recipes.plan.memory import (
    FLOAT,
    HALF,
    MIB,
    Memory,
    ModelSize,
    Trained,
    activations,
    adapters,
    embedded,
    fused_activations,
    head_bytes,
    hidden_matrices,
    kv_bytes,
    last_layers,
    moments,
    parameters,
    sft_head_bytes,
    size_of,
    vllm,
    whole,
)
from swarm.checkpoint import load_model, ref_of
from swarm.engine.body import hidden_at
from swarm.engine.kernels import BLOCK
from swarm.engine.qwen3 import hidden, shape_of
from swarm.engine.qwen3 import weights_of as engine_weights
from swarm.engine.ragged import block_bytes, fuse
from swarm.rl.adapt import AdaptConfig, adapt, weights_of
from swarm.rl.head import trunk
from swarm.rl.optim import OptimizerConfig, build, trainable

# V 10, M 4, two layers, H 2, K 1, D 2, F 6; so X = 8 and H D = 4.
SMALL = ModelSize("qwen3", 10, 4, 2, 2, 1, 2, 6, tied=True, width=FLOAT)
SPARSE = ModelSize("qwen3_moe", 10, 4, 2, 2, 1, 2, 6, tied=False, experts=3, chosen=2, expert_ffn=5, sparse=2)
HEAD = 2 * 16 * MIB + 10 * 4 * 4


# --- by hand ---------------------------------------------------------------------------


def test_parameters_are_embedding_norm_and_layers():
    # A layer: 4 (8 + 4) = 48, norms 2 · 4 + 2 · 2 = 12, feed-forward 3 · 4 · 6 = 72: 132. Beside: 40 + 4.
    assert parameters(SMALL) == 44 + 2 * 132
    assert parameters(SMALL, layers=1) == 44 + 132
    assert parameters(SMALL, layers=9) == parameters(SMALL)
    assert hidden_matrices(SMALL) == 2 * (48 + 72)


def test_a_sparse_layer_has_a_router_and_experts():
    # 3 · 4 of the router and 3 · 3 · 4 · 5 of the experts; the head is not tied.
    assert parameters(SPARSE) == 84 + 2 * (48 + 12 + 12 + 180)
    assert hidden_matrices(SPARSE) == 2 * (48 + 192)


def test_keys_and_values_of_a_token():
    assert kv_bytes(SMALL, FLOAT) == 2 * 2 * 1 * 2 * 4
    assert kv_bytes(SMALL, HALF) == 16


def test_adamw_keeps_two_numbers_and_muon_one_of_a_matrix():
    assert moments(whole(SMALL), muon=False) == 2 * 308 * 4
    assert moments(whole(SMALL), muon=True) == 240 * 4 + 2 * 68 * 4


def test_adapters_have_rank_times_both_sides():
    # A layer: q 4 + 4, k and v 2 + 4, o 4 + 4, gate, up and down 4 + 6: 58.
    assert adapters(SMALL, 2) == Trained(2 * 2 * 58, 2 * 2 * 58, FLOAT, frozen=True, ranks=2 * 2 * 7)
    assert adapters(SMALL, 2, ("q_proj", "v_proj")) == Trained(56, 56, FLOAT, frozen=True, ranks=8)
    assert adapters(SPARSE, 1).parameters == 2 * (8 + 6 + 6 + 8)


def test_the_last_layer_is_trained_with_the_norm_after_it():
    assert last_layers(SMALL, 1) == Trained(132 + 4, 120, FLOAT, frozen=True)


def test_an_embedded_engine_has_a_copy_and_the_next_one():
    # 308 parameters, a head of 40 beside the embedding, a rotary table of 16 · 2; a row of scratch is 46 numbers.
    scratch = 2048 * (12 + 8 + 8 + 18) * 4
    assert embedded(SMALL, 1000, 16, 1, updated=False) == Memory(weights=1520, cache=1000, activations=scratch)
    assert embedded(SMALL, 1000, 16, 3, updated=True) == Memory(weights=3040, cache=1000, activations=3 * scratch)


def test_a_vllm_engine_splits_weights_and_cache_over_its_gpus():
    # A step of 100 tokens: 2 · 4 + 8 + 2 · 6 numbers of 2 bytes each; three sequences have 3 · 10 floats.
    made = vllm(SMALL, 1000, batch_tokens=100, max_seqs=3, width=HALF, share=2)
    assert made == Memory(weights=308, cache=500, activations=100 * 28 * 2 + 3 * 3 * 10 * 4)


def test_what_the_fused_forward_keeps():
    # A layer and token: 8 + 4 + 2 of 4 bytes, 8 + 12 of 4; a backward 24 + 8 + 8; matrices 4 (8 + 12), twice.
    kept = 2 * (14 * 4 + 20 * 4) + 40 * 4
    copies = 2 * 2 * 4 * 20 * 4
    assert fused_activations(SMALL, 10, 1, half=False) == 10 * kept + copies + HEAD
    assert fused_activations(SMALL, 10, 2, half=False) == 10 * kept + copies + 2 * HEAD
    # In bf16 X and 2 F are half as wide, and the attention's output is there in 2 bytes too.
    assert fused_activations(SMALL, 10, 1, half=True) == 10 * (2 * (56 + 24 * 2) + 160) + copies + HEAD


def test_what_another_forward_keeps():
    # A layer and token: 26 · 4, 14 · 6, 8 · 2 + 4 + 8, 8 · 6; a backward (24 + 16) · 4; matrices in 2 bytes.
    assert activations(SMALL, 10, whole(SMALL), half=True) == 10 * (2 * (104 + 84 + 28 + 48) + 160) + 480 + HEAD
    moved = Trained(8, 8, FLOAT, frozen=True, ranks=4)
    assert activations(SMALL, 10, moved, half=False) == 10 * (2 * (72 + 120 + 28 + 96) + 160 + 16) + HEAD


def test_the_head_has_two_chunks_and_its_gradient():
    assert head_bytes(SMALL) == HEAD
    large = size_of(CARDS["Qwen3-4B"])
    assert head_bytes(large) == 2 * 64 * 151936 * 4 + 151936 * 2560 * 4
    assert sft_head_bytes(SMALL, 5) == 4 * 5 * 10 * 4


def test_memory_adds_up_by_part():
    assert Memory(1, 2, 3, 4, 5, 6) + Memory(weights=1) == Memory(2, 2, 3, 4, 5, 6)
    assert Memory(1, 2, 3, 4, 5, 6).total == 21


# --- published -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("Qwen3-4B", 4_022_468_096), ("Qwen3-30B-A3B", 30_532_122_624)])
def test_a_card_has_as_many_parameters_as_its_model(name: str, count: int):
    assert parameters(size_of(CARDS[name])) == count


# --- against models --------------------------------------------------------------------

COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
WIDE = {**COMMON, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**WIDE, tie_word_embeddings=True),
    "qwen3 untied, biased": lambda: Qwen3Config(**WIDE, tie_word_embeddings=False, attention_bias=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**WIDE, **EXPERTS, tie_word_embeddings=False),
    "qwen3_moe, partly": lambda: Qwen3MoeConfig(**WIDE, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[0]),
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
    "gemma3_text": lambda: Gemma3TextConfig(**WIDE),
}


def on_meta(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def counted(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_a_model_of_the_family(name: str):
    config = FAMILIES[name]()
    assert parameters(size_of(json.loads(config.to_json_string(use_diff=False)))) == counted(on_meta(config))


@pytest.mark.slow
def test_the_shipped_model_has_the_parameters_of_its_file():
    size = size_of(json.loads((SHIPPED / "config.json").read_text()))
    model = load_model(ref_of(SHIPPED))
    assert parameters(size) == counted(model) == 1_115_520
    assert size.width == FLOAT
    assert kv_bytes(size, FLOAT) * BLOCK == block_bytes(shape_of(model.config))
    fused = fuse(engine_weights(model), shape_of(model.config), 512)
    tensors = [fused.embed, fused.head]
    tensors += [t for layer in fused.layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    arrays = [fused.norm, fused.cos, fused.sin, *(a for layer in fused.layers for a in (layer.norm, layer.ffn_norm))]
    gains = sum(layer.head_gains.nbytes for layer in fused.layers)
    spread = 4 * (4 + 2 - 2) * 32 * FLOAT  # gains have a row for each head
    whole_bytes = sum(t.nbytes for t in tensors) + sum(a.nbytes for a in arrays) + gains - spread
    assert embedded(size, 0, 512, 1, updated=False).weights == whole_bytes


def test_a_family_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="model_type 'mamba', want one of qwen3, "):
        size_of({"model_type": "mamba"})
    with pytest.raises(ValueError, match="hidden_size = None, want a whole number"):
        size_of({"model_type": "llama", "vocab_size": 5})


def tiny(moe: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    config = FAMILIES["qwen3_moe" if moe else "qwen3"]()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def size_like(model: Any) -> ModelSize:
    dtype = str(model.dtype).removeprefix("torch.")
    return size_of({**json.loads(model.config.to_json_string(use_diff=False)), "dtype": dtype})


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        AdaptConfig(),
        AdaptConfig("lora", rank=4),
        AdaptConfig("lora", 4, 8.0, ("q_proj", "o_proj")),
        AdaptConfig("last_layers", layers=2),
    ],
    ids=["all", "lora", "some", "last"],
)
def test_what_is_trained_is_what_an_adapted_model_trains(config: AdaptConfig, moe: bool):
    model = tiny(moe)
    size = size_like(model)
    moved = {
        "all": whole(size),
        "lora": adapters(size, config.rank, config.targets),
        "last_layers": last_layers(size, config.layers),
    }[config.kind]
    adapt(model, config, 0)
    assert moved.parameters == sum(p.numel() for _, p in trainable(model))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_are_those_of_an_optimizer(kind: Any):
    model = tiny()
    named = trainable(model)
    optimizers = build(named, OptimizerConfig(kind), 1e-3)
    for _, p in named:
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    kept = [x for o in optimizers for state in o.state.values() for key, x in state.items() if key != "step"]
    assert moments(whole(size_like(model)), muon=kind == "muon") == sum(x.nbytes for x in kept)


# --- against what a forward saves ------------------------------------------------------


def saved(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that a forward keeps for its backward, beside the parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values())


TOKENS = 256
LORA = AdaptConfig("lora", rank=4)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_the_fused_forward_keeps_what_the_plan_says(half: bool):
    model = tiny()
    size, ids_T = size_like(model), torch.arange(TOKENS) % 64
    weights, shape = weights_of(model), shape_of(model.config)
    read_n = torch.arange(TOKENS)
    real = saved(model, lambda: hidden_at(weights, shape, ids_T, [TOKENS], [-1], read_n, half))
    at_once = TOKENS * (4 * size.ffn + 2 * size.hidden) * FLOAT
    assert 0.75 < real / (fused_activations(size, TOKENS, 1, half=half) - head_bytes(size) - at_once) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "packed", "config", "dtype", "half"),
    [
        (False, True, AdaptConfig(), torch.float32, True),
        (False, True, AdaptConfig(), torch.float32, False),
        (False, True, LORA, torch.bfloat16, True),
        (False, False, AdaptConfig(), torch.float32, True),
        (False, False, AdaptConfig(), torch.float32, False),
        (False, False, LORA, torch.bfloat16, True),
        (False, False, LORA, torch.float32, False),
        (True, False, AdaptConfig(), torch.float32, True),
        (True, False, AdaptConfig(), torch.float32, False),
        (True, False, AdaptConfig("lora", rank=4, targets=("q_proj", "v_proj")), torch.bfloat16, True),
    ],
)
def test_other_forwards_keep_at_most_what_the_plan_says(
    moe: bool, packed: bool, config: AdaptConfig, dtype: torch.dtype, half: bool
):
    model = tiny(moe, dtype)
    size, ids_T = size_like(model), torch.arange(TOKENS) % 64
    moved = whole(size) if config.kind == "all" else adapters(size, config.rank, config.targets)
    adapt(model, config, 0)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            if packed:
                return hidden(weights_of(model), shape_of(model.config), ids_T, [TOKENS])
            return trunk(model, ids_T[None])

    at_once = TOKENS * (4 * size.widest + 2 * size.hidden) * FLOAT
    planned = activations(size, TOKENS, moved, half=half) - head_bytes(size) - at_once
    assert 0.6 < saved(model, forward) / planned <= 1
