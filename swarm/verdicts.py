"""How a finished rollout is judged: what a verifier is, and what it says.

Not here: the verifiers (`rewards.verifiers`, `rewards.judge`), and what of a score becomes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from swarm.types import Rollout, Table, Task


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier found: `Verdict({"item_f1": .8})`; where it failed itself, why, and no score: never 0."""

    scores: Mapping[str, float]
    error: str = ""

    def __post_init__(self) -> None:
        if bool(self.scores) == bool(self.error):
            raise ValueError(f"verdict: scores {dict(self.scores)} with error {self.error!r}, want one of them")


class Verifier(Protocol):
    """Scores a finished rollout: `await TableVerifier()(rollout)`. `main` names the score that stands for it."""

    @property
    def main(self) -> str: ...

    def fits(self, task: Task) -> str:
        """Why it cannot score rollouts of this task, in a few words; nothing where it can."""
        ...

    async def __call__(self, rollout: Rollout) -> Verdict: ...


class TableScore(Protocol):
    """Scores a table against its task, in plain Python: `{"item_f1": .8, "row_f1": .5, ...}`."""

    def __call__(self, task: Task, table: Table) -> Mapping[str, float]: ...
