"""What goes wrong without each part of PARL, and what cures it. Three seeds of each are in `docs/results.md`.

    serial_collapse         λ1 = λ2 = 0      from a start whose parallel work is bad, the policy retreats to one agent
    serial_collapse_parl    λ annealed       from the same start, it learns to split, and keeps it
    spurious                λ1 for ever      paid for width alone, it assigns what nobody needs
    spurious_finish         λ1, λ2 for ever  paid for finishing too, it does not

The first two start from a copy of the shipped model that skips pages and assigns duplicates
(`swarm-rl train cold_start_sloppy`), the others from the shipped model; all on small tables, where an agent
alone does well and a wide swarm is too wide.
"""

from __future__ import annotations

from dataclasses import replace

from recipes.config import SHIPPED, Evaluation, Recipe, TaskMix
from rewards.parl import ParlConfig

SLOPPY = SHIPPED.with_name("sloppy-1m")


def _base() -> Recipe:
    evaluation = Evaluation(
        tasks=50, rows=(8, 24), wide_tasks=4, wide_rows=(10, 24), sweep_swarm=(16,), sweep_single=(16,)
    )
    return replace(
        Recipe(),
        iterations=12,
        episodes=32,
        start=SLOPPY,
        tasks=TaskMix(rows=(8, 24), budget=(30, 40)),
        child=replace(Recipe().child, temperature=1.0),
        evaluation=evaluation,
    )


def _able() -> Recipe:
    """From the shipped model, which splits well: so that spawning is worth it from the first day."""
    return replace(_base(), start=SHIPPED, child=Recipe().child, tasks=TaskMix(rows=(3, 24), budget=(30, 40)))


def serial_collapse() -> Recipe:
    """No shaping: λ1 = λ2 = 0."""
    return replace(_base(), parl=ParlConfig(lambda_parallel=0.0, lambda_finish=0.0))


def serial_collapse_parl() -> Recipe:
    """PARL, annealed to 0 before the last two iterations."""
    return replace(_base(), parl=ParlConfig(lambda_parallel=0.6, lambda_finish=0.6, anneal_steps=32))


def spurious() -> Recipe:
    """Width is paid for ever, finishing never."""
    return replace(_able(), parl=ParlConfig(lambda_parallel=0.5, lambda_finish=0.0, anneal=False, reference_width=8))


def spurious_finish() -> Recipe:
    """Width and finishing are paid for ever."""
    return replace(_able(), parl=ParlConfig(lambda_parallel=0.5, lambda_finish=0.5, anneal=False, reference_width=8))
