"""The learner of a run: in this process, or several processes that share each update, here or on the cluster.

Not here: the update (`swarm.rl.learner`), and how processes share it (`swarm.rl.group`).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from recipes.config import Training
from recipes.remote import cluster_config
from recipes.session import load_checkpoint, threads_of
from swarm.checkpoint import filed
from swarm.cluster import RayRanks
from swarm.rl.batch import collect
from swarm.rl.credit import Credit
from swarm.rl.group import LearnerGroup, Rank, local_group
from swarm.rl.learner import Learner
from swarm.rl.ppo import Metrics
from swarm.rl.signals import Frozen
from swarm.types import Rollout


class Learning(Protocol):
    """What a run needs of its learner. `policy` says, between updates, what the trained policy says."""

    @property
    def policy(self) -> PreTrainedModel: ...

    @property
    def step(self) -> int: ...

    @property
    def updates(self) -> int: ...

    @property
    def credit(self) -> Credit | None:
        """What the last update made of each token."""
        ...

    def learn(self, rollouts: Sequence[Rollout]) -> Metrics:
        """One update; blocks while it lasts."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The policy as a plain model's file has it; copy before the next update."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A learner in this process."""

    learner: Learner

    @property
    def policy(self) -> PreTrainedModel:
        return self.learner.policy

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def credit(self) -> Credit | None:
        return self.learner.credit

    def learn(self, rollouts: Sequence[Rollout]) -> Metrics:
        return self.learner.update(collect(rollouts, self.learner.config.truncated, self.learner.oldest))

    def weights(self) -> dict[str, Tensor]:
        return self.learner.weights()

    def state_dict(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class Together:
    """Learners in processes of their own; `policy` is a copy here."""

    group: LearnerGroup
    policy: PreTrainedModel

    @property
    def step(self) -> int:
        return self.group.step

    @property
    def updates(self) -> int:
        return self.group.updates

    @property
    def credit(self) -> Credit | None:
        return self.group.credit

    def learn(self, rollouts: Sequence[Rollout]) -> Metrics:
        metrics, weights = self.group.update(rollouts)
        self.policy.load_state_dict(weights)
        return metrics

    def weights(self) -> dict[str, Tensor]:
        return filed(self.policy)

    def state_dict(self) -> dict[str, Any]:
        return self.group.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.group.load_state_dict(state)
        self.policy.load_state_dict(self.group.weights())


@dataclass(frozen=True, slots=True)
class MakeLearner:
    """Makes the recipe's learner in a rank: a `LearnerFactory`. `folder` is where relative paths begin."""

    recipe: Training
    folder: Path

    def __call__(self, accelerator: Accelerator) -> Learner:
        os.chdir(self.folder)
        policy, _ = load_checkpoint(self.recipe.start)
        return Learner(policy, self.recipe.ppo, accelerator, frozen_of(self.recipe))


@contextmanager
def open_learner(recipe: Training, policy: PreTrainedModel) -> Generator[Learning]:
    """The learner, or as many as the placement asks for: on the cluster where it has workers there, else here."""
    place = recipe.placement
    if place.learners == 1:
        yield Alone(Learner(policy, recipe.ppo, frozen=frozen_of(recipe)))
        return
    factory, config = MakeLearner(recipe, Path.cwd()), cluster_config(recipe)
    if place.workers:
        ranks = RayRanks(config, partial(Rank, factory, place.learners))
        group = LearnerGroup(ranks, place.learners, config.learn_seconds)
    else:
        threads = max(1, threads_of(recipe) // place.learners)
        group = local_group(factory, place.learners, threads, config.learn_seconds)
    with group:
        yield Together(group, policy)


def frozen_of(recipe: Training) -> Frozen:
    """What the learner only reads. The reference is the checkpoint that training starts from."""
    reference = load_checkpoint(recipe.start)[0] if recipe.ppo.kl.coef > 0 else None
    return Frozen(reference, tuple(load_checkpoint(t.path)[0] for t in recipe.ppo.distill.teachers))
