"""`swarm-rl replay RUN`: a run's rollouts go through the loop again, without an engine, and must come out alike.

Rewards are made anew where a rule makes them; what a judge said, and the annealed weights, are the record's.
Not here: the replay of one rollout (`swarm.replay`), and what needs engines (`recipes.debug.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import trio
from rich.console import Console
from rich.markup import escape

from recipes.arguments import numbers, parser_of
from recipes.cast.book import entries_of
from recipes.compaction.run import Compaction
from recipes.config import Recipe
from recipes.grid.runs import read_recipe
from recipes.named import resolve
from recipes.progress import Progress
from recipes.session import language_of, load_tokenizer
from rewards.parl import parl
from rewards.trails import trail_scores
from rewards.verifiers import RULES
from swarm.chat import Chat, chat_of
from swarm.kept import lacks
from swarm.records import RecordError, Records
from swarm.replay import Difference, differences, replay
from swarm.types import Reward, Rollout, Trace

_SHOWN = 20


@dataclass(frozen=True)
class Languages:
    """The languages of a run's agents: `Languages(run, recipe)(trace)`.

    A subagent's is that of its checkpoint, where the run's roster has it on file and it is still there.
    """

    run: Path
    recipe: Recipe | Compaction

    def __call__(self, trace: Trace) -> Chat:
        folder = self._folders.get(trace.checkpoint)
        return self.policy if folder is None else language_of(folder, self._start, self.policy)

    @cached_property
    def policy(self) -> Chat:
        return chat_of(load_tokenizer(self._start))

    @cached_property
    def _start(self) -> Path:
        own = self.run / "policy"
        return own if (own / "tokenizer.json").exists() else resolve(str(self.recipe.start))

    @cached_property
    def _folders(self) -> dict[str, Path]:
        played = (p for entry in entries_of(self.run) for players in entry.cast.values() for p in players)
        return {p.sha256: Path(p.path) for p in played if Path(p.path).is_dir()}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of one record: its differences, or why it could not be replayed."""

    path: Path
    index: int
    differences: tuple[Difference, ...] = ()
    lacks: str = ""

    def lines(self) -> Iterator[str]:
        yield from (f"{self.path.name}, rollout {self.index}: {text}" for text in self.differences)


def replay_command(argv: Sequence[str], console: Console) -> int:
    """Replays and tells; the exit code, 1 where something differs."""
    words = (
        "Runs recorded rollouts through the agent loop again, without an engine and without tools, and compares every\n"
        "token, the ledger, the answer and the reward with the record."
    )
    parser = parser_of("replay", "RUN [options]", words, "swarm-rl replay runs/wide_search --iterations 1-5")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--iterations", type=numbers, metavar="A-B", help="of these iterations only, counted from 1")
    parser.add_argument("--rollouts", type=numbers, metavar="A-B", help="these of each iteration only, counted from 0")
    o = parser.parse_args(argv)
    recipe, records = read_recipe(o.run), Records(o.run)
    for line in records.torn:
        console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False)
    chosen = [k for k in range(len(records)) if _asked(records.origin(k), o.iterations, o.rollouts)]
    if not chosen:
        raise RecordError(
            f"{o.run}: no such rollouts, want some of its {len(records)} in {len(records.files)} iterations"
        )
    with Progress(Console(stderr=True), {"rollouts": len(chosen)}) as progress:
        found = trio.run(_replay_all, o.run, recipe, records, chosen, partial(progress.advance, "rollouts"))
    return _tell(o.run, found, console)


async def rerun(recipe: Recipe | Compaction, recorded: Rollout, languages: Languages) -> list[Difference]:
    """The differences between a record and its replay. Raises RecordGap where it cannot be replayed."""
    again = await replay(recorded, languages)
    return differences(recorded, await rewarded_as(recipe, recorded, again), languages.policy.decode)


async def rewarded_as(recipe: Recipe | Compaction, recorded: Rollout, again: Rollout) -> Rollout:
    """A rollout with the reward that a rule gives it, under the weights of the record, which had one."""
    if recorded.reward is None:
        return again
    weights = recorded.reward.weights
    if isinstance(recipe, Compaction):
        return replace(again, reward=Reward({"performance": trail_scores(again.task, again.table)["score"]}, weights))
    rule = RULES.get(recipe.verifier)
    verdict = None if rule is None else await rule(again)
    perf = recorded.reward.parts["perf"] if rule is None or verdict is None else verdict.scores.get(rule.main)
    made = parl(again, perf, recipe.parl, 0).reward
    return replace(again, reward=None if made is None else Reward(made.parts, weights))


async def _replay_all(
    run: Path, recipe: Recipe | Compaction, records: Records, chosen: Sequence[int], advance: Callable[[int], None]
) -> list[Replayed]:
    languages, found = Languages(run, recipe), list[Replayed]()
    for k in chosen:
        recorded, (path, index) = records[k], records.origin(k)
        if why := lacks(recorded):
            found.append(Replayed(path, index, lacks=why))
        else:
            found.append(Replayed(path, index, tuple(await rerun(recipe, recorded, languages))))
        advance(1)
    return found


def _tell(run: Path, found: Sequence[Replayed], console: Console) -> int:
    """One line where all is alike; else what differs. The exit code."""
    lacking = [r for r in found if r.lacks]
    differing = [r for r in found if r.differences]
    count = len(found) - len(lacking)
    if lacking:
        console.print(f"{len(lacking):,} cannot be replayed: {lacking[0].lacks}", markup=False, highlight=False)
    if not differing:
        console.print(f"{run}: {count:,} rollouts replayed" + (", all identical" if count else ""), highlight=False)
        return 0 if count else 1
    lines = [line for r in differing for line in r.lines()]
    for line in lines[:_SHOWN]:
        console.print(line, markup=False, highlight=False)
    if len(lines) > _SHOWN:
        console.print(f"… and {len(lines) - _SHOWN:,} differences more")
    console.print(f"{run}: {count:,} rollouts replayed, {len(differing):,} differ", highlight=False)
    return 1


def iteration_of(path: Path) -> int:
    """That of a record file, 0 for one that is of none: `rollouts/iteration_0012.rollouts` has 12."""
    digits = path.stem.removeprefix("iteration_")
    return int(digits) if digits.isdecimal() else 0


def _asked(origin: tuple[Path, int], iterations: range | None, rollouts: range | None) -> bool:
    path, index = origin
    in_iterations = iterations is None or iteration_of(path) in iterations
    return in_iterations and (rollouts is None or index in rollouts)
