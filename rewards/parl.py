"""PARL: the reward of Kimi K2.5's agent swarm (arXiv 2602.02276, section 3).

    r = r_perf + λ1·r_parallel + λ2·r_finish − c_crit·critical steps − c_total·total steps

r_perf is the outcome and the objective. r_parallel works against serial collapse, r_finish
against spurious parallelism; λ1 and λ2 fall to exactly 0. K2.5 does not publish the closed
forms of the two; those below are ours. The whole reward stands on the last action of the
rollout, so spawning turns receive r_perf like every other action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm.rl.schedule import Anneal
from swarm.types import Reward, Rollout, Task

REFUSED_SPAWNS = ("unknown_agent", "duplicate_assignment", "empty_assignment", "over_limit", "depth_limit", "no_budget")


@dataclass(frozen=True, slots=True)
class ParlConfig:
    """Weights of the reward. λ1 and λ2 fall linearly from their start to 0 over `anneal_steps` optimizer steps.

    `anneal=False` holds them (an ablation). `reference_width`: the concurrency that r_parallel pays in
    full; None is the task's own, as many as its list has pages. Costs are per step and off by default.
    """

    lambda_parallel: float = 0.3
    lambda_finish: float = 0.3
    anneal: bool = True
    anneal_steps: int = 60
    reference_width: int | None = None
    cost_critical: float = 0.0
    cost_total: float = 0.0

    def __post_init__(self) -> None:
        if self.reference_width is not None and self.reference_width < 1:
            raise ValueError(f"parl: reference_width = {self.reference_width}, want 1 or more, or None")
        if self.anneal_steps < 1:
            raise ValueError(f"parl: anneal_steps = {self.anneal_steps}, want 1 or more")
        for name in ("lambda_parallel", "lambda_finish", "cost_critical", "cost_total"):
            if getattr(self, name) < 0:
                raise ValueError(f"parl: {name} = {getattr(self, name)}, want 0 or more")

    def lambdas(self, optimizer_step: int) -> tuple[float, float]:
        """(λ1, λ2) at an optimizer step; exactly (0, 0) from `anneal_steps` on."""
        if not self.anneal:
            return self.lambda_parallel, self.lambda_finish
        return (
            Anneal(self.lambda_parallel, self.anneal_steps).value(optimizer_step),
            Anneal(self.lambda_finish, self.anneal_steps).value(optimizer_step),
        )


@dataclass(frozen=True, slots=True)
class Spawning:
    """What a rollout did with subagents; the proxies of the reward, and the truth beside them.

    `assigned` counts every assignment, refused ones included; `useful` those whose table held
    a row of the gold table that no earlier one had; `width` is the largest number at once.
    """

    assigned: int
    useful: int
    width: int
    refused: int

    @property
    def finish_rate(self) -> float:
        return self.useful / self.assigned if self.assigned else 0.0

    @property
    def spurious_rate(self) -> float:
        return 1.0 - self.finish_rate if self.assigned else 0.0


def spawning(rollout: Rollout) -> Spawning:
    """Reads a rollout's own spawns (not those of its children)."""
    refused = sum(rollout.ledger.counts.get(kind, 0) for kind in REFUSED_SPAWNS)
    keys = {_key(row, rollout.task) for row in rollout.task.gold}
    seen: set[tuple[str, ...]] = set()
    useful = 0
    for child in rollout.children:
        found = {_key(row, rollout.task) for row in child.table} & keys
        useful += bool(found - seen)
        seen |= found
    width = max((len(s.subagents) for s in rollout.ledger.stages), default=0)
    return Spawning(len(rollout.children) + refused, useful, width, refused)


def _key(row: tuple[str, ...], task: Task) -> tuple[str, ...]:
    return tuple(" ".join(c.split()).casefold() for c in row[: task.keys])


def parallelism(width: int, reference: int) -> float:
    """r_parallel = (width − 1) / (reference − 1), from 0 to 1: one subagent at a time is not parallel.

    0 where the reference is 1: such a task has nothing to run side by side.
    """
    return min(1.0, max(0, width - 1) / (reference - 1)) if reference > 1 else 0.0


def parl(rollout: Rollout, perf: float | None, config: ParlConfig, optimizer_step: int) -> Rollout:
    """The rollout with its reward: r_perf = `perf`, r_finish = useful / assigned, r_parallel as `parallelism` has it.

    A failed rollout, or one without a score, gets none: an infrastructure error is never a reward.
    """
    if rollout.failed or perf is None:
        return rollout
    lambda_parallel, lambda_finish = config.lambdas(optimizer_step)
    spawned = spawning(rollout)
    parts = {
        "perf": perf,
        "parallel": parallelism(spawned.width, config.reference_width or int(rollout.task.meta["pages"])),
        "finish": spawned.finish_rate,
        "critical_steps": float(rollout.ledger.critical_steps),
        "total_steps": float(rollout.total_steps),
    }
    weights = {
        "perf": 1.0,
        "parallel": lambda_parallel,
        "finish": lambda_finish,
        "critical_steps": -config.cost_critical,
        "total_steps": -config.cost_total,
    }
    return replace(rollout, reward=Reward(parts, weights))
