"""Counterfactual credit: what one spawn was worth, by running its turn again, with and without it, many times.

    with       the turn as it was said; all of its calls run again, and the rest is live
    without    the same, but the assignment is not run: it returns what a subagent that found nothing returns

Both arms have the same seeds in pairs, so what the spawn has no part in goes alike as far as it can. Not here: forks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import cast

import numpy as np
import trio
from rich.box import SIMPLE_HEAD
from rich.table import Table

from swarm.fork import Edit, ForkError, fork
from swarm.kept import turns_of
from swarm.loop import Harness
from swarm.replay import tree
from swarm.seeds import derive
from swarm.types import Rollout, ToolResult

NOTHING = ToolResult(("none",))
Score = Callable[[Sequence[Rollout]], Awaitable[list[float | None]]]
"""The reward of each rollout; None for one that has none."""
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Gain:
    """The mean of with − without over the pairs, and its 95 % interval: `Gain(0.21, 0.08, 0.34)`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True, slots=True)
class Credit:
    """What the call at `place` of a turn brought. `pairs` have both rewards and both critical steps, with and without.

    `failed`: pairs that were left out, because an engine failed or there was no reward.
    """

    agent: str
    turn: int
    place: int
    pairs: tuple[tuple[tuple[float, float], tuple[int, int]], ...]
    failed: int

    @property
    def reward(self) -> Gain:
        return gain([a - b for (a, b), _ in self.pairs])

    @property
    def critical_steps(self) -> Gain:
        return gain([a - b for _, (a, b) in self.pairs])

    def __rich__(self) -> Table:
        table = Table(box=SIMPLE_HEAD, title=str(self), title_justify="left")
        for heading in ("", "with", "without", "difference [95 %]"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, values, difference in self._lines():
            table.add_row(name, *values, difference)
        return table

    def _repr_html_(self) -> str:
        cells = [(name, *values, difference) for name, values, difference in self._lines()]
        rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in cells)
        head = "<tr><th></th><th>with</th><th>without</th><th>difference [95 %]</th></tr>"
        return f"<table><caption>{escape(str(self))}</caption>{head}{rows}</table>"

    def __str__(self) -> str:
        left_out = f", {self.failed} left out" if self.failed else ""
        return f"{self.agent}, turn {self.turn}, call {self.place}: {len(self.pairs)} pairs{left_out}"

    def _lines(self) -> list[tuple[str, list[str], str]]:
        rewards, steps = np.array([p[0] for p in self.pairs]), np.array([p[1] for p in self.pairs])
        return [
            ("reward", [f"{x:.3f}" for x in rewards.mean(0)], str(self.reward)),
            ("critical steps", [f"{x:.1f}" for x in steps.mean(0)], str(self.critical_steps)),
        ]


async def credit(
    live: Harness, rollout: Rollout, agent: str, turn: int, place: int, *, score: Score, pairs: int = 16, seed: int = 0
) -> Credit:
    """Forks the turn twice for each of `pairs` seeds.

    Raises ForkError where no subagent ran for this call, or as `fork` does.
    """
    acts = {r.trace.agent: r.trace for r in tree(rollout)}
    if agent not in acts or not 0 <= turn < len(acts[agent].acts) or place not in acts[agent].acts[turn].children:
        raise ForkError(f"{agent}, turn {turn}, call {place}: no subagent ran for it, want a call that assigned a task")
    said = turns_of(acts[agent])[turn].ids
    edits = [
        Edit(said, results, seed=derive(seed, "credit", k)) for k in range(pairs) for results in ({}, {place: NOTHING})
    ]
    # The first alone: a fork that cannot be made is an error of its own, outside any nursery.
    made: dict[int, Rollout] = {0: (await fork(live, rollout, agent, turn, edits[0])).rollout}

    async def make(k: int) -> None:
        made[k] = (await fork(live, rollout, agent, turn, edits[k])).rollout

    async with trio.open_nursery() as nursery:
        for k in range(1, len(edits)):
            nursery.start_soon(make, k)
    rollouts = [made[k] for k in range(len(edits))]
    return _credit((agent, turn, place), rollouts, await score(rollouts))


def gain(differences: Sequence[float]) -> Gain:
    """Mean and 95 % percentile bootstrap over the pairs; NaN where there are none."""
    if not differences:
        return Gain(*[float("nan")] * 3)
    values_N = np.asarray(differences, dtype=np.float64)
    draws_RN = np.random.default_rng(0).integers(0, len(values_N), (_RESAMPLES, len(values_N)))
    means_R = values_N[draws_RN].mean(1)
    low, high = cast(list[float], np.percentile(means_R, [2.5, 97.5]).tolist())  # pyright: ignore[reportUnknownMemberType]
    return Gain(float(values_N.mean()), low, high)


def _credit(at: tuple[str, int, int], rollouts: Sequence[Rollout], rewards: Sequence[float | None]) -> Credit:
    found: list[tuple[tuple[float, float], tuple[int, int]]] = []
    for k in range(0, len(rollouts), 2):
        a, b = rewards[k], rewards[k + 1]
        if a is not None and b is not None and not (rollouts[k].failed or rollouts[k + 1].failed):
            steps = (rollouts[k].ledger.critical_steps, rollouts[k + 1].ledger.critical_steps)
            found.append(((a, b), steps))
    return Credit(*at, tuple(found), len(rollouts) // 2 - len(found))
