# pyright: reportCallIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The steps of a Qwen3 layer as autograd functions over the compiled kernels: few of them, and little kept.

What a product reads is made again in the backward where that takes one pass: normed rows and gated rows are not
kept. `half`: products run in bf16, everything else in float32. CPU only. Not here: which steps make a model.

Axes: T tokens, M hidden, F outputs, X query, key and value heads, H query heads, D head width, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from swarm.engine.attention import attend, attend_backward
from swarm.engine.training_kernels import norm, norm_backward, swiglu, swiglu_backward


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the segments of a pack stand, int64: starts, lengths, the segment that each goes on from (−1: none);
    and the rotary table, cosines and sines."""

    start_G: np.ndarray
    length_G: np.ndarray
    after_G: np.ndarray
    cos_PD: np.ndarray
    sin_PD: np.ndarray


def normed(x_TM: Tensor, gain_M: Tensor, eps: float) -> Tensor:
    """RMSNorm [T, M]."""
    return cast(Tensor, _Norm.apply(x_TM, gain_M, eps))


def normed_linear(x_TM: Tensor, gain_M: Tensor, weight_FM: Tensor, eps: float, half: bool) -> Tensor:
    """RMSNorm, then a product with `weight` transposed: [T, F]."""
    return cast(Tensor, _NormedLinear.apply(x_TM, gain_M, weight_FM, eps, half))


def attended(qkv_TX: Tensor, gain_2D: Tensor, heads: int, eps: float, at: Segments, wanted_T: np.ndarray) -> Tensor:
    """Attention over rows of query, key and value heads: [T, H·D], what stands where nothing is wanted is undefined."""
    return cast(Tensor, _Attended.apply(qkv_TX, gain_2D, heads, eps, at, wanted_T))


def gated_linear(x_TM: Tensor, both_TF: Tensor, weight_MF: Tensor, half: bool) -> Tensor:
    """x + (silu(gate) · up) times `weight` transposed: [T, M]."""
    return cast(Tensor, _GatedLinear.apply(x_TM, both_TF, weight_MF, half))


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, gain_M: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TM, gain_M)
        ctx.eps = eps
        return _normed(x_TM, gain_M, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TM, gain_M = ctx.saved_tensors
        return (*_norm_slopes(x_TM, gain_M, ctx.eps, grads[0]), None)


class _NormedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, gain_M: Tensor, weight_FM: Tensor, eps: float, half: bool) -> Tensor:
        ctx.save_for_backward(x_TM, gain_M, weight_FM)
        ctx.eps, ctx.half = eps, half
        return _product(_normed(x_TM, gain_M, eps), weight_FM.t(), half)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TM, gain_M, weight_FM = ctx.saved_tensors
        d_weight_FM = _product(grads[0].t(), _normed(x_TM, gain_M, ctx.eps), ctx.half).float()
        d_h_TM = _product(grads[0], weight_FM, ctx.half)
        return (*_norm_slopes(x_TM, gain_M, ctx.eps, d_h_TM), d_weight_FM, None, None)


class _Attended(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TX: Tensor, gain_2D: Tensor, heads: int, eps: float, at: Segments, wanted_T: np.ndarray
    ) -> Tensor:
        width = gain_2D.shape[1]
        out_THD, log_TH = torch.zeros(len(qkv_TX), heads, width), torch.empty(len(qkv_TX), heads)
        attend(*_inputs(qkv_TX, gain_2D, eps, at), wanted_T, out_THD.numpy(), log_TH.numpy())
        out_TX = out_THD.view(len(qkv_TX), -1)
        ctx.save_for_backward(qkv_TX, gain_2D, out_TX, log_TH)
        ctx.rest = (eps, at, wanted_T)
        return out_TX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, gain_2D, out_TX, log_TH = ctx.saved_tensors
        eps, at, wanted_T = ctx.rest
        heads, width = log_TH.shape[1], gain_2D.shape[1]
        d_qkv_TX, d_gain_2D = torch.zeros_like(qkv_TX, dtype=torch.float32), torch.zeros(gain_2D.shape)
        out_THD, d_out_THD = (_array(y.view(-1, heads, width)) for y in (out_TX, grads[0].contiguous()))
        d_qkv_TXD = d_qkv_TX.view(len(qkv_TX), -1, width).numpy()
        kept = (out_THD, _array(log_TH), d_out_THD)
        attend_backward(*_inputs(qkv_TX, gain_2D, eps, at), wanted_T, *kept, d_qkv_TXD, d_gain_2D.numpy())
        return d_qkv_TX.to(qkv_TX.dtype), d_gain_2D, None, None, None, None


class _GatedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, both_TF: Tensor, weight_MF: Tensor, half: bool) -> Tensor:
        ctx.save_for_backward(both_TF, weight_MF)
        ctx.half = half
        out_TF = torch.empty(len(both_TF), weight_MF.shape[1])
        swiglu(_array(both_TF), out_TF.numpy())
        if half:
            return x_TM + _product(out_TF, weight_MF.t(), half)
        return torch.addmm(x_TM, out_TF, weight_MF.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        both_TF, weight_MF = ctx.saved_tensors
        d_out_TF = _product(grads[0], weight_MF, ctx.half)
        out_TF, d_both_TF = torch.empty(d_out_TF.shape), torch.empty(both_TF.shape)
        swiglu_backward(_array(both_TF), _array(d_out_TF), out_TF.numpy(), d_both_TF.numpy())
        d_weight_MF = _product(grads[0].t(), out_TF, ctx.half).float()
        return grads[0], d_both_TF.to(both_TF.dtype), d_weight_MF, None


def _normed(x_TM: Tensor, gain_M: Tensor, eps: float) -> Tensor:
    out_TM = torch.empty_like(x_TM)
    norm(_array(x_TM), _array(gain_M), eps, out_TM.numpy())
    return out_TM


def _norm_slopes(x_TM: Tensor, gain_M: Tensor, eps: float, d_out_TM: Tensor) -> tuple[Tensor, Tensor]:
    d_x_TM, d_gain_M = torch.empty_like(x_TM), torch.zeros_like(gain_M)
    norm_backward(_array(x_TM), _array(gain_M), eps, _array(d_out_TM), d_x_TM.numpy(), d_gain_M.numpy())
    return d_x_TM, d_gain_M


def _product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    return torch.mm(a.bfloat16(), b.bfloat16()) if half else torch.mm(a, b)


def _inputs(qkv_TX: Tensor, gain_2D: Tensor, eps: float, at: Segments) -> tuple[Any, ...]:
    qkv_TXD = qkv_TX.view(len(qkv_TX), -1, gain_2D.shape[1])
    return _array(qkv_TXD), _array(gain_2D), eps, at.cos_PD, at.sin_PD, at.start_G, at.length_G, at.after_G


def _array(x: Tensor) -> np.ndarray:
    return x.detach().float().contiguous().numpy()
