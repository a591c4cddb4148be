"""The main recipes: a wide-search orchestrator trained with PARL, and the single agent to hold it against."""

from __future__ import annotations

from dataclasses import replace

from recipes.config import Recipe
from rewards.parl import ParlConfig


def wide_search() -> Recipe:
    """An orchestrator that learns to split wide tables over frozen subagents: PARL, λ annealed to 0."""
    return Recipe()


def single_agent() -> Recipe:
    """The same PPO on the same tasks, for as many episodes, without subagents."""
    return replace(Recipe(), spawn=False, parl=ParlConfig(lambda_parallel=0.0, lambda_finish=0.0))
