# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The training forward of a dense Qwen3 on a CPU, from fused steps, each core with documents of its own.

    ids ─ embed ─┬─ documents of core 1: layers … last layer, norm: only at the positions that are read ─┬─ h
                 └─ documents of core 2: …                                                               ┘

A core runs products, kernels and their gradients for its documents alone, so cores wait for each other once
a pass. The formulas are those of `swarm.engine.qwen3.hidden`. Not here: other devices, the head.

Axes: T tokens, n positions that are read, M hidden, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.engine.cores import on_cores
from swarm.engine.fused import Segments, attended, gated_linear, normed, normed_linear
from swarm.engine.qwen3 import Shape, Weights, check, rope_table

_NAMES = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj")
_OF_LAYER = len(_NAMES) + 3
_TOKEN_COST = 1000  # the products of a token cost about what its attention to so many keys costs


@dataclass(frozen=True, slots=True)
class _Share:
    """One core's documents: tokens `first` to `last`, and where among them something is read."""

    first: int
    last: int
    segments: Segments
    read_u: Tensor


def hidden_at(
    weights: Weights,
    shape: Shape,
    ids_T: Tensor,
    lengths: Sequence[int],
    after: Sequence[int],
    read_n: Tensor,
    half: bool = False,
) -> Tensor:
    """Final-norm hidden states (n, M), float32, at positions `read_n` of segments packed end to end.

    `after[g]` is the segment that segment g goes on from, −1 for none; those that go on from a segment follow it
    directly. `half` runs the products in bf16. As many cores as torch has threads are used, where there are
    documents for them. Raises ValueError when lengths and ids or `after` do not fit.
    """
    check(ids_T, lengths, after)
    x_TM = F.embedding(ids_T, weights["model.embed_tokens.weight"]).float()
    read_u, place_n = read_n.unique(return_inverse=True)
    shares = _shares(shape, lengths, after, read_u, torch.get_num_threads())
    if not shares:
        return x_TM[:0]

    def body(share: _Share, x_TM: Tensor, *flat: Tensor) -> Tensor:
        return _body(flat, shape, x_TM, share, half)

    return on_cores(body, shares, x_TM, *_flat(weights, shape)).index_select(0, place_n)


def _body(flat: Sequence[Tensor], shape: Shape, x_TM: Tensor, share: _Share, half: bool) -> Tensor:
    everything_T = np.ones(len(x_TM), np.uint8)
    for i in range(shape.layers):
        gain_M, gain_after_M, out_MX, down_MF, gain_2D, qkv_XM, both_FM = flat[i * _OF_LAYER : (i + 1) * _OF_LAYER]
        last = i == shape.layers - 1
        qkv_TX = normed_linear(x_TM, gain_M, qkv_XM, shape.eps, half)
        wanted_T = _marked(share.read_u, len(x_TM)) if last else everything_T
        o_TX = attended(qkv_TX, gain_2D, shape.heads, shape.eps, share.segments, wanted_T)
        if last:
            # Nothing reads the last layer's other rows.
            x_TM, o_TX = x_TM.index_select(0, share.read_u), o_TX.index_select(0, share.read_u)
        x_TM = x_TM + o_TX.bfloat16() @ out_MX.bfloat16().t() if half else torch.addmm(x_TM, o_TX, out_MX.t())
        x_TM = gated_linear(x_TM, normed_linear(x_TM, gain_after_M, both_FM, shape.eps, half), down_MF, half)
    return normed(x_TM, flat[-1], shape.eps)


def _flat(weights: Weights, shape: Shape) -> list[Tensor]:
    """The weights of all layers in a row, those that read the same rows side by side, and the last gain."""
    flat: list[Tensor] = []
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        flat += [weights[f"{layer}{name}.weight"] for name in _NAMES]
        flat += [
            torch.stack([weights[f"{layer}self_attn.{x}_norm.weight"] for x in "qk"]),
            torch.cat([weights[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"]),
            torch.cat([weights[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        ]
    return [*flat, weights["model.norm.weight"]]


def _shares(shape: Shape, lengths: Sequence[int], after: Sequence[int], read_u: Tensor, cores: int) -> list[_Share]:
    """Whole trees in a row for each core, of about the same cost; only cores that have something to read."""
    length_G, after_G = np.array(lengths, np.int64), np.array(after, np.int64)
    start_G = np.cumsum(length_G) - length_G
    keys_G = length_G + np.where(after_G < 0, 0, 2 * length_G[after_G])
    cost_G = np.cumsum(length_G * (_TOKEN_COST + keys_G / 2))
    root_G = np.append(np.flatnonzero(after_G < 0), len(length_G))
    # A cut before the first root whose tree begins at or after an even part of the cost.
    begun_G = np.append(0.0, cost_G)[root_G]
    cuts = sorted({int(root_G[np.searchsorted(begun_G, cost_G[-1] * k / cores - 0.5)]) for k in range(cores + 1)})
    cos_PD, sin_PD = (
        x.numpy() for x in rope_table(shape, int((length_G + np.where(after_G < 0, 0, length_G[after_G])).max()))
    )
    shares: list[_Share] = []
    for a, b in pairwise(cuts):
        first, last = int(start_G[a]), int(start_G[b - 1] + length_G[b - 1])
        own_u = read_u[(read_u >= first) & (read_u < last)] - first
        if len(own_u):
            after_own_G = np.where(after_G[a:b] < 0, -1, after_G[a:b] - a)
            segments = Segments(start_G[a:b] - first, length_G[a:b], after_own_G, cos_PD, sin_PD)
            shares.append(_Share(first, last, segments, own_u))
    return shares


def _marked(read_u: Tensor, count: int) -> np.ndarray:
    wanted_T = np.zeros(count, np.uint8)
    wanted_T[read_u.numpy()] = 1
    return wanted_T
