"""Values that depend on the optimizer step alone: reward weights that anneal, learning rates.

Not here: any clock. Two runs that made the same steps have the same values, however fast they went.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Anneal:
    """A weight that falls linearly to exactly 0: `Anneal(0.3, 100).value(50) == 0.15`.

    The annealed λ1, λ2 of the PARL reward (Kimi K2.5, arXiv 2602.02276, section 3).
    """

    start: float
    steps: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start >= 0):
            raise ValueError(f"anneal: start = {self.start}, want a finite number of at least 0")
        if self.steps < 1:
            raise ValueError(f"anneal: steps = {self.steps}, want at least 1")

    def value(self, step: int) -> float:
        """The weight before optimizer step `step` (from 0); 0.0 at `steps` and ever after."""
        return self.start * max(self.steps - step, 0) / self.steps


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """A learning rate: linear warm-up over `warmup` steps, then `decay` to `floor * peak` at `total`.

    `LrSchedule(2e-4).at(7) == 2e-4`; `LrSchedule(1.0, warmup=4).at(0) == 0.25`.
    """

    peak: float
    warmup: int = 0
    total: int = 0
    decay: Decay = "constant"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise ValueError(f"learning rate: peak = {self.peak}, want a finite number above 0")
        if self.warmup < 0:
            raise ValueError(f"learning rate: warmup = {self.warmup}, want at least 0")
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"learning rate: decay = {self.decay!r}, want 'constant', 'linear' or 'cosine'")
        if self.decay != "constant" and self.total <= self.warmup:
            raise ValueError(f"learning rate: total = {self.total}, want more than warmup = {self.warmup}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"learning rate: floor = {self.floor}, want 0 to 1")

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0; the first step of a warm-up is above 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.decay == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.floor + (1.0 - self.floor) * left)
