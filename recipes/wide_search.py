"""The main recipes: a wide-search orchestrator trained with PARL, and the single agent to hold it against."""

from __future__ import annotations

from dataclasses import replace

from recipes.config import Recipe
from rewards.parl import ParlConfig


def wide_search() -> Recipe:
    """An orchestrator that learns to split wide tables over frozen subagents: PARL, λ annealed to 0.

    A small price on every step of every agent keeps it from spawning what nobody needs once λ is 0.
    """
    return replace(Recipe(), parl=ParlConfig(lambda_parallel=0.6, lambda_finish=0.6, anneal_steps=88, cost_total=0.001))


def single_agent() -> Recipe:
    """The same PPO on the same tasks, for as many episodes, without subagents."""
    return replace(wide_search(), spawn=False, parl=ParlConfig(lambda_parallel=0.0, lambda_finish=0.0))
