"""Which verifiers there are by name, and the settings of the generative one.

Not here: what they do (`rewards.verifiers`, `rewards.judge`), and the judge's engine (`recipes.grid.verifying`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from recipes.placement import EngineKind
from rewards.judge import CORRECT, LEVELS, Rubric
from swarm.checks import want

RuleName = Literal["item_f1", "strict", "official", "exact", "numeric", "set", "trails"]
VerifierName = Literal[RuleName, "judge", "hybrid"]
VERIFIERS: tuple[VerifierName, ...] = get_args(VerifierName)
JUDGED: tuple[VerifierName, ...] = ("judge", "hybrid")
"""Those that need a judge."""
_want = partial(want, "judging")


@dataclass(frozen=True, slots=True)
class Judging:
    """The generative judge of a run: `Judging(Path("judges/qwen3-8b"), weight=0.3)`.

    `checkpoint` is served by an engine of its own, of the kind `engine` ("": the run's). It goes by `rubric` and
    answers with one of `levels`, whose scores are from 0 to 1; `gold`: it is shown the gold table. `hybrid` is
    (1 − `weight`)·`rule` + `weight`·judge. Tokens: of prompt and reply (`context`), of the reply (`turn_tokens`), of
    the answer that is shown (`answer_tokens`). A verdict has `attempts` replies and `seconds`; `at_once` are made at a
    time.
    """

    checkpoint: Path | None = None
    engine: EngineKind | Literal[""] = ""
    rubric: str = CORRECT
    levels: dict[str, float] = field(default_factory=lambda: dict(LEVELS))
    gold: bool = True
    rule: RuleName = "item_f1"
    weight: float = 0.5
    temperature: float = 0.6
    context: int = 8192
    turn_tokens: int = 512
    answer_tokens: int = 4096
    attempts: int = 3
    seconds: float = 120.0
    at_once: int = 32

    def __post_init__(self) -> None:
        for name in ("temperature", "context", "turn_tokens", "answer_tokens", "attempts", "seconds", "at_once"):
            _want(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        _want("weight", self.weight, 0 < self.weight < 1, "more than 0 and less than 1")
        _want("answer_tokens", self.answer_tokens, self.answer_tokens < self.context, f"less than {self.context}")
        self.asked()

    def asked(self) -> Rubric:
        """The rubric with its levels. Raises ValueError."""
        return Rubric(self.rubric, self.levels, self.gold)

    def lacks(self, verifier: str) -> str:
        """Why a verifier cannot be had, in a few words; nothing where it can."""
        judged = verifier in JUDGED and self.checkpoint is None
        return "judging.checkpoint = none, want a checkpoint that judges" if judged else ""

    @property
    def longest(self) -> int:
        """The tokens of its longest context; 0 without a judge."""
        return self.context if self.checkpoint is not None else 0


def check_shares(kind: str, shares: Mapping[str, float]) -> None:
    """Raises ValueError for a share that is no weight."""
    for name, weight in shares.items():
        want("recipe", f"{kind}[{name!r}]", weight, 0 < weight < float("inf"), "a finite weight above 0")
