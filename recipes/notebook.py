"""What a notebook needs of the recipes: a small job whose engines stay up from cell to cell, and calls without `await`.

    lab = Lab(small(wide_search()))
    rollouts = lab.roll(lab.draw(8, rows=(10, 24)), budget=40)
    lab.show(rollouts[0])

Jupyter's thread runs an asyncio loop and the library is trio, which therefore has a thread of its own
(`swarm.portal`); outside of Jupyter all works alike. Not here: runs on disk (`recipes.debug.run`), and training as a
command (`recipes.ppo_run`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple, cast

from recipes.cast.book import CastBook
from recipes.compaction.run import TRAIL_RUNS, Compaction, TrailJob
from recipes.config import Recipe
from recipes.overrides import to_json
from recipes.session import load_tokenizer, roll_out
from recipes.train import TABLES, TableJob
from recipes.view.tokens import pieces
from rewards.table import canonical
from swarm.chat import Chat
from swarm.portal import Portal
from swarm.records import FOLDER, SUFFIX, write
from swarm.rundir import RunDir
from swarm.show import Shown
from swarm.show_tokens import Tokens
from swarm.show_turns import Turns
from swarm.types import Rollout, Runner, Task

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
AnyRecipe = TypeVar("AnyRecipe", Recipe, Compaction)


def small(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe on one core, in a world that is built in seconds, without a tracker."""
    world = replace(recipe.world, families=("airport", "city"), groups_per_band=12)
    return replace(recipe, world=world, episodes=16, threads=1, wandb="disabled")


def run(function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """What an async function returns or raises, wherever it is called from: `run(harness.roll, task, 0, budget)`."""
    with Portal() as portal:
        return portal.call(function, *args)


class Lab:
    """A recipe's job, held open: its tasks, its engines, its rewards, until it is closed.

    `job` is a `recipes.train.TableJob`, or for trails a `recipes.compaction.run.TrailJob`.
    """

    def __init__(self, recipe: Recipe | Compaction) -> None:
        self.recipe, self._portal = recipe, Portal()
        tokenizer = load_tokenizer(recipe.start)
        opens = TRAIL_RUNS.open(recipe, tokenizer) if isinstance(recipe, Compaction) else TABLES.open(recipe, tokenizer)
        self.job = cast("TableJob | TrailJob", self._portal.enter(lambda: opens))
        self.chat: Chat = self.job.chat if isinstance(self.job, TrailJob) else self.job.session.builder.chat

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the engines."""
        self._portal.close()

    def run(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """What an async function of this job returns or raises: `lab.run(lab.job.session.recast, cast)`."""
        return self._portal.call(function, *args)

    def draw(self, n: int, *, rows: tuple[int, int] = (3, 80), seed: int = 0) -> list[Task]:
        """Held-out tasks; `rows` bounds the size of their tables, and means nothing to trails."""
        if isinstance(self.job, TrailJob):
            return self.job.tasks.draw("heldout", n, seed)
        return self.job.session.tasks.draw("heldout", n, seed, rows=rows)

    def roll(self, tasks: Sequence[Task], *, budget: int, seed: int = 0, runner: Runner | None = None) -> list[Rollout]:
        """A rollout of each task with so many critical steps, all at once; the same seed gives the same rollouts."""
        runner = runner or self.job.harness()
        return self.run(roll_out, runner, tasks, [budget] * len(tasks), seed, self.recipe.at_once)

    def rewarded(self, rollouts: Sequence[Rollout], step: int = 0) -> list[Rollout]:
        """The rollouts with their rewards, as they are at an optimizer step."""
        return self.run(self.job.rewarded, rollouts, step)[0]

    def record(self, rollouts: Sequence[Rollout], folder: Path) -> None:
        """Writes the recipe, the roster and the rollouts into a run folder, as training does."""
        with RunDir(folder, to_json(self.recipe)):
            CastBook(folder, self.job.recipe_cast).at(1)
            write(folder / FOLDER / f"iteration_0001{SUFFIX}", rollouts)

    # --- what is shown -----------------------------------------------------------------

    def show(self, rollout: Rollout) -> Shown:
        """The whole rollout, with what was said; cells are compared as our own tasks are scored."""
        return Shown(rollout, self.chat.decode, canonical)

    def turns(self, rollout: Rollout, at: int = 0) -> Turns:
        """The turns of its first agent, to step through from turn `at`."""
        return Turns(rollout, self.chat.decode, at)

    def tokens(self, rollout: Rollout, values: Sequence[float], name: str, middle: float = 0.0) -> Tokens:
        """The sampled tokens of its first agent, coloured by a number of each."""
        spans = [s for segment in rollout.trace.segments for s in segment.spans if s.kind == "sampled"]
        read = [piece for s in spans for piece in pieces(self.chat.tokenizer.backend_tokenizer, s.ids)]
        return Tokens(read, values, name, middle)
