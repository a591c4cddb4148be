# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The seam to the model: hidden states where actions are predicted, and what a head reads from them.

The action rows are gathered before the head, so that the vocabulary is never spanned for observations.
Heads run in float32 whatever the trunk runs in (bf16 logits cost accuracy: arXiv 2510.13786).
Not here: losses. Axes: d hidden, V vocabulary, n action tokens of a micro-batch, c those of a chunk.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from transformers import Qwen3ForCausalLM

from swarm.engine.body import hidden_at
from swarm.engine.qwen3 import head_of, hidden, logits, shape_of, weights_of
from swarm.rl.rows import MicroBatch

_CHUNK_BYTES = 16 * 2**20
_LEAST_ROWS = 64  # below this a product with the head is no longer worth its call


def hidden_states(model: Qwen3ForCausalLM, micro: MicroBatch, bf16: bool = False) -> Tensor:
    """Final hidden states [n, d], float32, at the position before each action token."""
    weights, shape, device = weights_of(model), shape_of(model.config), micro.ids_T.device.type
    if device == "cpu":
        return hidden_at(weights, shape, micro.ids_T, micro.lengths, micro.after, micro.read_n, bf16)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        h_Td = hidden(weights, shape, micro.ids_T, micro.lengths, micro.after)
    return h_Td.index_select(0, micro.read_n).float()


def log_policy(model: Qwen3ForCausalLM, h_nd: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) [n, V] in nats, the distribution that was sampled from."""
    logits_nV = logits(weights_of(model), h_nd)
    return (logits_nV if temperature == 1.0 else logits_nV / temperature).log_softmax(-1)


def chosen(logp_nV: Tensor, target_n: Tensor) -> Tensor:
    """log π of the action ids, [n]."""
    return logp_nV.gather(-1, target_n[:, None])[:, 0]


def log_chosen(
    model: Qwen3ForCausalLM,
    h_nd: Tensor,
    target_n: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log π of the action ids and the entropy of π, [n] and [n] in nats, of `log_policy`'s distribution.

    At most `chunk` rows of the vocabulary exist at a time, forward and backward; by default as many as fit
    16 MiB. What fits one chunk is kept for the backward, otherwise the logits are computed again there.
    Both outputs have gradients; an entropy that is only measured costs the backward nothing. Without
    `with_entropy` it is 0. Formulas, z = logits / T: d log π(a) / dz = 1_a − p, dH / dz = −p (log p + H).
    """
    head_Vd = head_of(weights_of(model)).float()
    rows = chunk if chunk is not None else max(_LEAST_ROWS, _CHUNK_BYTES // (4 * len(head_Vd)))
    if rows < 1:
        raise ValueError(f"log_chosen: chunk = {chunk}, want at least 1 row")
    out = _LogChosen.apply(h_nd, head_Vd, target_n, 1.0 / temperature, with_entropy, rows)
    return cast("tuple[Tensor, Tensor]", out)


class _LogChosen(Function):
    @staticmethod
    def forward(
        ctx: Any, h_nd: Tensor, head_Vd: Tensor, target_n: Tensor, scale: float, with_entropy: bool, rows: int
    ) -> tuple[Tensor, Tensor]:
        logp_n, entropy_n = h_nd.new_zeros(len(h_nd)), h_nd.new_zeros(len(h_nd))
        logp_cV = None
        for at in range(0, len(h_nd), rows):
            cut = slice(at, at + rows)
            logp_cV = _log_softmax(h_nd[cut], head_Vd, scale)
            logp_n[cut] = chosen(logp_cV, target_n[cut])
            if with_entropy:
                entropy_n[cut] = -torch.linalg.vecdot(logp_cV.exp(), logp_cV)
        kept = logp_cV if len(h_nd) <= rows else None
        ctx.save_for_backward(h_nd, head_Vd, target_n, entropy_n, kept)
        ctx.scale, ctx.rows = scale, rows
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_n)
        return logp_n, entropy_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h_nd, head_Vd, target_n, entropy_n, kept = ctx.saved_tensors
        wants_h, wants_head = ctx.needs_input_grad[:2]
        d_h_nd = torch.empty_like(h_nd) if wants_h else None
        d_head_Vd = torch.zeros_like(head_Vd) if wants_head else None
        for at in range(0, len(h_nd), ctx.rows):
            cut = slice(at, at + ctx.rows)
            logp_cV = kept if kept is not None else _log_softmax(h_nd[cut], head_Vd, ctx.scale)
            by_logp, by_entropy = (None if g is None else g[cut, None] * ctx.scale for g in grads)
            d_z_cV = _logit_gradient(logp_cV, target_n[cut], entropy_n[cut], by_logp, by_entropy)
            if d_h_nd is not None:
                torch.mm(d_z_cV, head_Vd, out=d_h_nd[cut])
            if d_head_Vd is not None:
                d_head_Vd.addmm_(d_z_cV.t(), h_nd[cut])
        return d_h_nd, d_head_Vd, None, None, None, None


def _log_softmax(h_cd: Tensor, head_Vd: Tensor, scale: float) -> Tensor:
    with torch.autocast(h_cd.device.type, enabled=False):
        z_cV = (h_cd if scale == 1.0 else h_cd * scale) @ head_Vd.t()
    return z_cV.sub_(z_cV.logsumexp(-1, keepdim=True))


def _logit_gradient(
    logp_cV: Tensor, target_c: Tensor, entropy_c: Tensor, by_logp_c1: Tensor | None, by_entropy_c1: Tensor | None
) -> Tensor:
    """Of both outputs by the logits, each times what it is asked for."""
    d_z_cV = logp_cV.exp()
    if by_entropy_c1 is not None:
        factor_cV = (logp_cV + entropy_c[:, None]).mul_(by_entropy_c1)
        d_z_cV.mul_(factor_cV if by_logp_c1 is None else factor_cV.add_(by_logp_c1))
    elif by_logp_c1 is not None:
        d_z_cV.mul_(by_logp_c1)
    d_z_cV.neg_()
    return d_z_cV if by_logp_c1 is None else d_z_cV.scatter_add_(1, target_c[:, None], by_logp_c1)
