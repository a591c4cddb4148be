"""How many tokens an iteration has: at the most, expected, and measured in a run that was recorded.

Not here: memory (`recipes.plan.memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.compaction.run import Compaction
from recipes.compaction.systems import limits_of
from recipes.config import Limits, Recipe, Training
from swarm.context import ContextPolicy
from swarm.records import read
from swarm.types import Rollout

TURNS, TURN, ASSIGNMENTS, WINDOW = 1 / 2, 1 / 8, 1 / 2, 1 / 4
ASSUMED = (
    "expected: an agent takes half of the turns that its budget allows, a turn samples an eighth of its limit, half of "
    "the assignments are made, a training row fills a quarter of its context"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one iteration: `sampled` by the policy and by `subagents`, and those of the rows that are `trained`."""

    sampled: int
    subagents: int
    trained: int


def at_most(recipe: Training) -> Tokens:
    """What the limits allow.

    An agent of T turns samples T · turn_tokens, and its summaries; but no window holds more than the context.
    An orchestrator makes `spawning.assignments` assignments.
    """
    main, turns, _ = _root(recipe)
    return _tokens(recipe, main, turns, _sampled(main, turns), _children(recipe, 1.0, 1.0), 1.0)


def expected(recipe: Training) -> Tokens:
    """Under the assumption of `ASSUMED`; never more than `at_most`."""
    main, _, turns = _root(recipe)
    sampled = min(TURNS * turns * TURN * main.turn_tokens, _sampled(main, turns))
    return _tokens(recipe, main, turns, sampled, _children(recipe, TURNS, TURN) * ASSIGNMENTS, WINDOW)


def measured(run: Path, episodes: int) -> Tokens | None:
    """What the last recorded iteration of a run comes to with so many episodes; None where nothing is recorded.

    Raises RecordError for a file that is none.
    """
    files = sorted((run / "rollouts").glob("iteration_*.rollouts"))
    rollouts = list(read(files[-1])) if files else []
    return of_rollouts(rollouts, episodes / len(rollouts)) if rollouts else None


def of_rollouts(rollouts: Iterable[Rollout], times: float = 1.0) -> Tokens:
    """The tokens of the rollouts, `times` so many."""
    sampled = subagents = trained = 0
    for r in rollouts:
        sampled += r.ledger.tokens_sampled
        subagents += sum(child.ledger.tokens_sampled for child in _below(r))
        trained += sum(len(segment.ids) for segment in r.trace.segments)
    return Tokens(round(sampled * times), round(subagents * times), round(trained * times))


def _below(rollout: Rollout) -> Iterator[Rollout]:
    for child in rollout.children:
        yield child
        yield from _below(child)


def _root(recipe: Training) -> tuple[Limits, float, float]:
    """The limits of the policy, its turns at the most, and on average; the last turn is beside the budget.

    A budget that is log-uniform from a to b is (b − a) / ln(b / a) on average.
    """
    match recipe:
        case Recipe():
            low, high = recipe.tasks.budget
            mean = (high - low) / math.log(high / low) if high > low else float(low)
            return recipe.main, high + 1, mean + 1
        case Compaction():
            return limits_of(recipe.main, recipe.system), recipe.main.steps + 1, recipe.main.steps + 1
        case _:
            raise TypeError(f"a {type(recipe).__name__}, want a Recipe or a Compaction")


def _windows(policy: ContextPolicy) -> int:
    return 1 if policy.kind == "none" else 1 + policy.limit


def _sampled(limits: Limits, turns: float) -> float:
    policy = limits.rewriting
    summaries = policy.limit * policy.summary_tokens if policy.kind == "compaction" else 0
    return min(turns * limits.turn_tokens + summaries, _windows(policy) * limits.context)


def _children(recipe: Training, turns: float, turn: float) -> float:
    """Tokens that the subagents of one rollout sample, with these shares of their turns and of a turn's tokens."""
    if not isinstance(recipe, Recipe) or not recipe.spawn:
        return 0.0
    child = recipe.child
    most = _sampled(child, child.steps + 1)
    return recipe.spawning.assignments * min(turns * (child.steps + 1) * turn * child.turn_tokens, most)


def _tokens(recipe: Training, main: Limits, turns: float, sampled: float, children: float, filled: float) -> Tokens:
    """Of all episodes; a window begins with a turn at the least."""
    windows = min(_windows(main.rewriting), turns)
    per_episode = (sampled, children, filled * windows * main.context)
    return Tokens(*(round(x * recipe.episodes) for x in per_episode))
