"""What a run publishes while it trains: which iterations, by rule, and under which names of the store.

    iteration 20, eval/item_f1 0.71 is the best so far   →   wide_search/{step_000020, last, best}

An iteration publishes before its trainer state is saved, and the best so far is part of that state: after a kill the
iteration is made and published again, and equal weights are one checkpoint. Not here: the store (`swarm.store`),
publishing by hand (`recipes.publish.by_hand`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from swarm.checkpoint import save
from swarm.checks import want
from swarm.folders import CheckpointError
from swarm.store import Store, Stored, check_names
from swarm.store_card import Origin, finite

_want = partial(want, "publish")


@dataclass(frozen=True, slots=True)
class Publish:
    """What a run publishes, into `store`; without one, nothing: `Publish(Path("checkpoints"), every=10)`.

    `every`: each that many iterations as `step_000020`; 0 for none. `last`: the newest of these, and at the end the
    trained policy. `best`: the highest of a metric of the short evaluation, "" for none. `name` stands before these
    names, as in `wide_search/best`; it is the run folder's own by default.
    """

    store: Path | None = None
    every: int = 0
    last: bool = True
    best: str = "eval/item_f1"
    name: str = ""

    def __post_init__(self) -> None:
        _want("every", self.every, self.every >= 0, "0 (never) or more")
        if self.name:
            check_names([self.name])
        off = self.store is None
        _want("every", self.every, not (off and self.every), "0 without publish.store")
        _want("name", self.name, not (off and self.name), "none without publish.store")
        nothing = not (off or self.every or self.last or self.best)
        _want("store", str(self.store), not nothing, "none where every, last and best are off")


def check_best(rules: Publish, metrics: tuple[str, ...]) -> None:
    """Raises ValueError unless the best is kept by one of these metrics, or none is."""
    _want("best", rules.best, rules.best in ("", *metrics), " or ".join(metrics))


def due(
    rules: Publish, iteration: int, iterations: int, metrics: Mapping[str, Any], best: float | None
) -> tuple[list[str], float | None]:
    """What an iteration, counted from 1, is to be published as, and the best score so far, this one included.

    `best` is the one before, None where none was measured. A score that equals it is not better.
    """
    if rules.store is None:
        return [], best
    names = [step_name(iteration)] if rules.every and iteration % rules.every == 0 else []
    if rules.last and (names or iteration == iterations):
        names.append("last")
    score = finite(metrics).get(rules.best)
    if score is not None and (best is None or score > best):
        return [*names, "best"], score
    return names, best


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where one run publishes. `run` is its folder, `recipe` as JSON."""

    rules: Publish
    run: Path
    recipe: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerFast

    def check(self) -> None:
        """Raises CheckpointError, before a run begins, where it could not publish or would take another run's names."""
        if self.rules.store is None:
            return
        names = self._names(["last"])
        check_names(names)
        prefix = names[0].removesuffix("last")
        for entry in Store(self.rules.store).entries():
            taken = [name for name in entry.names if name.startswith(prefix)]
            if taken and entry.card and entry.card.origin.source != str(self.run):
                seen = f"{self.rules.store}: {taken[0]} is of {entry.card.origin.source}"
                raise CheckpointError(f"{seen}, want another publish.name than {prefix[:-1]!r} for {self.run}")

    def put(
        self,
        names: list[str],
        iteration: int,
        metrics: Mapping[str, Any],
        policy: PreTrainedModel,
        weights: Mapping[str, Tensor],
        version: int,
    ) -> Stored:
        """Publishes the weights, in the form that `swarm.checkpoint.filed` gives, under these names of the run."""
        assert self.rules.store is not None, "nothing is due without a store"
        origin = Origin(str(self.run), iteration, self.recipe, scores_of(metrics))
        return Store(self.rules.store).publish(
            self._names(names), lambda into: save(policy, self.tokenizer, into, version, weights), origin
        )

    def _names(self, names: list[str]) -> list[str]:
        return [f"{self.rules.name or run_name(self.run)}/{name}" for name in names]


def scores_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a card tells of an iteration's metrics: the short evaluation's, and those of the training rollouts."""
    return {k: v for k, v in finite(metrics).items() if k.startswith(("eval/", "rollout/"))}


def step_name(iteration: int) -> str:
    """`step_000020`."""
    return f"step_{iteration:06d}"


def run_name(run: Path) -> str:
    """The name of a run's folder."""
    return run.resolve().name
