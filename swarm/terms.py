"""The terms on which an agent is run: its limits, its tools as they are shown to it, how it samples, its seed.

All that a recorded rollout needs beside what was said and returned, so that it can be run again from its record.
Not here: engines, languages and what tools do, which are no values (`swarm.loop.Harness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec import Struct

from swarm.checks import want

_want = partial(want, "context")

Kind = Literal["none", "truncation", "compaction"]
AtLimit = Literal["answer", "cut"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one agent. Steps are critical steps; `tokens` bounds its context; `seconds` is its deadline."""

    critical_steps: int
    tokens: int
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("critical_steps", "tokens", "seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"budget: {name} = {value}, want more than 0")


class Sampling(Struct, frozen=True, gc=False):
    """How to sample one turn. Equal `seed` and ids give equal tokens, whatever else is in the batch."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Name, description and JSON schema of the parameters, as they are shown to a model.

    `ordinary` calls cost a step each; `create_subagent` and `assign_task` are not ordinary.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    ordinary: bool = True


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """How an agent's context is kept small: `ContextPolicy("compaction", threshold=400, keep=2)`.

    A context of at least `threshold` tokens (with the request for a summary, if there is one) is rewritten before
    the next turn; the last `keep` steps (turns and their results) stay word for word, fewer if they do not fit
    under the threshold. The agent's token budget should leave room above the threshold for a turn, its results
    and a summary of `summary_tokens`. After `limit` rewrites, or when nothing fits, `at_limit` says what happens:
    "answer" gives one last turn, "cut" truncates. Raises ValueError for values out of range.
    """

    kind: Kind = "none"
    threshold: int = 0
    keep: int = 2
    summary_tokens: int = 128
    limit: int = 8
    at_limit: AtLimit = "answer"

    def __post_init__(self) -> None:
        _want("kind", self.kind, self.kind in ("none", "truncation", "compaction"), "none, truncation or compaction")
        _want("threshold", self.threshold, self.kind == "none" or self.threshold > 0, "more than 0 tokens")
        _want("keep", self.keep, self.keep >= 0, "0 or more")
        _want("summary_tokens", self.summary_tokens, self.summary_tokens >= 1, "1 or more")
        _want("limit", self.limit, self.limit >= 0, "0 or more")
        _want("at_limit", self.at_limit, self.at_limit in ("answer", "cut"), "answer or cut")


class Terms(Struct, frozen=True, gc=False):
    """What all agents of one harness have in common, one object for all of them."""

    specs: tuple[ToolSpec, ...]
    sampling: Sampling
    context: ContextPolicy
    scratchpad: bool


class Setup(Struct, frozen=True, gc=False, omit_defaults=True):
    """How one agent was run: `Setup(terms, seed=7, depth=0, budget=Budget(12, 8192), system="Fill the table.")`.

    `depth`: 0 for a root agent. `earlier`: where a fork changed the budget, those before: `((2, Budget(10, 8192)),)`
    says that the observation before turn 2 was the first to show what is left of the new one.
    """

    terms: Terms
    seed: int
    depth: int
    budget: Budget
    system: str
    earlier: tuple[tuple[int, Budget], ...] = ()
