# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which rows go through a model together with their common beginning computed once.

    system prompt, task ─┬─ branch of row 1        rows that begin alike: the branches of a fork,
                         ├─ branch of row 2        segments of a rollout, rollouts of a task,
                         └─ branch of row 3        all rows with one system prompt

Trees have one level: a trunk and branches. They are chosen by what a model of the cost predicts to be saved.
Not here: how a tree is computed (`swarm.engine.body`), micro-batches (`swarm.rl.rows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_COST = 1000.0
"""The products of a token cost about what its attention to so many keys costs: 800 to 1500 for small models."""
LEAST_SAVING = 0.03
"""A tree that saves a smaller part of its rows' cost is not worth its padding."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows, by their places in the list that was given, and how many first tokens they have in common.

    `Tree((4, 7), 120)`. A row on its own is `Tree((3,), 0)`. Every row goes on past the trunk.
    """

    rows: tuple[int, ...]
    trunk: int


def cost(tokens: np.ndarray | float) -> np.ndarray | float:
    """Of a causal forward over so many tokens, in attended keys: n (C + n / 2)."""
    return tokens * (TOKEN_COST + tokens / 2)


def saving(lengths: Sequence[int], trunk: int) -> float:
    """The part of the cost of these rows that is saved when their first `trunk` tokens are computed once."""
    return float((len(lengths) - 1) * cost(trunk) / sum(cost(n) for n in lengths))


def trees_of(rows: Sequence[np.ndarray], most: int) -> list[Tree]:
    """Every row in one tree, of at most `most` tokens unless it is a row alone; in no particular order.

    Rows that begin alike are neighbours when sorted. Among all ways to cut the sorted rows, the one that is
    predicted to save most (dynamic programming over the place of the last cut).
    """
    if not rows:
        return []
    order = sorted(range(len(rows)), key=lambda k: rows[k].astype(">u4").tobytes())
    lengths = np.array([len(rows[k]) for k in order], np.int64)
    alike = np.array([_alike(rows[a], rows[b]) for a, b in itertools.pairwise(order)], np.int64)
    begins = _cut(lengths, alike, most)
    trees: list[Tree] = []
    for a, b in zip(begins, [*begins[1:], len(order)], strict=True):
        trunk = _trunk(lengths[a:b], alike[a : b - 1])
        if b - a > 1 and saving(lengths[a:b].tolist(), trunk) >= LEAST_SAVING:
            trees.append(Tree(tuple(order[a:b]), trunk))
        else:
            trees += [Tree((k,), 0) for k in order[a:b]]
    return trees


def _cut(lengths: np.ndarray, alike: np.ndarray, most: int) -> list[int]:
    """Where trees begin among the sorted rows."""
    total = np.append(0, np.cumsum(lengths))
    best, begin = np.zeros(len(lengths) + 1), np.zeros(len(lengths) + 1, np.int64)
    for end in range(1, len(lengths) + 1):
        # Trees of 2, 3, … rows that end here: the trunk is the least that neighbours have in common.
        trunk = np.minimum.accumulate(
            np.minimum(alike[: end - 1], np.minimum(lengths[: end - 1], lengths[1:end]) - 1)[::-1]
        )
        more = np.arange(1, end)
        tokens = total[end] - total[end - 1 - more] - more * trunk
        gain = np.append(0.0, np.where(tokens <= most, more * cost(trunk), -1.0)) + best[:end][::-1]
        k = int(gain.argmax())
        best[end], begin[end] = gain[k], end - 1 - k
    begins: list[int] = []
    end = len(lengths)
    while end > 0:
        end = int(begin[end])
        begins.append(end)
    return begins[::-1]


def _trunk(lengths: np.ndarray, alike: np.ndarray) -> int:
    return int(min(alike.min(), lengths.min() - 1)) if len(alike) else 0


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
