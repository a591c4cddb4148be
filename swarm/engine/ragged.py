# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The incremental forward of the embedded engine: rows of many sequences, prefill and decode alike.

A step takes, of each sequence, the ids that have no keys and values yet (one id when decoding,
a chunk when prefilling), all laid end to end, and returns logits after each sequence's last row.
Matrix products are torch's on fp32; everything between them is a kernel. Equal to
`swarm.engine.qwen3` up to rounding (2e-6 in a logit). Not here: scheduling, gradients.

Axes: N rows, S sequences, B blocks of a sequence, M hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.engine import kernels
from swarm.engine.qwen3 import Shape, Weights, head_of, rope_table

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, laid out for the engine: matrices (in, out), gains as arrays.

    `head_gains` has a row for each query and key head; the queries' hold log2(e) / sqrt(head width) as well.
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Floats
    ffn_norm: Floats
    head_gains: Floats


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """A copy of a model's weights in fp32 with q, k, v and gate, up side by side."""

    shape: Shape
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Tensor
    cos: Floats
    sin: Floats


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step computes: sequence s has rows `first[s]` to `first[s + 1]`, the first at `position[s]`."""

    ids: Ints
    first: Ints
    position: Ints
    table: Ints


def fuse(weights: Weights, shape: Shape, max_len: int) -> FusedWeights:
    """Copies and lays out the weights; rotary tables reach to `max_len`."""
    cos_PD, sin_PD = rope_table(shape, max_len)
    return FusedWeights(
        shape=shape,
        embed=_copy(weights["model.embed_tokens.weight"]),
        layers=tuple(_layer(weights, shape, f"model.layers.{i}.") for i in range(shape.layers)),
        norm=_copy(weights["model.norm.weight"]).numpy(),
        head=_copy(head_of(weights)).T,
        cos=cos_PD.numpy(),
        sin=sin_PD.numpy(),
    )


def digest(weights: FusedWeights) -> str:
    """sha256 of all weights as they are laid out here; rotary tables are no weights."""
    sha = hashlib.sha256()
    layers = (getattr(layer, f.name) for layer in weights.layers for f in fields(layer))
    for x in (weights.embed, weights.norm, weights.head, *layers):
        array = x.contiguous().numpy() if isinstance(x, Tensor) else x
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def empty_cache(shape: Shape, blocks: int) -> Floats:
    """Keys and values of all layers: (layers, blocks, kv heads, 2, BLOCK * head width), zero and not yet resident."""
    return np.zeros((shape.layers, blocks, shape.kv_heads, 2, kernels.BLOCK * shape.head_dim), np.float32)


def block_bytes(shape: Shape) -> int:
    return shape.layers * shape.kv_heads * 2 * kernels.BLOCK * shape.head_dim * 4


class Stepper:
    """Scratch memory of one thread: `Stepper(shape, rows=4096)` steps at most so many rows at once."""

    def __init__(self, shape: Shape, rows: int) -> None:
        s, self.rows = shape, rows
        self._x, self._h, self._delta = (torch.empty(rows, s.hidden) for _ in range(3))
        self._qkv = torch.empty(rows, (s.heads + 2 * s.kv_heads) * s.head_dim)
        self._q, self._att = (torch.empty(rows, s.heads * s.head_dim) for _ in range(2))
        self._gate_up, self._act = torch.empty(rows, 2 * s.ffn), torch.empty(rows, s.ffn)

    def logits(self, w: FusedWeights, cache: Floats, rows: Rows) -> Floats:
        """Computes the rows, writes their keys and values into the cache; returns logits (S, V)."""
        n, s = len(rows.ids), w.shape
        eps = np.float32(s.eps)
        x, delta, qkv = self._x[:n], self._delta[:n], self._qkv[:n]
        torch.index_select(w.embed, 0, torch.from_numpy(rows.ids), out=x)
        delta.zero_()
        where = (rows.table, rows.first, rows.position)
        for layer, kv in zip(w.layers, cache, strict=True):
            h, q_NHD = self._h[: len(x)], self._heads(self._q[:n], s)
            kernels.add_norm(x.numpy(), delta.numpy(), layer.norm, eps, h.numpy())
            torch.mm(h, layer.qkv, out=qkv)
            kernels.place(self._heads(qkv, s), layer.head_gains, eps, w.cos, w.sin, *where, q_NHD, kv)
            if layer is w.layers[-1]:
                # Nothing reads the last layer's output but the head: from here on, one row a sequence.
                last = rows.first[1:] - 1
                x, delta, q_NHD = x[last], delta[: len(last)], q_NHD[last]
                where = (rows.table, np.arange(len(last) + 1), rows.position + np.diff(rows.first) - 1)
            self._rest(w, layer, kv, x, delta, q_NHD, where)
        h = self._h[: len(x)]
        kernels.add_norm(x.numpy(), delta.numpy(), w.norm, eps, h.numpy())
        return torch.mm(h, w.head).numpy()

    def _rest(
        self,
        w: FusedWeights,
        layer: LayerWeights,
        kv: Floats,
        x: Tensor,
        delta: Tensor,
        q_NHD: Floats,
        where: tuple[Ints, Ints, Ints],
    ) -> None:
        """A layer from attention on; its output is x + delta."""
        h, att, gate_up, act = (t[: len(x)] for t in (self._h, self._att, self._gate_up, self._act))
        kernels.attend(q_NHD, kv, *where, self._heads(att, w.shape))
        torch.mm(att, layer.out, out=delta)
        kernels.add_norm(x.numpy(), delta.numpy(), layer.ffn_norm, np.float32(w.shape.eps), h.numpy())
        torch.mm(h, layer.gate_up, out=gate_up)
        kernels.swiglu(gate_up.numpy(), act.numpy())
        torch.mm(act, layer.down, out=delta)

    @staticmethod
    def _heads(t: Tensor, shape: Shape) -> Floats:
        return t.numpy().reshape(len(t), -1, shape.head_dim)


def rows_of(chunks: Sequence[Sequence[int]], positions: Sequence[int], tables: Sequence[Sequence[int]]) -> Rows:
    """Lays chunks end to end: chunk s starts at `positions[s]` of a sequence whose blocks are `tables[s]`."""
    first = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum([len(c) for c in chunks], out=first[1:])
    table = np.zeros((len(chunks), max(map(len, tables))), np.int64)
    for s, blocks in enumerate(tables):
        table[s, : len(blocks)] = blocks
    ids = np.array([i for c in chunks for i in c], np.int64)
    return Rows(ids, first, np.array(positions, np.int64), table)


def _layer(weights: Weights, shape: Shape, name: str) -> LayerWeights:
    def stacked(*parts: str) -> Tensor:
        return torch.cat([_copy(weights[f"{name}{p}.weight"]) for p in parts]).T

    def gain(part: str) -> Floats:
        return _copy(weights[f"{name}{part}.weight"]).numpy()

    q_gains = np.tile(gain("self_attn.q_norm") * (math.log2(math.e) / math.sqrt(shape.head_dim)), (shape.heads, 1))
    k_gains = np.tile(gain("self_attn.k_norm"), (shape.kv_heads, 1))
    return LayerWeights(
        qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=stacked("self_attn.o_proj"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=stacked("mlp.down_proj"),
        norm=gain("input_layernorm"),
        ffn_norm=gain("post_attention_layernorm"),
        head_gains=np.concatenate([q_gains, k_gains]).astype(np.float32),
    )


def _copy(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float32, copy=True)
