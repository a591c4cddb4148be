"""`swarm-rl fork RUN`: goes on from a turn of a recorded rollout with one thing changed, and shows what that changed.

    swarm-rl fork runs/x --rollout 7                                          its turns, to choose from
    swarm-rl fork runs/x --rollout 7 --turn 2 --result 0=none                 call 0 of turn 2 returned "none"
    swarm-rl fork runs/x --rollout 7 --turn 2 --subagents checkpoints/large   others are spawned from there on
    swarm-rl fork runs/x --rollout 7 --turn 2 --credit 1 --pairs 16           what the spawn by call 1 was worth

Not here: what a fork is (`swarm.fork`), and edits that are written in Python (`recipes.debug.run`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recipes.arguments import UsageError, parser_of, positive
from recipes.cast.command import changes_of
from recipes.debug.run import Debugger, open_run
from swarm.fork import Edit
from swarm.kept import turns_of
from swarm.records import RecordError, write
from swarm.replay import tree
from swarm.types import Budget, Rollout, ToolResult, Turn

_WIDE = 60


def fork_command(argv: Sequence[str], console: Console) -> int:
    """Forks and shows the branch beside the record; without --turn, the turns that there are. The exit code."""
    words = (
        "Goes on from a turn of a recorded rollout: what was before it is kept, one thing is changed, the rest is run\n"
        "live, with the weights that made the rollout where they are kept. Shows reward, steps, tokens and answer of\n"
        "both. Without --turn it lists the turns of all agents."
    )
    parser = parser_of("fork", "RUN [options]", words, "swarm-rl fork runs/wide_search --rollout 7 --turn 2 --seed 1")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("--rollout", type=int, default=-1, help="counted from 0, -1 is the last (default: %(default)s)")
    parser.add_argument("--agent", default="main", help="whose turn, for example main/3:reader (default: %(default)s)")
    parser.add_argument("--turn", type=int, help="counted from 0")
    parser.add_argument("--result", action="append", default=[], metavar="K=TEXT", help="what its call K returns")
    parser.add_argument("--say", help="what the agent says in this turn instead, as text without calls")
    parser.add_argument("--prompt", help="another prompt, at turn 0")
    parser.add_argument("--system", help="another system prompt, at turn 0")
    parser.add_argument("--budget", type=positive, help="its critical steps, those already spent included")
    parser.add_argument("--temperature", type=float, help="from this turn on")
    parser.add_argument("--seed", type=int, help="another seed, from this turn on")
    parser.add_argument("--subagents", metavar="A,B:2", help="who is spawned from here on")
    parser.add_argument("--roles", metavar="NAME=A,B:2", action="append", default=[], help="who in one role")
    parser.add_argument("--credit", type=int, metavar="K", help="what the subagent that call K ran was worth")
    parser.add_argument("--pairs", type=positive, default=16, help="with and without it (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a record file that the branch is appended to")
    o = parser.parse_args(argv)
    with open_run(o.run) as run:
        rollout = _chosen(run, o.rollout)
        if o.turn is None:
            console.print(_turns(run, rollout))
            return 0
        if o.credit is not None:
            console.print(run.credit(rollout, o.turn, o.credit, o.agent, pairs=o.pairs))
        else:
            _fork(run, rollout, o, console)
        console.print(f"weights: {escape(run.weights)}", highlight=False)
    return 0


def _fork(run: Debugger, rollout: Rollout, o: Namespace, console: Console) -> None:
    branch = run.fork(rollout, o.agent, o.turn, edit_of(o, rollout), changes_of(o.subagents, o.roles))
    console.print(run.compare({"recorded": rollout, "branch": branch.rollout}))
    if o.out is not None:
        write(o.out, [branch.rollout])
        console.print(f"the branch is in {escape(str(o.out))}", highlight=False)


def edit_of(o: Namespace, rollout: Rollout) -> Edit:
    """What the options change. Raises UsageError."""
    results: dict[int, str | ToolResult] = {}
    for text in o.result:
        place, equals, value = text.partition("=")
        if not (equals and place.isdecimal()):
            raise UsageError(f"--result {text!r}, want K=TEXT with the place of the call, for example 0=none")
        results[int(place)] = value
    return Edit(
        action=None if o.say is None else Turn(o.say),
        results=results,
        budget=None if o.budget is None else replace(_budget(rollout, o.agent), critical_steps=o.budget),
        temperature=o.temperature,
        seed=o.seed,
        prompt=o.prompt,
        system=o.system,
    )


def _budget(rollout: Rollout, agent: str) -> Budget:
    setups = {r.trace.agent: r.trace.setup for r in tree(rollout)}
    setup = setups.get(agent) or next(s for s in setups.values() if s)
    return setup.budget


def _chosen(run: Debugger, k: int) -> Rollout:
    try:
        return run.records[k]
    except IndexError:
        raise RecordError(f"{run.run}: rollout {k}, want one from 0 to {len(run.records) - 1}") from None


def _turns(run: Debugger, rollout: Rollout) -> Table:
    """What each agent said in its turns, and what came back, shortened."""
    table = Table(box=SIMPLE_HEAD, title=rollout.task.query, title_justify="left")
    for heading in ("agent", "turn", "said", "came back"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True, min_width=4)
    for r in tree(rollout):
        chat = run.languages(r.trace)
        for turn, (said, act) in enumerate(zip(turns_of(r.trace), r.trace.acts, strict=True)):
            came = "; ".join(_shown(result) for result in act.results)
            table.add_row(r.trace.agent, str(turn), Text(_short(chat.decode(said.ids))), Text(_short(came)))
    return table


def _shown(result: ToolResult) -> str:
    return "".join(part if isinstance(part, str) else part.title for part in result.parts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDE else f"{line[: _WIDE - 1]}…"
