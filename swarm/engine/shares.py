"""How many of the engines serve the policy, and how many the subagents: as the queues ask, one move an iteration.

    rebalance ── mean wait of a request on each side ─▶ shift ─▶ one engine leaves, empty, and takes the weights of
                                                                 the other side

Waits of a side are taken to fall with its engines: with k, a wait of w becomes w·k/(k+1) with one more. An engine
moves when that makes the longer of the two waits clearly shorter, so no move is taken back while the load is what
it is (Kimi K2.5, arXiv 2602.02276, adapts the ratio in the same sense). Not here: how a request finds an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from swarm.checks import want
from swarm.engine.pool import Pool

Shift = Literal[-1, 0, 1]
"""1: an engine of the subagents goes to the policy; -1: the other way."""


@dataclass(frozen=True, slots=True)
class Balance:
    """An engine moves if the longer wait is `floor` seconds or more, and becomes at least `gain` of it shorter.

    It has `seconds` to answer what it has been asked.
    """

    floor: float = 0.05
    gain: float = 0.2
    seconds: float = 60.0

    def __post_init__(self) -> None:
        want("balance", "floor", self.floor, self.floor >= 0, "at least 0")
        want("balance", "gain", self.gain, 0 < self.gain < 1, "more than 0, less than 1")
        want("balance", "seconds", self.seconds, self.seconds > 0, "more than 0")


def shift(policy: int, subagents: int, queued_policy: float, queued_subagents: float, balance: Balance) -> Shift:
    """With so many engines and mean seconds of waiting on each side: `shift(1, 3, 2.0, 0.5, Balance())` is 1.

    There the policy would wait 2.0 · 1/2 = 1.0 s and the subagents 0.5 · 3/2 = 0.75 s, and 1.0 is half of 2.0.
    """
    if queued_policy >= queued_subagents:
        better = _after(policy, subagents, queued_policy, queued_subagents, balance)
        return 1 if better else 0
    return -1 if _after(subagents, policy, queued_subagents, queued_policy, balance) else 0


def _after(gets: int, gives: int, waits: float, other: float, balance: Balance) -> bool:
    if gives < 2 or waits < balance.floor:
        return False
    return max(waits * gets / (gets + 1), other * gives / (gives - 1)) <= (1 - balance.gain) * waits


class Shares:
    """`shares = Shares(policy, subagents)`; every iteration `await shares.rebalance()`, then the policy's update."""

    def __init__(self, policy: Pool, subagents: Pool, balance: Balance | None = None) -> None:
        self.policy, self.subagents = policy, subagents
        self.balance = balance or Balance()
        self.moves = 0

    async def rebalance(self) -> Mapping[str, float]:
        """Moves at most one engine, by what the queues were since the last time; the metrics of both sides.

        What the policy gains serves from its next update on, what the subagents gain as soon as it has loaded their
        checkpoint. An engine that is not empty in time stays where it is.
        """
        queued = self.policy.waits.take(), self.subagents.waits.take()
        match shift(len(self.policy.serving), len(self.subagents.serving), *queued, self.balance):
            case 1:
                await self._move(self.subagents, self.policy)
            case -1:
                await self._move(self.policy, self.subagents)
            case 0:
                pass
        return {
            "serving/policy_engines": len(self.policy.members),
            "serving/subagent_engines": len(self.subagents.members),
            "serving/queued_policy": queued[0],
            "serving/queued_subagents": queued[1],
        }

    async def _move(self, gives: Pool, gets: Pool) -> None:
        member = await gives.release(self.balance.seconds)
        if member is not None:
            gets.add(member)
            self.moves += 1
