"""The roster of a recipe: which role is played by which checkpoints, how it is run, and when others take over.

Not here: the roster at work (`subagents.roster`), and what a run has written of it (`recipes.cast.book`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from recipes.placement import EngineKind
from swarm.checks import want

_want = partial(want, "role")

Weights = dict[str, float]
"""Checkpoint folders, each with its weight: of several, every spawn draws one."""
Swaps = dict[str, dict[str, Weights]]
"""`{"20": {"": {"FOLDER": 1}}}`: from iteration 20 on, a role ("" for every name without one) is played by these."""


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """How one role is run, and by whom; whatever is not set is as for every other subagent.

    `checkpoints`: folders with weights. `engine`: the kind that serves it. `system`: its own prompt, in the place of
    the one that the orchestrator writes. `reply_tokens`: how much of its answer comes back. The rest are limits.
    """

    checkpoints: Weights = field(default_factory=dict[str, float])
    engine: EngineKind | Literal[""] = ""
    system: str = ""
    reply_tokens: int = 0
    turn_tokens: int = 0
    context: int = 0
    steps: int = 0
    seconds: float = 0.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_weights("checkpoints", self.checkpoints)
        for name in (*LIMITS, "reply_tokens"):
            value = getattr(self, name)
            _want(name, value, 0 <= value < math.inf, "more than 0, or 0 for what every subagent has")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are its own."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name)}


LIMITS = ("turn_tokens", "context", "steps", "seconds", "temperature")


def label(checkpoint: str) -> str:
    """What a checkpoint is called: by its folder's name, the policy of a run by the run's."""
    path = Path(checkpoint)
    return path.parent.name if path.name == "policy" else path.name


def check_weights(name: str, weights: Mapping[str, float]) -> None:
    """Raises ValueError for a weight that is none."""
    for folder, weight in weights.items():
        _want(f"{name}[{folder!r}]", weight, 0 < weight < math.inf, "a finite weight above 0")


def check_swaps(swaps: Swaps, iterations: int) -> None:
    """Raises ValueError for an iteration that the run has not, or a role without checkpoints."""
    for text, cast in swaps.items():
        _want(f"swaps[{text!r}]", text, text.isdecimal() and 1 <= int(text) <= iterations, f"1 to {iterations}")
        for role, weights in cast.items():
            _want(f"swaps[{text!r}][{role!r}]", weights, bool(weights), "one checkpoint or more")
            check_weights(f"swaps[{text!r}][{role!r}]", weights)
