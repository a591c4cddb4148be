"""Publishes a checkpoint of a run by hand: its trained policy, or the weights in a trainer state that is still there.

Not here: what a run publishes by itself (`recipes.publish.rules`), and the command (`recipes.publish.command`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from recipes.config import Training
from recipes.named import resolve
from recipes.overrides import from_json
from recipes.publish.rules import run_name, scores_of, step_name
from recipes.session import load_checkpoint, load_tokenizer
from swarm.checkpoint import filed, save, weights_sha256
from swarm.folders import CheckpointError
from swarm.rl.adapt import adapt, adapted, frozen_weights, load_trained, merged_state_dict
from swarm.rl.ppo import PPOConfig
from swarm.rundir import read_metrics, read_recipe
from swarm.states import load_state
from swarm.store import Store, Stored
from swarm.store_card import Origin
from swarm.store_intake import copy
from swarm.types import CheckpointRef

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Found:
    """The iterations of a run whose weights can be had: `states` → their folder, `final` the policy's, if there is."""

    run: Path
    metrics: Mapping[int, Mapping[str, Any]]
    states: Mapping[int, Path]
    final: int | None


def with_start(recipe: R) -> R:
    """The recipe, its `start` by name in the store as that folder, by hash: the name may move, and the run goes on.

    Raises CheckpointError for a damaged checkpoint. What is no name stays, for the run to load or to refuse.
    """
    if not isinstance(recipe, Training) or recipe.start.is_dir():
        return recipe
    names = {name for entry in Store().entries() for name in entry.names}
    return replace(recipe, start=resolve(str(recipe.start))) if str(recipe.start) in names else recipe


def publish_run(run: Path, store: Store, which: str = "last", *, by: str = "", names: Sequence[str] = ()) -> Stored:
    """Publishes an iteration of a run: its number, `last`, or `best` by the metric `by` (the recipe's by default).

    Without `names` it is `RUN/step_000020`, `RUN/last` or `RUN/best`. Raises CheckpointError where the weights of that
    iteration are no more, naming those that are; RunDirError where there is no run.
    """
    recipe = read_recipe(run)
    found = _found(run)
    step = _step(found, which, by or recipe.get("publish", {}).get("best", "") or "eval/item_f1")
    origin = Origin(str(run), step, recipe, scores_of(found.metrics.get(step, {})))
    own = f"{run_name(run)}/{which if which in ('last', 'best') else step_name(step)}"
    return store.publish(list(names) or [own], _writer(found, step, recipe), origin)


def _found(run: Path) -> _Found:
    rows = {int(row["step"]): row for row in read_metrics(run)}
    states = {int(p.name.removeprefix("step_")): p for p in (run / "checkpoints").glob("step_[0-9]*")}
    final = max(rows, default=0) if (run / "policy" / "config.json").exists() else None
    return _Found(run, rows, states, final)


def _step(found: _Found, which: str, by: str) -> int:
    there = sorted({*found.states, *([] if found.final is None else [found.final])})
    if not there:
        raise CheckpointError(f"{found.run}: no policy and no trainer state, want a run that has trained")
    step = {"last": lambda: there[-1], "best": lambda: _best(found, by)}.get(which, lambda: int(which))()
    if step not in there:
        seen = f"iteration {step}" + (f" is the best by {by}, but" if which == "best" else ":")
        kept = ", ".join(str(k) for k in there)
        raise CheckpointError(f"{found.run}: {seen} its weights are not kept, want one of {kept}; see publish.best")
    return step


def _best(found: _Found, by: str) -> int:
    """The first iteration with the highest score."""
    scores = {step: scores_of(row)[by] for step, row in found.metrics.items() if by in scores_of(row)}
    if not scores:
        known = sorted({name for row in found.metrics.values() for name in scores_of(row) if name.startswith("eval/")})
        raise CheckpointError(f"{found.run}: no {by} in its metrics, want one of {', '.join(known) or 'none'}")
    return max(scores, key=lambda step: (scores[step], -step))


def _writer(found: _Found, step: int, recipe: Mapping[str, Any]) -> Callable[[Path], CheckpointRef]:
    if step == found.final:
        return lambda into: copy(found.run / "policy", into)
    state = load_state(found.states[step])["learner"]
    return lambda into: _write_state(state, recipe, into)


def _write_state(state: Mapping[str, Any], recipe: Mapping[str, Any], into: Path) -> CheckpointRef:
    """The policy of a learner's state as a model folder, adapters merged."""
    start, ppo = Path(recipe["start"]), from_json(PPOConfig, recipe["ppo"])
    policy, _ = load_checkpoint(start)
    adapt(policy, ppo.adapt, ppo.seed)
    base = weights_sha256(frozen_weights(policy)) if adapted(policy) else ""
    if base != state.get("base", ""):
        raise CheckpointError(f"{start}: other weights than the run's adapters were trained beside")
    load_trained(policy, state["policy"])
    weights = filed(policy, merged_state_dict(policy))
    return save(policy, load_tokenizer(start), into, state["updates"], weights)
