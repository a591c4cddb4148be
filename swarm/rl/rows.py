# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Segments as training rows: their ids, where the policy acted, and how rows go through a model.

Ids are taken as they are, never made again from text. Rows are cut into micro-batches by their size in
tokens, sorted by length, and packed without padding. Axes: S rows, N action tokens (row by row, left to
right), L all tokens; of one micro-batch: B rows, T tokens, n action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.rl.trees import Tree, trees_of
from swarm.types import Segment

_TREES = 2  # at least so many to a micro-batch, so that two cores have one each


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows laid end to end: row s is `ids_L[start_S[s] : start_S[s] + length_S[s]]`.

    Its action tokens are `first_S[s] : first_S[s] + actions_S[s]` of N; token j stands at `position_N[j]`
    of its row and is predicted from the position before. `target_N` are the ids of the action tokens.
    """

    ids_L: Tensor
    start_S: Tensor
    length_S: Tensor
    first_S: Tensor
    actions_S: Tensor
    position_N: Tensor
    target_N: Tensor

    def __len__(self) -> int:
        return len(self.length_S)

    def to(self, device: torch.device) -> Rows:
        return Rows(*(getattr(self, name).to(device) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through a model together, packed end to end in `ids_T` as segments of these `lengths`.

    Segment g goes on from segment `after[g]`, which rows have in common, or from none (−1).
    `read_n` are the positions in T from which the action tokens are predicted, `target_n` the action
    ids, `index_n` says which of N they are.
    """

    ids_T: Tensor
    lengths: tuple[int, ...]
    after: tuple[int, ...]
    read_n: Tensor
    target_n: Tensor
    index_n: Tensor


def rows_of(segments: Sequence[Segment]) -> Rows:
    """One row a segment, acting where a span was sampled.

    Raises ValueError when a segment begins with an action: nothing predicts it.
    """
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    actions: list[int] = []
    for segment in segments:
        at = before = len(ids)
        acted = len(positions)
        for span in segment.spans:
            if span.kind == "sampled":
                positions.extend(range(at - before, at - before + len(span.ids)))
            ids.extend(span.ids)
            at += len(span.ids)
        if len(positions) > acted and positions[acted] == 0:
            raise ValueError("a segment begins with a sampled token, want a prompt before it")
        lengths.append(at - before)
        actions.append(len(positions) - acted)
    return _laid_out(torch.tensor(ids, dtype=torch.long), lengths, positions, actions)


def _laid_out(ids_L: Tensor, lengths: list[int], positions: list[int], actions: list[int]) -> Rows:
    length_S = torch.tensor(lengths, dtype=torch.long)
    actions_S = torch.tensor(actions, dtype=torch.long)
    start_S, first_S = length_S.cumsum(0) - length_S, actions_S.cumsum(0) - actions_S
    position_N = torch.tensor(positions, dtype=torch.long)
    target_N = ids_L[start_S.repeat_interleave(actions_S) + position_N]
    return Rows(ids_L, start_S, length_S, first_S, actions_S, position_N, target_N)


def ends_of(rows: Rows, chosen_S: Tensor) -> Rows:
    """The chosen rows, each read once: at its last token, from where its next token would be predicted."""
    length_S = rows.length_S[chosen_S]
    one_S = torch.ones_like(length_S)
    picked = replace(rows, start_S=rows.start_S[chosen_S], length_S=length_S, actions_S=one_S)
    return replace(
        picked, first_S=one_S.cumsum(0) - one_S, position_N=length_S.clone(), target_N=torch.zeros_like(length_S)
    )


def micro_batches(rows: Rows, chosen_S: Tensor, budget: int, share: bool = True) -> list[MicroBatch]:
    """The chosen rows that have actions, longest first, in micro-batches of at most `budget` tokens.

    With `share`, what rows have in common at their beginning is there once, where that is predicted to pay (on a
    CPU: elsewhere branches are computed one by one). A row longer than the budget goes alone. `chosen_S` holds
    row indices.
    """
    chosen_S = chosen_S[rows.actions_S[chosen_S] > 0]
    chosen_S = chosen_S[rows.length_S[chosen_S].argsort(descending=True, stable=True)]
    lengths: list[int] = rows.length_S[chosen_S].tolist()
    trees = [Tree((k,), 0) for k in range(len(lengths))]
    if share and rows.ids_L.device.type == "cpu":
        ids_L, start_S = rows.ids_L.numpy(), rows.start_S[chosen_S].tolist()
        found = trees_of([ids_L[a : a + n] for a, n in zip(start_S, lengths, strict=True)], budget // _TREES)
        trees = sorted(found, key=lambda tree: min(tree.rows))
    out: list[MicroBatch] = []
    held: list[Tree] = []
    size = 0
    for tree in trees:
        tokens = tree.trunk + sum(lengths[k] - tree.trunk for k in tree.rows)
        if held and size + tokens > budget:
            out.append(_packed(rows, chosen_S, held))
            held, size = [], 0
        held.append(tree)
        size += tokens
    return [*out, _packed(rows, chosen_S, held)] if held else out


def _packed(rows: Rows, chosen_S: Tensor, trees: Sequence[Tree]) -> MicroBatch:
    """Trees end to end: a trunk, then its branches; a row alone is a branch without a trunk."""
    chosen_B = chosen_S[torch.tensor([k for tree in trees for k in tree.rows], device=chosen_S.device)]
    lengths: list[int] = rows.length_S[chosen_B].tolist()
    begins: list[int] = rows.start_S[chosen_B].tolist()
    segments: list[tuple[int, int, int]] = []  # where its ids begin, its length, what it goes on from
    trunks: list[
        tuple[int, int, int]
    ] = []  # of each row: tokens in its trunk, where in the pack that and the row begin
    at = row = 0
    for tree in trees:
        root, trunk_at = (len(segments), at) if tree.trunk else (-1, at)
        if tree.trunk:
            segments.append((begins[row], tree.trunk, -1))
            at += tree.trunk
        for _ in tree.rows:
            own = lengths[row] - tree.trunk
            segments.append((begins[row] + tree.trunk, own, root))
            trunks.append((tree.trunk, trunk_at, at))
            at, row = at + own, row + 1
    return _gathered(rows, chosen_B, segments, trunks)


def _gathered(
    rows: Rows, chosen_B: Tensor, segments: Sequence[tuple[int, int, int]], trunks: Sequence[tuple[int, int, int]]
) -> MicroBatch:
    start_G, length_G, after_G = (torch.tensor(x, device=chosen_B.device) for x in zip(*segments, strict=True))
    actions_B = rows.actions_S[chosen_B]
    index_n = _ranges(rows.first_S[chosen_B], actions_B)
    trunk_n, trunk_at_n, at_n = (
        torch.tensor(x, device=chosen_B.device).repeat_interleave(actions_B) for x in zip(*trunks, strict=True)
    )
    before_n = rows.position_N[index_n] - 1
    return MicroBatch(
        ids_T=rows.ids_L[_ranges(start_G, length_G)],
        lengths=tuple(length_G.tolist()),
        after=tuple(after_G.tolist()),
        read_n=torch.where(before_n < trunk_n, trunk_at_n + before_n, at_n + before_n - trunk_n),
        target_n=rows.target_N[index_n],
        index_n=index_n,
    )


def _ranges(start_B: Tensor, count_B: Tensor) -> Tensor:
    """`start[0] … start[0] + count[0] − 1, start[1] …`, end to end."""
    shift_B = start_B - (count_B.cumsum(0) - count_B)
    return shift_B.repeat_interleave(count_B) + torch.arange(int(count_B.sum()), device=start_B.device)
