# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The training forward of a dense Qwen3, as functions over the weights of a transformers model.

    ids ─ embed ─ [ norm ─ qkv ─ qk-norm ─ rope ─ attention ─ + ─ norm ─ SwiGLU ─ + ] x layers ─ norm ─ head

Rows are packed: documents lie end to end in one dimension, attention is causal inside each,
and no work is done on padding. The weights are the module's own parameters, so gradients
arrive there. Not here: the incremental forward with a cache (`swarm.engine.ragged`), losses.

Axes: T tokens of a pack, N chosen tokens, H query heads, K key heads, D head width, M hidden, V vocabulary.
Formulas: Qwen3 (arXiv 2505.09388), as in transformers' `modeling_qwen3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Weights = Mapping[str, Tensor]
"""Tensors by the parameter names of transformers' `Qwen3ForCausalLM`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that the forward needs: `shape_of(model.config)` reads them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    theta: float

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads}, want a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}, want an even number")

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads


def shape_of(config: Qwen3Config) -> Shape:
    """Reads a model's config. Raises ValueError for a variant that is not built here."""
    rope = cast("dict[str, Any]", config.rope_parameters)
    seen = {
        "model_type": (config.model_type, "qwen3"),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "use_sliding_window": (config.use_sliding_window, False),
        "rope_type": (rope.get("rope_type"), "default"),
    }
    for name, (value, wanted) in seen.items():
        if value != wanted:
            raise ValueError(f"model config: {name} = {value!r}, want {wanted!r}")
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        theta=rope["rope_theta"],
    )


def dense(model: PreTrainedModel) -> Qwen3ForCausalLM:
    """The model, if it is a Qwen3 that is built here. Raises ValueError where it is not."""
    if not isinstance(model, Qwen3ForCausalLM):
        raise ValueError(f"model = {type(model).__name__}, want Qwen3ForCausalLM: the embedded engine runs no other")
    shape_of(model.config)
    return model


def weights_of(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """The module's own parameters by name, not copied; a tied head is there under one name."""
    return dict(model.named_parameters())


def head_of(weights: Weights) -> Tensor:
    """The output matrix (V, M): the embedding when the head is tied."""
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def rope_table(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, head_dim / 2), fp32."""
    steps_D = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angle_TD = torch.arange(length, dtype=torch.float32)[:, None] * (1.0 / shape.theta ** (steps_D / shape.head_dim))
    return angle_TD.cos(), angle_TD.sin()


def check(ids_T: Tensor, lengths: Sequence[int], after: Sequence[int]) -> None:
    """Raises ValueError when the segments do not make up the pack, or do not directly follow what they go on from."""
    if sum(lengths) != len(ids_T) or min(lengths, default=1) < 1:
        raise ValueError(f"lengths add up to {sum(lengths)}, want {len(ids_T)} in documents of at least 1")
    root = -1
    for g, before in enumerate(after):
        if before not in (-1, root):
            raise ValueError(f"after[{g}] = {before}, want -1 or {root}, the last segment that goes on from none")
        root = g if before == -1 else root
    if len(after) != len(lengths):
        raise ValueError(f"after has {len(after)} segments, want {len(lengths)}")


def hidden(
    weights: Weights, shape: Shape, ids_T: Tensor, lengths: Sequence[int], after: Sequence[int] | None = None
) -> Tensor:
    """Final-norm hidden states (T, M) of documents packed end to end.

    `lengths` are the documents' lengths, in order; positions restart at 0 in each. Where `after[g]` is not −1,
    segment g goes on from that one: it sees it and counts its positions on. Sort documents by length before
    packing: neighbours of equal length share one attention call. Raises ValueError when the lengths do not
    add up to T, or a segment does not directly follow the one that it goes on from, and that one's others.
    """
    after = [-1] * len(lengths) if after is None else after
    check(ids_T, lengths, after)
    begins = [lengths[a] if a >= 0 else 0 for a in after]
    cos_LD, sin_LD = rope_table(shape, max((b + n for b, n in zip(begins, lengths, strict=True)), default=0))
    position_T = torch.cat([torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    cos_T1D, sin_T1D = cos_LD[position_T, None], sin_LD[position_T, None]
    x_TM = F.embedding(ids_T, weights["model.embed_tokens.weight"])
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        x_TM = x_TM + _attention(weights, shape, layer, x_TM, cos_T1D, sin_T1D, lengths, after)
        h_TM = F.rms_norm(x_TM, (shape.hidden,), weights[layer + "post_attention_layernorm.weight"], shape.eps)
        gate_TF = F.silu(F.linear(h_TM, weights[layer + "mlp.gate_proj.weight"]))
        up_TF = F.linear(h_TM, weights[layer + "mlp.up_proj.weight"])
        x_TM = x_TM + F.linear(gate_TF * up_TF, weights[layer + "mlp.down_proj.weight"])
    return F.rms_norm(x_TM, (shape.hidden,), weights["model.norm.weight"], shape.eps)


def logits(weights: Weights, hidden_NM: Tensor) -> Tensor:
    """Logits (N, V) in fp32, whatever autocast says: gather the action rows of `hidden` first."""
    with torch.autocast(hidden_NM.device.type, enabled=False):
        return F.linear(hidden_NM.float(), head_of(weights).float())


def _attention(
    weights: Weights,
    shape: Shape,
    layer: str,
    x_TM: Tensor,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    lengths: Sequence[int],
    after: Sequence[int],
) -> Tensor:
    h_TM = F.rms_norm(x_TM, (shape.hidden,), weights[layer + "input_layernorm.weight"], shape.eps)
    heads: list[Tensor] = []
    for name, count in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        y_THD = F.linear(h_TM, weights[f"{layer}self_attn.{name}_proj.weight"]).view(-1, count, shape.head_dim)
        if name != "v":
            gain_D = weights[f"{layer}self_attn.{name}_norm.weight"]
            # Under autocast the projection is bf16, and the fused norm wants a gain of the same type.
            y_THD = _rotate(F.rms_norm(y_THD, (shape.head_dim,), gain_D.to(y_THD.dtype), shape.eps), cos_T1D, sin_T1D)
        heads.append(y_THD)
    if max(after, default=-1) < 0:
        out_THD = _causal(heads[0], heads[1], heads[2], lengths)
    else:
        out_THD = _branched(heads[0], heads[1], heads[2], lengths, after)
    return F.linear(out_THD.reshape(len(x_TM), -1), weights[layer + "self_attn.o_proj.weight"])


def _rotate(y_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary embedding, halves convention (arXiv 2104.09864)."""
    a_THD, b_THD = y_THD.chunk(2, dim=-1)
    return torch.cat([a_THD * cos_T1D - b_THD * sin_T1D, b_THD * cos_T1D + a_THD * sin_T1D], dim=-1)


def _causal(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention inside each document; runs of equal length go in one call."""
    runs = _runs(lengths)
    sizes = [n * count for n, count in runs]
    out: list[Tensor] = []
    for (n, count), q, k, v in zip(runs, q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes), strict=True):
        q_BHTD, k_BKTD, v_BKTD = (y.view(count, n, y.shape[1], y.shape[2]).transpose(1, 2) for y in (q, k, v))
        o_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        out.append(o_BHTD.transpose(1, 2).reshape(n * count, q.shape[1], q.shape[2]))
    return torch.cat(out)


def _branched(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Sequence[int], after: Sequence[int]) -> Tensor:
    """Causal attention inside each segment, which also sees all of the one that it goes on from."""
    q, k, v = ([y_HTD.transpose(0, 1) for y_HTD in y.split(list(lengths))] for y in (q_THD, k_TKD, v_TKD))
    out: list[Tensor] = []
    for g, before in enumerate(after):
        seen = [g] if before < 0 else [before, g]
        k_KTD, v_KTD = torch.cat([k[s] for s in seen], dim=1), torch.cat([v[s] for s in seen], dim=1)
        mask_TT = torch.ones(lengths[g], k_KTD.shape[1], dtype=torch.bool, device=k_KTD.device)
        mask_TT = mask_TT.tril(k_KTD.shape[1] - lengths[g])
        o_HTD = F.scaled_dot_product_attention(q[g], k_KTD, v_KTD, attn_mask=mask_TT, enable_gqa=True)
        out.append(o_HTD.transpose(0, 1))
    return torch.cat(out)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """`[5, 5, 7]` → `[(5, 2), (7, 1)]`."""
    runs: list[tuple[int, int]] = []
    for n in lengths:
        if runs and runs[-1][0] == n:
            runs[-1] = (n, runs[-1][1] + 1)
        else:
            runs.append((n, 1))
    return runs
