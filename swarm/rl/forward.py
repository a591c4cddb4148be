"""The seam to the model: hidden states where actions are predicted, and what a head reads from them.

The action rows are gathered before the head, so that the vocabulary is never spanned for observations.
Heads run in float32 whatever the trunk runs in (bf16 logits cost accuracy: arXiv 2510.13786).
Not here: losses. Axes: d hidden, V vocabulary, n action tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from swarm.engine.qwen3 import Weights, hidden, logits, shape_of, weights_of
from swarm.rl.rows import MicroBatch


def hidden_states(model: Qwen3ForCausalLM, micro: MicroBatch, bf16: bool = False) -> Tensor:
    """Final hidden states [n, d], float32, at the position before each action token."""
    with torch.autocast(micro.ids_T.device.type, torch.bfloat16, enabled=bf16):
        h_Td = hidden(_weights(model, bf16), shape_of(model.config), micro.ids_T, micro.lengths)
    return h_Td.index_select(0, micro.read_n).float()


def log_policy(model: Qwen3ForCausalLM, h_nd: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) [n, V] in nats, the distribution that was sampled from."""
    logits_nV = logits(weights_of(model), h_nd)
    return (logits_nV if temperature == 1.0 else logits_nV / temperature).log_softmax(-1)


def chosen(logp_nV: Tensor, target_n: Tensor) -> Tensor:
    """log π of the action ids, [n]."""
    return logp_nV.gather(-1, target_n[:, None])[:, 0]


def _weights(model: Qwen3ForCausalLM, bf16: bool) -> Weights:
    weights = weights_of(model)
    if not bf16:
        return weights
    # Queries and keys come out of a product, in bf16; the norm wants its gain in the dtype of its input.
    gains = (".q_norm.weight", ".k_norm.weight")
    return {name: w.bfloat16() if name.endswith(gains) else w for name, w in weights.items()}
