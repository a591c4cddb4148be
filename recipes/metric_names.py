"""What the numbers of metrics.jsonl are, with their units: the table of docs/metrics.md, and of every tracker.

A name may end in `*`, which stands for kinds, roles or checkpoints. Names stay; what is no longer measured is left out
of the lines, never given another meaning. Not here: computing any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Name:
    """`Name("rollout/width", "subagents", "most at once, mean")`."""

    name: str
    unit: str
    words: str


GROUPS: Sequence[tuple[str, Sequence[Name]]] = (
    (
        "Where a line belongs",
        (
            Name("phase", "", "`ppo`"),
            Name("step", "iterations", "done, this one included"),
            Name("iteration", "iterations", "the same, under the name that reports use"),
            Name("optimizer_step", "steps", "of the policy's optimizer so far: what λ and learning rate depend on"),
        ),
    ),
    (
        "Training rollouts, means over those that did not fail",
        (
            Name("rollout/item_f1", "0–1", "of the table handed in"),
            Name("rollout/row_f1", "0–1", "the same by whole rows"),
            Name("rollout/success", "share", "of tables without a fault"),
            Name("rollout/score", "0–1", "of trails: share that is right"),
            Name("rollout/reward", "", "Σ weight · part, what is trained on"),
            Name(
                "rollout/critical_steps", "steps", "the longest chain: own steps, and the slowest subagent of each turn"
            ),
            Name("rollout/total_steps", "steps", "of all agents"),
            Name("rollout/width", "subagents", "most at once"),
            Name("rollout/spawn_rate", "share", "of rollouts with a subagent"),
            Name("rollout/finish_rate", "share", "of assignments that added rows; those refused count as not"),
            Name("rollout/spurious_rate", "share", "of assignments that did not"),
            Name("rollout/tokens_main", "tokens", "sampled by the trained agent"),
            Name("rollout/tokens", "tokens", "sampled by a single agent"),
            Name("rollout/compactions", "rewrites", "of the context"),
            Name("rollout/summary_tokens", "tokens", "of a summary"),
            Name("reward/lambda_parallel", "", "weight of the parallel reward, falls to 0"),
            Name("reward/lambda_finish", "", "weight of the finish reward, falls to 0"),
            Name("verdict/*", "", "the verifier's scores by name"),
            Name("harness/*/*", "", "reward, item-F1 and rollouts by harness, where several are trained through"),
            Name(
                "served/*/rollouts", "subagents", "that a frozen checkpoint served, by the first digits of its sha256"
            ),
            Name("served/*/table_rate", "share", "of these that handed in a table"),
            Name("count/failed", "rollouts", "whose infrastructure failed: in no mean and no loss"),
            Name("count/status_*", "rollouts", "by how they ended"),
            Name("count/left_out_*", "rollouts", "left out of the loss, by why"),
            Name("count/no_verdict_*", "rollouts", "that the verifier has no score of, by why"),
            Name("count/alarms", "lines", "of warning in this iteration"),
            Name("count/*", "events", "refused calls and the like, by kind"),
        ),
    ),
    (
        "Held-out tasks, every `quick_every` iterations",
        (Name("eval/*", "as above", "the same means on tasks that are never trained on; `parallelism` is the width"),),
    ),
    (
        "The update",
        (
            Name("train/tokens", "tokens", "learnt from"),
            Name("train/rollouts", "rollouts", "learnt from"),
            Name("train/reward", "", "their mean"),
            Name("train/value_loss", "", "of the critic, mean of its passes"),
            Name("train/explained_variance", "≤ 1", "of returns by the critic's values, before the update"),
            Name("train/critic_grad_norm", "", "before clipping, mean of the steps"),
            Name("train/critic_lr", "", "learning rate of the last step"),
            Name("train/critic_steps", "steps", "of the critic's optimizer, total"),
            Name("train/policy_loss", "", "per action token"),
            Name("train/policy_stopped_fraction", "share", "of tokens whose gradient clip or mask stops"),
            Name("train/policy_approx_kl", "nats", "k3 of the old policy against the new one"),
            Name("train/policy_ratio_mean", "", "π / π_old"),
            Name("train/policy_ratio_max", "", "the largest"),
            Name("train/policy_entropy", "nats", "per action token; 0 where no term needs it"),
            Name("train/policy_kl_reference", "nats", "to the start, where there is such a term"),
            Name("train/policy_kl_teacher", "nats", "to the teachers, where there are any"),
            Name("train/policy_grad_norm", "", "before clipping, mean of the steps"),
            Name("train/policy_lr", "", "learning rate of the last step"),
            Name("train/policy_steps", "steps", "of the policy's optimizer, total"),
            Name(
                "train/drift_mean",
                "nats",
                "learner's minus sampler's log-probability, mean distance before the first step",
            ),
            Name("train/drift_max", "nats", "the largest"),
            Name("train/drift_kl", "nats", "k3 of the sampler against the learner"),
            Name("train/drift_outside", "share", "of tokens whose ratio leaves 0.9–1.1"),
            Name("train/rejected", "share", "of tokens that the mismatch correction leaves out"),
            Name("train/staleness", "updates", "that the oldest token is behind"),
            Name("train/groups_of_one", "tasks", "with one rollout where a baseline wants more"),
            Name("train/skipped", "steps", "left out because a gradient was not finite, total"),
        ),
    ),
    (
        "Time and engines",
        (
            Name("time/rollout", "s", "of the batch, its rewards included"),
            Name("time/train", "s", "of the update"),
            Name("time/publish", "s", "until engines serve the new weights, their check included"),
            Name("time/shelve", "s", "of publishing a checkpoint"),
            Name("serving/probe_drift", "nats", "largest distance of the engine from the learner on the probe"),
            Name("serving/policy_engines", "engines", "that serve the policy"),
            Name("serving/subagent_engines", "engines", "that serve the subagents"),
            Name("serving/queued_policy", "s", "mean wait of a request, since the last line"),
            Name("serving/queued_subagents", "s", "the same on the subagents' side"),
            Name("workers/up", "workers", "now"),
            Name("workers/lost", "workers", "since the start"),
            Name("workers/again", "requests", "handed out again"),
            Name("workers/given_up", "requests", "that ended as infrastructure errors"),
        ),
    ),
)


def unknown(names: Iterable[str]) -> list[str]:
    """Those that are in no row."""
    patterns = [row.name for _, rows in GROUPS for row in rows]
    return sorted(n for n in names if not any(fnmatchcase(n, p) for p in patterns))


def page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "One line of JSON an iteration in `metrics.jsonl`, and the same numbers in every tracker.",
    ]
    for title, rows in GROUPS:
        lines += ["", f"## {title}", "", "| name | unit | what it is |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.unit or '–'} | {row.words} |" for row in rows]
    return "\n".join([*lines, "", *_MORE]) + "\n"


_MORE = (
    "## Elsewhere in the run folder",
    "",
    "| file | what it holds | at wandb |",
    "|---|---|---|",
    "| `recipe.json` | every field of the recipe | config |",
    "| `rollouts/iteration_0007.rollouts` | the rollouts of an iteration, whole | table `rollouts`, a row each |",
    "| `rollouts/iteration_0007.credit.npz` | advantage, value and ratio of each trained token | – |",
    "| `roster.jsonl` | who played which role from which iteration on | – |",
    "| `report/*.png` | the report's pictures | images `report/*` |",
    "| `policy/` | the trained policy | artifact `RUN-policy`, by reference, with what it was made from |",
    "",
    "wandb is offline without `WANDB_API_KEY` and never asks; `--wandb disabled` leaves it out. It holds no run up:",
    "what it is too slow for is left out there, and one line says so. `wandb sync runs/NAME/wandb/offline-run-*` sends",
    "what an offline run has kept. The `view` column is where `swarm-rl view RUN` shows the rollout.",
)
