"""What an agent costs whose turns may overlap: the longest chain of those that do not.

    turn ───▶ turn ─────────▶ turn          each after what had ended when it began
         └──▶ turn ─▶ subagent ──┘

Not here: what was said in the turns (`swarm.dialogue`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from msgspec import Struct, field

from swarm.said import Said
from swarm.types import Stage, ToolSpec


class Chain(Struct):
    """A sampled turn after those that had ended when it began: `total` steps for the longest chain of them.

    A subagent's rollout is one too, after the turn that called it, which keeps it in `spawned`.
    """

    steps: int
    total: int
    before: Chain | None
    spawned: list[Chain] = field(default_factory=list["Chain"])


class Chains:
    """The turns of one rollout: `before = chains.longest` when a turn begins, `chains.ended(said, tools, before)`."""

    def __init__(self) -> None:
        self.longest: Chain | None = None
        self._turns: list[Chain] = []
        self._callers: dict[str, Chain] = {}

    @property
    def total(self) -> int:
        """Critical steps so far."""
        return self.longest.total if self.longest else 0

    def ended(self, said: Said, tools: Sequence[ToolSpec], before: Chain | None) -> Chain:
        """A turn that calls ordinary tools so often, and began after `before`."""
        ordinary = {tool.name for tool in tools if tool.ordinary}
        steps = max(1, sum(call.name in ordinary for call in said.calls))
        turn = Chain(steps, steps + (before.total if before else 0), before)
        self._turns.append(turn)
        self._callers.update(dict.fromkeys(said.ids, turn))
        self._lengthen(turn)
        return turn

    def ran(self, name: str, ordinary: int) -> None:
        """Of the turn with the call of this name only so many ordinary calls are run; refused ones cost nothing.

        To be said before anything else is asked.
        """
        turn = self._callers[name]
        turn.total += max(1, ordinary) - turn.steps
        turn.steps = max(1, ordinary)
        every = [*self._turns, *(child for turn in self._turns for child in turn.spawned)]
        self.longest = max(every, key=lambda turn: turn.total)

    def spawned(self, name: str, steps: int) -> None:
        """The call of this name ran a subagent, which is through after so many critical steps."""
        turn = self._callers[name]
        child = Chain(steps, turn.total + steps, turn)
        turn.spawned.append(child)
        self._lengthen(child)

    def stages(self, turns: Sequence[Chain]) -> tuple[Stage, ...]:
        """One a turn, in their order; those off the longest chain cost nothing."""
        paid: set[int] = set()
        turn = self.longest
        while turn is not None:
            paid.add(id(turn))
            turn = turn.before
        return tuple(_stage(turn, paid) for turn in turns)

    def _lengthen(self, turn: Chain) -> None:
        if turn.total > self.total:
            self.longest = turn


def _stage(turn: Chain, paid: Set[int]) -> Stage:
    """What a turn costs on the longest chain, of which `paid` are the ids, with the subagents that this covers."""
    if id(turn) not in paid:
        return Stage(0)
    slowest = max((child.steps for child in turn.spawned if id(child) in paid), default=0)
    return Stage(turn.steps, tuple(child.steps for child in turn.spawned if child.steps <= slowest))
