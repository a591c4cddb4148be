"""A run opened for debugging: its rollouts, replayed, forked and compared; from a notebook or the command line.

    with open_run("runs/wide_search") as run:
        r = run.records[-1]
        run.replay(r)                                                     []: it comes out as it was
        warm = run.fork(r, "main", turn=2, edit=Edit(results={0: "none"}))
        run.compare({"recorded": r, "none": warm.rollout})
        graph, config = run.graph(r, "a")                                 LangGraph's, over RUN/debug.sqlite

Records are read without engines; these are opened when they are first needed, and stay until the run is closed. They
serve the weights that made the rollout where these are still there, and the final policy otherwise: `weights` says so.
All methods may be called where an event loop runs: trio has a thread of its own (`swarm.portal`).

Not here: replaying a whole run (`recipes.debug.rerun`), the commands (`recipes.debug.command`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from recipes.cast.book import as_played, entries_of
from recipes.cast.roles import Weights
from recipes.compaction.run import TRAIL_RUNS, Compaction
from recipes.config import Recipe
from recipes.debug.rerun import Languages, rerun
from recipes.grid.runs import read_recipe
from recipes.harnesses import Mixed
from recipes.named import resolve
from recipes.ppo_run import Job
from recipes.session import cast_of, load_tokenizer
from recipes.train import TABLES
from swarm.checkpoint import ref_of
from swarm.folders import CheckpointError
from swarm.fork import Branch, Edit, fork, retraced
from swarm.fork_compare import Comparison, compare
from swarm.fork_credit import Credit, credit
from swarm.kept import RecordGap, lacks
from swarm.loop import Harness
from swarm.portal import Portal
from swarm.recheck import Said, recheck
from swarm.records import Records
from swarm.replay import Difference
from swarm.stepper import Config, Graph, open_saver, put, stepper, thread
from swarm.store import Store, Stored
from swarm.types import Cast, CheckpointRef, Reward, Rollout, Runner

HISTORY = "debug.sqlite"


class DebugError(ValueError):
    """A run or a rollout that cannot be debugged so; the message is one line for the user."""


def open_run(run: Path | str) -> Debugger:
    """The run of a folder. Raises CheckpointError where there is none, RecordError where it has no rollouts."""
    return Debugger(Path(run))


class Debugger:
    """See `open_run`. `records` are the run's rollouts, in the order of its iterations."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.recipe = read_recipe(run)
        self.records = Records(run)
        self.languages = Languages(run, self.recipe)
        self.weights = "no engine is open"
        self._portal: Portal | None = None
        self._loaded: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the engines, if any were opened."""
        if self._portal is not None:
            self._portal.close()

    def replay(self, rollout: Rollout) -> list[Difference]:
        """Where its replay differs from its record: nowhere, unless the loop, the language or a rule has changed."""
        return self.portal.call(rerun, self.recipe, rollout, self.languages)

    def recheck(self, rollout: Rollout) -> list[Said]:
        """What the policy says today in each turn that it sampled. The weights are those that made it, or the final."""
        self._prepared(rollout, None)
        engine = self._job.engine
        return self.portal.call(recheck, rollout, lambda trace: None if trace.checkpoint else engine)

    def fork(
        self,
        rollout: Rollout,
        agent: str = "main",
        turn: int = 0,
        edit: Edit | None = None,
        roster: Mapping[str, Weights] | None = None,
    ) -> Branch:
        """A branch from a turn, with its reward. `roster` has others play some roles from there on, by folder or name:
        `{"": {"checkpoints/large": 1.0}}`. Raises ForkError, RecordGap, DebugError.
        """
        live = self._prepared(rollout, roster)
        branch = self.portal.call(fork, live, rollout, agent, turn, edit)
        [rewarded] = self.portal.call(self._rewarded, [branch.rollout], rollout)
        return replace(branch, rollout=rewarded)

    def compare(self, rollouts: Mapping[str, Rollout]) -> Comparison:
        """Rollouts of one task side by side."""
        return compare(rollouts)

    def credit(self, rollout: Rollout, turn: int, place: int, agent: str = "main", *, pairs: int = 16) -> Credit:
        """What the spawn by this call was worth: forks with and without it, each `pairs` times."""
        live = self._prepared(rollout, None)

        async def score(made: Sequence[Rollout]) -> list[float | None]:
            rewarded = await self._rewarded(made, rollout)
            return [r.reward.total if r.reward else None for r in rewarded]

        async def credited() -> Credit:
            return await credit(live, rollout, agent, turn, place, score=score, pairs=pairs)

        return self.portal.call(credited)

    def graph(self, rollout: Rollout, name: str) -> tuple[Graph, Config]:
        """The loop as a LangGraph graph, the rollout's turns as the history of the thread `name`.

        A thread that is there already is taken as it stands. The history lies in RUN/debug.sqlite.
        """
        live = self._prepared(rollout, None)
        graph = stepper(live, self.portal, open_saver(self.run / HISTORY))
        config = thread(name)
        if graph.get_state(cast(Any, config)).values:
            return graph, config
        put(graph, config, self.portal.call(retraced, live, rollout))
        return graph, config

    @cached_property
    def portal(self) -> Portal:
        """Where everything async runs."""
        self._portal = Portal()
        return self._portal

    @cached_property
    def _job(self) -> Job:
        policy = self.run / "policy"
        tokenizer = load_tokenizer(policy if policy.exists() else resolve(str(self.recipe.start)))
        recipe = self.recipe
        if isinstance(recipe, Compaction):
            return self.portal.enter(lambda: TRAIL_RUNS.open(recipe, tokenizer))
        return self.portal.enter(lambda: TABLES.open(recipe, tokenizer))

    def _prepared(self, rollout: Rollout, roster: Mapping[str, Weights] | None) -> Harness:
        """The native harness that made a rollout, its engines with the weights and the cast of then."""
        if why := lacks(rollout):
            raise RecordGap(why)
        harness = native(self._job.harness(), rollout)
        ref, self.weights = weights_of(self.run, self.recipe, version_of(rollout))
        if (ref.sha256, ref.version) != self._loaded:
            self.portal.call(self._job.engine.load, ref)
            self._loaded = ref.sha256, ref.version
        # Weights of version n were made by iteration n, and are served to the next.
        then = cast_at(self.run, version_of(rollout) + 1)
        then = then or cast_of(self._job.recipe_cast(0))
        self.portal.call(self._job.recast, {**then, **(cast_of(roster) if roster else {})})
        return harness

    async def _rewarded(self, made: Sequence[Rollout], like: Rollout) -> list[Rollout]:
        """With their rewards, under the weights that the recorded one had."""
        rewarded, _, _ = await self._job.rewarded(made, 0)
        if like.reward is None:
            return rewarded
        weights = like.reward.weights
        return [replace(r, reward=Reward(r.reward.parts, weights) if r.reward else None) for r in rewarded]


def native(runner: Runner, rollout: Rollout) -> Harness:
    """The native harness behind a run's runner. Raises DebugError where somebody else's loop made the rollout."""
    if isinstance(runner, Mixed) and rollout.harness in runner.runners:
        runner = runner.runners[rollout.harness]
    if not isinstance(runner, Harness):
        made = rollout.harness or type(runner).__name__
        raise DebugError(f"harness {made}: it has a loop of its own, want a rollout of the native loop to go on from")
    return runner


def version_of(rollout: Rollout) -> int:
    """The version of the policy that began the rollout; 0 where nothing was sampled."""
    return next((s.version for g in rollout.trace.segments for s in g.spans if s.kind == "sampled"), 0)


def weights_of(run: Path, recipe: Recipe | Compaction, version: int) -> tuple[CheckpointRef, str]:
    """The policy's weights of a version, and which these are; the final ones where that version is not kept.

    Raises CheckpointError where a run that has not published and is not done has neither.
    """
    if version == 0:
        return replace(ref_of(resolve(str(recipe.start))), version=0), "the weights that training started from"
    for stored in _published(run, recipe):
        if stored.card is not None and stored.card.version == version:
            return CheckpointRef(
                stored.path, stored.card.weights_sha256, version
            ), f"version {version}, {stored.names[0]}"
    if not (run / "policy" / "config.json").exists():
        raise CheckpointError(f"{run}: weights of version {version} are not kept, want a run that is done or publishes")
    final = ref_of(run / "policy")
    if final.version == version:
        return final, f"version {version}, the final policy"
    return final, f"version {version} is not kept: the final policy, version {final.version}, takes its place"


def cast_at(run: Path, iteration: int) -> Cast:
    """Who played what at an iteration; {} where the run has nothing on file. Raises as `as_played` does."""
    entries = [entry for entry in entries_of(run) if entry.iteration <= iteration]
    cast = entries[-1].cast if entries else {}
    return {role: tuple((as_played(p), p.weight) for p in players) for role, players in cast.items()}


def _published(run: Path, recipe: Recipe | Compaction) -> list[Stored]:
    store = recipe.publish.store
    if store is None:
        return []
    home = run.resolve()
    good = [s for s in Store(store).entries() if s.card and s.names and not s.fault]
    return [s for s in good if s.card and Path(s.card.origin.source).resolve() == home]
