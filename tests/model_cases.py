"""Tiny random models of several families, and rows for them. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from swarm.rl.batch import Batch, collect
from swarm.types import Rollout
from tests.rl_cases import VOCAB, prompt, rollout, said, seen, tiny

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SIZES, "head_dim": 8}


def gemma3() -> PreTrainedModel:
    """A window of 4 tokens in its first layer; embeddings scaled; logits capped at 3."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**HEADS, sliding_window=4, layer_types=kinds, final_logit_softcapping=3.0)
    )


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**HEADS))


def qwen3_window() -> PreTrainedModel:
    """A Qwen3 with a window of 4, which the packed forward has not."""
    kinds = ["full_attention", "sliding_attention"]
    config = Qwen3Config(**HEADS, use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=kinds)
    return Qwen3ForCausalLM(config)


def cohere() -> PreTrainedModel:
    """Logits times a quarter."""
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))


def granite() -> PreTrainedModel:
    """Logits by 4; residuals, attention and embeddings scaled too."""
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2}
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0, **scales))


def phi() -> PreTrainedModel:
    """A head with a bias."""
    return PhiForCausalLM(PhiConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    """Other names for everything, and no `Linear` in its layers."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,
                                      bos_token_id=1, eos_token_id=2))  # fmt: skip


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    f.__name__: f for f in (gemma3, qwen3_moe, llama, qwen3_window, cohere, granite, phi, gpt2)
}


def made(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of the family, or a dense "qwen3", in fp32; no gain is exactly 1, no bias exactly 0."""
    if family == "qwen3":
        return tiny(seed).eval()
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(torch.rand(p.shape) - 0.5)
    return model


def branches() -> Batch:
    """Three rows of which two go on from 14 common tokens, actions in those too; longer than any window."""
    common = [prompt(*range(1, 9)), said(9, 10), seen(11, 12, 13, 14)]
    rows: list[Rollout] = [
        rollout([*common, said(15, 16), seen(17, 18, 19), said(20)], reward=0.9),
        rollout([*common, said(21), seen(22, 23), said(24, 25, 26), seen(27)], reward=0.1),
        rollout([prompt(30, 31), said(32, 33), seen(34), said(35)], reward=0.4),
    ]
    return collect(rows)


def plain(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """log π [N] of every action token by the model's own whole forward, a row at a time, with gradients."""
    rows, out = batch.rows, []
    for s in range(len(rows)):
        ids_L = rows.ids_L[rows.start_S[s] : rows.start_S[s] + rows.length_S[s]]
        logp_LV = (model(input_ids=ids_L[None]).logits[0] / temperature).log_softmax(-1)
        at_n = rows.position_N[rows.first_S[s] : rows.first_S[s] + rows.actions_S[s]]
        out.append(logp_LV[at_n - 1, ids_L[at_n]])
    return torch.cat(out)
