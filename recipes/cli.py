"""The command `swarm-rl`: train, plan, doctor, eval, gateway, report, view, compare, checkpoints, tasks, score.

Whatever a user can get wrong ends as one line on stderr and exit code 2, Ctrl-C as one line and 130;
a traceback is a bug. Not here: what the commands do (each calls one function), and the fields of
recipes (`recipes.overrides`).
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.ablations import serial_collapse, serial_collapse_parl, spurious, spurious_finish
from recipes.arguments import UsageError, parser_of, unknown
from recipes.cast.command import roster_command
from recipes.cold_start import cold_start, cold_start_polish, cold_start_sloppy, fit
from recipes.compaction.report import is_study, report_study
from recipes.compaction.run import TRAIL_RUNS, compaction_run, run_compaction
from recipes.compaction.start import cold_start_trails, fit_trails
from recipes.compaction.study import compaction, study
from recipes.compare.command import compare_command
from recipes.debug.command import fork_command
from recipes.debug.rerun import replay_command
from recipes.debug.run import DebugError
from recipes.doctor.command import doctor_command, guarded
from recipes.episodes import EpisodesError
from recipes.gateway import gateway_command
from recipes.gpu import wide_search_4b, wide_search_30b
from recipes.grid.command import eval_command
from recipes.grid.verifying import MisfitError
from recipes.overrides import OverrideError, apply, describe
from recipes.plan.command import plan_command
from recipes.publish.by_hand import with_start
from recipes.publish.command import checkpoints_command
from recipes.report import ReportError
from recipes.show_tasks import tasks_command
from recipes.swap.command import swap_command
from recipes.train import TABLES, train
from recipes.view.command import view_command
from recipes.wide_search import single_agent, wide_search
from rewards.widesearch.cli import score_main
from subagents.roster import RosterError
from swarm.folders import CheckpointError
from swarm.fork import ForkError
from swarm.kept import RecordGap
from swarm.records import RecordError
from swarm.rl.ranks import LearnerLost
from swarm.rundir import RunDirError, read_recipe
from swarm.types import EngineError
from swarm.workers import ClusterError

HELP = """\
usage: swarm-rl COMMAND ...

Train an orchestrator that spawns frozen subagents, and measure it.

  train RECIPE    train, evaluate and report: the whole job, into runs/RECIPE
  plan RECIPE     show what a run takes of a machine or a cluster, without loading anything
  doctor RECIPE   check this machine before a run
  eval RUN        evaluate a finished run on tasks and worlds that it never saw, under any harness and verifier
  gateway RUN     serve a run's policy to an agent of somebody else's, in OpenAI's protocol
  report RUN      rebuild the report of a run and show its table
  view RUN        look at a run in the browser: curves, rollouts, every agent; also while it trains
  replay RUN      run a run's rollouts again from their records, and tell what differs
  fork RUN        go on from a turn of a recorded rollout with one thing changed, and compare
  swap RUN        run over other subagents, or under other orchestrators, and tell what changes
  roster RUN      show who a run's subagents were and are; swap them while it trains
  compare OUT     compare finished runs, several seeds of each recipe
  checkpoints     the store of checkpoints: list, show, publish, add, verify, pin, delete
  tasks           count, show and export the tasks of the world
  score           score a response with the WideSearch scorer

Begin with:  swarm-rl train wide_search
Every command has a --help of its own.
"""


USER_ERRORS = (
    *(UsageError, OverrideError, ReportError, EpisodesError, CheckpointError, RunDirError, OSError, EngineError),
    *(ClusterError, LearnerLost, MisfitError, RosterError, RecordError, RecordGap, ForkError, DebugError),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe: the function that makes it, and the one that runs it, `run(recipe, out, clean=, console=)`."""

    make: Callable[[], Any]
    run: Callable[..., Any]

    @property
    def words(self) -> str:
        return (self.make.__doc__ or "").strip().split("\n")[0]


RECIPES: Mapping[str, Entry] = {
    "wide_search": Entry(wide_search, train),
    "single_agent": Entry(single_agent, train),
    "cold_start": Entry(cold_start, fit),
    "cold_start_polish": Entry(cold_start_polish, fit),
    "cold_start_sloppy": Entry(cold_start_sloppy, fit),
    "compaction": Entry(compaction, study),
    "compaction_run": Entry(compaction_run, run_compaction),
    "cold_start_trails": Entry(cold_start_trails, fit_trails),
    "serial_collapse": Entry(serial_collapse, train),
    "serial_collapse_parl": Entry(serial_collapse_parl, train),
    "spurious": Entry(spurious, train),
    "spurious_finish": Entry(spurious_finish, train),
    "wide_search_4b": Entry(wide_search_4b, guarded(train)),
    "wide_search_30b": Entry(wide_search_30b, guarded(train)),
}


def main(argv: Sequence[str] | None = None, recipes: Mapping[str, Entry] = RECIPES) -> int:
    """Runs one command and returns the exit code: 0, 2 for a mistake of the user, 130 for Ctrl-C."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv), recipes)
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except (*USER_ERRORS, ValueError, KeyboardInterrupt, BaseExceptionGroup) as error:
        line, code = explained(error)
        if not line:
            raise
        print(f"swarm-rl: {line}", file=sys.stderr)
        return code


def _dispatch(argv: list[str], recipes: Mapping[str, Entry]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    match command:
        case "train":
            return _train(rest, recipes, console)
        case "plan":
            return plan_command(rest, {name: entry.make for name, entry in recipes.items()}, console)
        case "doctor":
            return doctor_command(rest, {name: entry.make for name, entry in recipes.items()}, console)
        case "eval":
            return eval_command(rest, console)
        case "gateway":
            return gateway_command(rest, console)
        case "report":
            return _report(rest, console)
        case "view":
            return view_command(rest, console)
        case "replay":
            return replay_command(rest, console)
        case "fork":
            return fork_command(rest, console)
        case "swap":
            return swap_command(rest, console)
        case "roster":
            return roster_command(rest, console)
        case "compare":
            return compare_command(rest, console)
        case "checkpoints":
            return checkpoints_command(rest, console)
        case "tasks":
            return tasks_command(rest, console)
        case "score":
            return score_main(rest)
        case _:
            commands = (
                *("train", "plan", "doctor", "eval", "gateway", "report", "view", "replay", "fork", "swap", "roster"),
                *("compare", "checkpoints", "tasks", "score"),
            )
            raise UsageError(unknown("command", command, commands))


# --- errors ----------------------------------------------------------------------------


def explained(error: BaseException) -> tuple[str, int]:
    """(the line for the user, the exit code), or ("", 1) if it is a bug.

    A group is a mistake of the user only if everything in it is.
    """
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return "interrupted; a training run goes on where it was with the same command", 130
    if not all(_is_users(leaf) for leaf in leaves):
        return "", 1
    return " ".join(_line(leaves[0]).split()), 2


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_users(error: BaseException) -> bool:
    """The task samplers have no error type of their own for bounds that no task meets: their messages begin so."""
    sampler = type(error) is ValueError and str(error).startswith(("tasks: ", "trails: "))
    return isinstance(error, USER_ERRORS) or sampler


def _line(error: BaseException) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full; what was saved before is intact"
    return f"{where}{error.strerror}"


# --- train -----------------------------------------------------------------------------


def _train(argv: list[str], recipes: Mapping[str, Entry], console: Console) -> int:
    """The recipe comes first, so that the values of overrides are never taken for it."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] not in ("-h", "--help"):
            raise UsageError(f"train: the recipe comes before {argv[0]} (see swarm-rl train --help)")
        print(_train_help(recipes), end="")
        return 0
    name = argv[0]
    if name not in recipes:
        raise UsageError(unknown("recipe", name, recipes))
    parser = parser_of("train", f"{name} [--out FOLDER] [--clean] [--FIELD VALUE ...]", recipes[name].words, "")
    parser.epilog = f"example:\n  swarm-rl train {name} --out runs/second --seed 1\n\nfields:"
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="the run folder (default: %(default)s)")
    parser.add_argument("--clean", action="store_true", help="empty the run folder first, instead of going on")
    if {"-h", "--help"} & set(argv[1:]):
        parser.print_help()
        console.print(describe(recipes[name].make()))
        return 0
    options, fields = parser.parse_known_args(argv[1:])
    recipe = with_start(apply(recipes[name].make(), fields))
    recipes[name].run(recipe, options.out, clean=options.clean, console=console)
    return 0


def _train_help(recipes: Mapping[str, Entry]) -> str:
    width = max(map(len, recipes))
    lines = [f"  {name:<{width}}  {entry.words}" for name, entry in recipes.items()]
    return "\n".join(
        [
            "usage: swarm-rl train RECIPE [--out FOLDER] [--clean] [--FIELD VALUE ...]\n",
            "Runs a recipe into FOLDER (runs/RECIPE): recipe, metrics, recorded rollouts, checkpoints and",
            "report/report.md. A run that was stopped goes on with the same command; --clean begins anew.\n",
            "recipes:",
            *lines,
            "\nEvery field of a recipe can be set:",
            "  swarm-rl train wide_search --seed 1 --ppo.lr 2e-4",
            "  swarm-rl train wide_search --help         lists the fields\n",
        ]
    )


# --- report ----------------------------------------------------------------------------


def _report(argv: list[str], console: Console) -> int:
    words = "Rebuilds RUN/report (report.md, report.json, pictures) from the files of the run, and prints its table."
    parser = parser_of("report", "RUN [--json]", words, "swarm-rl report runs/wide_search")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--json", action="store_true", help="print report.json instead of the table")
    o = parser.parse_args(argv)
    report = _reported(o.run, Console(quiet=True) if o.json else console)
    if o.json:
        print(json.dumps(report, indent=1))
    return 0


def _reported(run: Path, console: Console) -> dict[str, Any]:
    """Rebuilds and shows the report of a run of any kind; its recipe tells which it is."""
    recipe = read_recipe(run) if (run / "recipe.json").is_file() else {}
    if is_study(recipe):
        return report_study(run, console)
    if "trails" in recipe:
        return TRAIL_RUNS.report(run, console)
    return TABLES.report(run, console)
