# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Hidden states of a micro-batch by a model's own forward: any causal model, each row with all that it goes on from.

    trunk ─┬─ branch 1        trunk branch 1
           └─ branch 2   ──▶  trunk branch 2 ·
    row                       row · · ·             rows of about the same length, padded at their end

Rows are cut after the last position that is read. Documents are rows of their own, so that they cannot see each
other whatever the family's attention is: windows, mixtures of experts, recurrent states.
Not here: the packed forward of a dense Qwen3 (`swarm.rl.forward`).
Axes: T tokens of the pack, n read positions, B rows, L their length, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.rl.head import trunk
from swarm.rl.rows import MicroBatch

_FILLED = 0.75  # the least part of a padded row that is tokens: another forward costs less than more padding


def hidden_unpacked(model: PreTrainedModel, micro: MicroBatch, bf16: bool = False) -> Tensor:
    """Final hidden states [n, d], float32, at the positions that the micro-batch reads."""
    parts, row_T, column_T = _unpacked(micro)
    row_n, column_n = row_T[micro.read_n], column_T[micro.read_n]
    out: list[Tensor] = []
    places: list[Tensor] = []
    for group in _groups(_lengths(len(parts), row_n, column_n)):
        ids_BL = micro.ids_T.new_zeros(len(group), max(n for _, n in group))
        slot_R = torch.full((len(parts),), -1, device=row_n.device)
        for b, (row, n) in enumerate(group):
            ids_BL[b, :n] = torch.cat([micro.ids_T[a:z] for a, z in parts[row]])[:n]
            slot_R[row] = b
        at_m = (slot_R[row_n] >= 0).nonzero()[:, 0]
        with torch.autocast(ids_BL.device.type, torch.bfloat16, enabled=bf16):
            h_BLd = trunk(model, ids_BL)
        out.append(h_BLd[slot_R[row_n[at_m]], column_n[at_m]].float())
        places.append(at_m)
    if not out:
        return torch.zeros(0, model.config.hidden_size, device=row_n.device)
    return torch.cat(out)[torch.cat(places).argsort()]


def _unpacked(micro: MicroBatch) -> tuple[list[list[tuple[int, int]]], Tensor, Tensor]:
    """The pieces of the pack that make up each row, and the row and column at which each token of the pack is read.

    What several branches go on from is read in the first of them.
    """
    starts = [0]
    for n in micro.lengths:
        starts.append(starts[-1] + n)
    pieces = [(starts[g], starts[g + 1]) for g in range(len(micro.lengths))]
    row_T, column_T = torch.full_like(micro.ids_T, -1), torch.zeros_like(micro.ids_T)
    parts: list[list[tuple[int, int]]] = []
    shared = set(micro.after)
    for g, before in enumerate(micro.after):
        if before < 0 and g in shared:
            continue
        row = [pieces[before], pieces[g]] if before >= 0 else [pieces[g]]
        column = 0
        for a, z in row:
            if row_T[a] < 0:
                row_T[a:z] = len(parts)
                column_T[a:z] = torch.arange(column, column + z - a, device=row_T.device)
            column += z - a
        parts.append(row)
    return parts, row_T, column_T


def _lengths(rows: int, row_n: Tensor, column_n: Tensor) -> list[int]:
    """Tokens of each row up to the last that is read, 0 where none is."""
    length_R = torch.zeros(rows, dtype=torch.long, device=row_n.device)
    return length_R.scatter_reduce(0, row_n, column_n + 1, "amax").tolist()


def _groups(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rows and their lengths, longest first, those that go through the model together in one list."""
    groups: list[list[tuple[int, int]]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if lengths[row] == 0:
            break
        if not groups or lengths[row] < _FILLED * groups[-1][0][1]:
            groups.append([])
        groups[-1].append((row, lengths[row]))
    return groups
