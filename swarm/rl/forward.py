# pyright: reportCallIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The seam to the model: hidden states where actions are predicted, and what a head reads from them.

A dense Qwen3 has a forward of its own, packed and fused; any other causal model runs as transformers has it
(`swarm.rl.unpacked`). The action rows are gathered before the head, so that the vocabulary is never spanned for
observations.
Heads run in float32 whatever the trunk runs in (bf16 logits cost accuracy: arXiv 2510.13786).
Not here: losses. Axes: d hidden, V vocabulary, n action tokens of a micro-batch, c those of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from transformers import PreTrainedModel, Qwen3ForCausalLM

from swarm.engine.body import hidden_at
from swarm.engine.cores import on_cores
from swarm.engine.qwen3 import Shape, hidden, shape_of
from swarm.engine.training_kernels import choose, choose_backward
from swarm.rl.adapt import weights_of
from swarm.rl.head import Head, head_of
from swarm.rl.rows import MicroBatch
from swarm.rl.unpacked import hidden_unpacked

_CHUNK_BYTES = 16 * 2**20
_LEAST_ROWS = 64  # below this a product with the head is no longer worth its call


def packs(model: PreTrainedModel) -> bool:
    """Whether rows of a micro-batch can have their common beginning computed once; elsewhere it costs memory."""
    return _shape(model) is not None


def hidden_states(model: PreTrainedModel, micro: MicroBatch, bf16: bool = False) -> Tensor:
    """Final hidden states [n, d], float32, at the position before each action token."""
    shape, device = _shape(model), micro.ids_T.device.type
    if shape is None:
        return hidden_unpacked(model, micro, bf16)
    weights = weights_of(model)
    if device == "cpu":
        return hidden_at(weights, shape, micro.ids_T, micro.lengths, micro.after, micro.read_n, bf16)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        h_Td = hidden(weights, shape, micro.ids_T, micro.lengths, micro.after)
    return h_Td.index_select(0, micro.read_n).float()


def _shape(model: PreTrainedModel) -> Shape | None:
    """None where the packed forward does not do what the model does."""
    if not isinstance(model, Qwen3ForCausalLM):
        return None
    if model.device.type == "cpu" and model.dtype != torch.float32:
        return None  # the kernels are of float32
    try:
        return shape_of(model.config)
    except ValueError:
        return None  # a window, a longer rotary table, a bias


def log_policy(model: PreTrainedModel, h_nd: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) [n, V] in nats, the distribution that was sampled from."""
    return log_probs(head_of(model), h_nd, temperature)


def log_probs(head: Head, h_nd: Tensor, temperature: float = 1.0) -> Tensor:
    """`log_policy` of a head alone."""
    logits_nV = head.logits(h_nd)
    return (logits_nV if temperature == 1.0 else logits_nV / temperature).log_softmax(-1)


def rows_at_once(vocab: int) -> int:
    """How many rows of the vocabulary fit the bytes of a chunk."""
    return max(_LEAST_ROWS, _CHUNK_BYTES // (4 * vocab))


def chosen(logp_nV: Tensor, target_n: Tensor) -> Tensor:
    """log π of the action ids, [n]."""
    return logp_nV.gather(-1, target_n[:, None])[:, 0]


def log_chosen(
    model: PreTrainedModel,
    h_nd: Tensor,
    target_n: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log π of the action ids and the entropy of π, [n] and [n] in nats, of `log_policy`'s distribution.

    At most `chunk` rows of the vocabulary exist at a time on a core, forward and backward; by default as many as
    fit 16 MiB. What fits one chunk is kept for the backward, otherwise the logits are computed again there. Both
    outputs have gradients; without `with_entropy` the entropy is 0. Raises ValueError on a chunk below 1.
    Formulas, z = logits / T: d log π(a) / dz = 1_a − p, dH / dz = −p (log p + H).
    """
    head = head_of(model)
    weights = [x.float() for x in head.tensors()]
    form = _Form(head.scale, head.softcap, temperature, chunk if chunk is not None else rows_at_once(len(weights[0])))
    if form.rows < 1:
        raise ValueError(f"log_chosen: chunk = {chunk}, want at least 1 row")

    def read(share: _Rows, h_nd: Tensor, head_Vd: Tensor, bias_V: Tensor | None = None) -> Tensor:
        return cast(Tensor, _Chosen.apply(h_nd, head_Vd, bias_V, target_n[share.first : share.last], form))

    out_n2 = on_cores(read, _even(len(h_nd), h_nd.device), h_nd, *weights)
    return out_n2[:, 0], out_n2[:, 1] if with_entropy else torch.zeros_like(h_nd[:, 0])


@dataclass(frozen=True, slots=True)
class _Rows:
    first: int
    last: int


def _even(n: int, device: torch.device) -> list[_Rows]:
    """A part of the rows for each core, where that pays for a thread."""
    count = max(1, min(torch.get_num_threads(), n // _LEAST_ROWS)) if device.type == "cpu" else 1
    return [_Rows(n * k // count, n * (k + 1) // count) for k in range(count)]


@dataclass(frozen=True, slots=True)
class _Form:
    """z = s (h Wᵀ + b) / T, or with a soft cap c: c tanh(s (h Wᵀ + b) / c) / T; and rows of z at a time."""

    scale: float
    softcap: float | None
    temperature: float
    rows: int

    @property
    def factor(self) -> float:
        """Of the product, before the soft cap if there is one."""
        return self.scale / self.temperature if self.softcap is None else self.scale

    @property
    def gain(self) -> float:
        """dz / d(h Wᵀ + b), without what the soft cap takes from it."""
        return self.scale / self.temperature


class _Chosen(Function):
    """Log-probability and entropy side by side, [n, 2]."""

    @staticmethod
    def forward(
        ctx: Any, h_nd: Tensor, head_Vd: Tensor, bias_V: Tensor | None, target_n: Tensor, form: _Form
    ) -> Tensor:
        out_n2, lse_n, z_cV = h_nd.new_empty(len(h_nd), 2), h_nd.new_empty(len(h_nd)), None
        for at in range(0, len(h_nd), form.rows):
            cut = slice(at, at + form.rows)
            z_cV = _logits(h_nd[cut], head_Vd, bias_V, form)
            lse_n[cut], out_n2[cut, 0], out_n2[cut, 1] = _chosen_of(z_cV, target_n[cut])
        kept = z_cV if len(h_nd) <= form.rows else None
        ctx.save_for_backward(h_nd, head_Vd, bias_V, target_n, lse_n, out_n2, kept)
        ctx.form = form
        return out_n2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h_nd, head_Vd, bias_V, target_n, lse_n, out_n2, kept = ctx.saved_tensors
        wants_h, wants_head, wants_bias = ctx.needs_input_grad[:3]
        form: _Form = ctx.form
        d_h_nd = torch.empty_like(h_nd) if wants_h else None
        d_head_Vd = torch.zeros_like(head_Vd) if wants_head else None
        d_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        d_out_n2 = grads[0] * form.gain
        for at in range(0, len(h_nd), form.rows):
            cut = slice(at, at + form.rows)
            z_cV = kept if kept is not None else _logits(h_nd[cut], head_Vd, bias_V, form)
            d_z_cV = _logit_slopes(z_cV, target_n[cut], lse_n[cut], out_n2[cut, 1], d_out_n2[cut])
            if form.softcap is not None:
                # d tanh(x) = 1 − tanh²(x), and z is c tanh(x) / T.
                d_z_cV = d_z_cV * (1 - (z_cV * (form.temperature / form.softcap)) ** 2)
            if d_h_nd is not None:
                torch.mm(d_z_cV, head_Vd, out=d_h_nd[cut])
            if d_head_Vd is not None:
                d_head_Vd.addmm_(d_z_cV.t(), h_nd[cut])
            if d_bias_V is not None:
                d_bias_V += d_z_cV.sum(0)
        return d_h_nd, d_head_Vd, d_bias_V, None, None


def _logits(h_cd: Tensor, head_Vd: Tensor, bias_V: Tensor | None, form: _Form) -> Tensor:
    with torch.autocast(h_cd.device.type, enabled=False):
        z_cV = (h_cd if form.factor == 1.0 else h_cd * form.factor) @ head_Vd.t()
    if bias_V is not None:
        z_cV += bias_V * form.factor
    return z_cV if form.softcap is None else torch.tanh(z_cV / form.softcap) * (form.softcap / form.temperature)


def _chosen_of(z_cV: Tensor, target_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Σ e^z, the log-probabilities of the targets, and the entropies."""
    if z_cV.device.type == "cpu":
        out_3c = torch.empty(3, len(z_cV))
        choose(z_cV.numpy(), target_c.numpy(), *out_3c.numpy())
        return out_3c[0], out_3c[1], out_3c[2]
    logp_cV = z_cV.log_softmax(-1)
    return z_cV.logsumexp(-1), chosen(logp_cV, target_c), -torch.linalg.vecdot(logp_cV.exp(), logp_cV)


def _logit_slopes(z_cV: Tensor, target_c: Tensor, lse_c: Tensor, entropy_c: Tensor, d_out_c2: Tensor) -> Tensor:
    by_logp_c, by_entropy_c = d_out_c2.unbind(-1)
    if z_cV.device.type == "cpu":
        d_z_cV = torch.empty_like(z_cV)
        rows = (x.contiguous().numpy() for x in (target_c, lse_c, entropy_c, by_logp_c, by_entropy_c))
        choose_backward(z_cV.numpy(), *rows, d_z_cV.numpy())
        return d_z_cV
    logp_cV = z_cV - lse_c[:, None]
    by_cV = by_logp_c[:, None] + by_entropy_c[:, None] * (logp_cV + entropy_c[:, None])
    return (-logp_cV.exp() * by_cV).scatter_add_(1, target_c[:, None], by_logp_c[:, None])
