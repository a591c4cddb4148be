"""`swarm-rl checkpoints`: what is in the store, and what goes in and out.

    list · show TEXT · verify · publish RUN · add FOLDER NAME · pin TEXT · unpin TEXT · delete TEXT

TEXT is a name, or the beginning of a sha256. Not here: the store (`swarm.store`).
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes.arguments import Parser, UsageError, parser_of, unknown
from recipes.named import resolve
from recipes.publish.by_hand import publish_run
from swarm.store import STORE, Store, Stored
from swarm.store_intake import left_out

HELP = """\
usage: swarm-rl checkpoints COMMAND ... [--store FOLDER] [--json]

The store of checkpoints: plain Hugging Face folders by name, each with a card of where it came from.

  list                     what is there, and whether it is good
  show TEXT                one of them: its card, its folder
  verify [TEXT ...]        hash every file; the exit code is 1 where something is damaged
  publish RUN [NAME ...]   put a checkpoint of a run in: its last iteration, or --step N, or --step best
  add FOLDER NAME ...      put a folder from elsewhere in, or give a checkpoint another name
  pin TEXT                 keep it whatever its names do
  unpin TEXT               let it go again
  delete TEXT ...          take names away; what has neither name nor pin is removed

TEXT is a name as wide_search/best, or 8 or more letters of a sha256.
"""


def checkpoints_command(argv: Sequence[str], console: Console) -> int:
    """Runs `swarm-rl checkpoints ...`; returns the exit code. Raises UsageError and CheckpointError."""
    command, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command not in _COMMANDS:
        raise UsageError(unknown("checkpoints command", command, _COMMANDS))
    return _COMMANDS[command](rest, console)


# --- looking ---------------------------------------------------------------------------


def _list(argv: Sequence[str], console: Console) -> int:
    parser = _parser("list", "[options]", "Lists the store. Files are hashed where their size or time has changed.")
    o = parser.parse_args(argv)
    entries = Store(o.store).entries()
    if o.json:
        print(json.dumps([_plain(e) for e in entries], indent=1))
    elif entries:
        console.print(_table(entries))
    else:
        console.print(f"{escape(str(o.store))} is empty; swarm-rl checkpoints publish RUN", highlight=False)
    return 0


def _show(argv: Sequence[str], console: Console) -> int:
    parser = _parser("show", "TEXT [options]", "Shows one checkpoint; all of its card with --json.")
    parser.add_argument("text", metavar="TEXT")
    o = parser.parse_args(argv)
    entry = Store(o.store).show(o.text)
    if o.json:
        print(json.dumps(_plain(entry), indent=1))
        return 0
    table = Table.grid(padding=(0, 2))
    for name, value in _described(entry).items():
        table.add_row(f"[bold]{name}[/bold]", value if name == "state" else escape(value))
    console.print(table, highlight=False)
    return 0


def _verify(argv: Sequence[str], console: Console) -> int:
    parser = _parser("verify", "[TEXT ...] [options]", "Hashes every file of these checkpoints, or of all.")
    parser.add_argument("texts", metavar="TEXT", nargs="*")
    o = parser.parse_args(argv)
    store = Store(o.store)
    entries = [store.show(text, thorough=True) for text in o.texts] if o.texts else store.entries(thorough=True)
    if o.json:
        print(json.dumps([_plain(e) for e in entries], indent=1))
    for entry in entries if not o.json else ():
        console.print(f"{_state(entry)}  {entry.id[:12]}  {escape(_names(entry))}", highlight=False)
    return 1 if any(e.fault for e in entries) else 0


# --- in --------------------------------------------------------------------------------


def _publish(argv: Sequence[str], console: Console) -> int:
    words = "Publishes a checkpoint of a run: RUN/policy, or the weights in a trainer state that is still there."
    parser = _parser("publish", "RUN [NAME ...] [options]", words, "runs/wide_search --step best")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/wide_search")
    parser.add_argument("names", metavar="NAME", nargs="*", help="default: RUN/last, RUN/best or RUN/step_000020")
    parser.add_argument("--step", type=_which, default="last", help="an iteration, last or best (default: last)")
    parser.add_argument("--by", default="", metavar="METRIC", help="what best goes by (default: the recipe's)")
    o = parser.parse_args(argv)
    return _said(publish_run(o.run, Store(o.store), o.step, by=o.by, names=o.names), o, console)


def _which(text: str) -> str:
    if text not in ("last", "best") and not (text.isascii() and text.isdecimal()):
        raise ArgumentTypeError(f"{text!r}, want an iteration, last or best")
    return text


def _add(argv: Sequence[str], console: Console) -> int:
    words = "Adds a copy of a Hugging Face folder, without pickles and code; or gives a checkpoint another name."
    parser = _parser("add", "FOLDER NAME ... [options]", words, "subagents/checkpoints/reader-1m reader")
    parser.add_argument("folder", metavar="FOLDER", help="a model folder, or the name of a checkpoint")
    parser.add_argument("names", metavar="NAME", nargs="+", help="for example reader")
    o = parser.parse_args(argv)
    folder = resolve(o.folder, o.store)
    entry = Store(o.store).add(folder, o.names)
    if left_out(folder) and not o.json:
        console.print(f"left out: {escape(', '.join(left_out(folder)))}", highlight=False)
    return _said(entry, o, console)


# --- what stays ------------------------------------------------------------------------


def _pin(argv: Sequence[str], console: Console) -> int:
    parser = _pin_parser("pin", "Keeps a checkpoint, whatever its names do.")
    o = parser.parse_args(argv)
    return _said(Store(o.store).pin(o.text, o.holder), o, console)


def _unpin(argv: Sequence[str], console: Console) -> int:
    parser = _pin_parser("unpin", "Takes a pin away; a checkpoint without names and pins is removed.")
    o = parser.parse_args(argv)
    return _gone({o.text: Store(o.store).unpin(o.text, o.holder)}, o, console)


def _pin_parser(command: str, words: str) -> Parser:
    parser = _parser(command, "TEXT [--for HOLDER] [options]", words, "wide_search/best --for runs/swap")
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--for", dest="holder", default="hand", metavar="HOLDER", help="who needs it (default: hand)")
    return parser


def _delete(argv: Sequence[str], console: Console) -> int:
    words = "Takes names away, or by hash all of a checkpoint's. One without names is removed, unless it is pinned."
    parser = _parser("delete", "TEXT ... [options]", words, "wide_search/step_000020")
    parser.add_argument("texts", metavar="TEXT", nargs="+")
    o = parser.parse_args(argv)
    store = Store(o.store)
    return _gone({text: store.delete(text) for text in o.texts}, o, console)


_COMMANDS: Mapping[str, Callable[[Sequence[str], Console], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "publish": _publish,
    "add": _add,
    "pin": _pin,
    "unpin": _unpin,
    "delete": _delete,
}


def _parser(command: str, usage: str, words: str, example: str = "") -> Parser:
    line = f"swarm-rl checkpoints {command} {example or usage.split(' [')[0].replace('TEXT', 'wide_search/best')}"
    parser = parser_of(f"checkpoints {command}", usage, words, line)
    parser.add_argument("--store", type=Path, default=STORE, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


# --- what is shown ---------------------------------------------------------------------


def _said(entry: Stored, o: Namespace, console: Console) -> int:
    if o.json:
        print(json.dumps(_plain(entry), indent=1))
        return 0
    pins = f", pinned by {', '.join(entry.pins)}" if entry.pins else ""
    console.print(
        f"{escape(_names(entry))} = {entry.id[:12]}{escape(pins)}\n{escape(str(entry.path))}", highlight=False
    )
    return 0


def _gone(left: Mapping[str, bool], o: Namespace, console: Console) -> int:
    """`left`: what was given → whether its checkpoint is still there."""
    if o.json:
        print(json.dumps({text: "kept" if there else "removed" for text, there in left.items()}, indent=1))
        return 0
    for text, there in left.items():
        words = "gone; its checkpoint stays, for others" if there else "gone, and its checkpoint removed"
        console.print(f"{escape(text)}: {words}", highlight=False)
    return 0


def _plain(entry: Stored) -> dict[str, Any]:
    plain = {"id": entry.id, "path": str(entry.path), "names": entry.names, "pins": entry.pins, "fault": entry.fault}
    return {**plain, "card": msgspec.to_builtins(entry.card)}


def _table(entries: Sequence[Stored]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "sha256", "from", "iteration", "score", "MB", "state", "pinned by"):
        table.add_column(heading, justify="right" if heading in ("iteration", "MB") else "left", overflow="fold")
    for e in entries:
        origin = e.card.origin if e.card else None
        step = "" if origin is None or origin.step is None else str(origin.step)
        size = f"{e.card.size / 1e6:,.1f}" if e.card else ""
        told = (_names(e, "\n"), e.id[:12], origin.source if origin else "", step, _score(e), size)
        table.add_row(*map(escape, told), _state(e), escape("\n".join(e.pins)))
    return table


def _described(entry: Stored) -> dict[str, str]:
    plain = {"names": _names(entry), "folder": str(entry.path), "state": _state(entry)}
    pins = {"pinned by": ", ".join(entry.pins) or "nobody"}
    card = entry.card
    if card is None:
        return plain | pins
    step = "" if card.origin.step is None else f", iteration {card.origin.step}"
    return {
        **plain,
        "from": card.origin.source + step,
        **{name: f"{score:.4g}" for name, score in sorted(card.origin.scores.items()) if name.startswith("eval/")},
        "model": f"{card.architecture}, {card.parameters:,} parameters, {card.size / 1e6:,.1f} MB",
        "published": datetime.fromtimestamp(card.published, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sha256": card.id,
        "of its weights": f"{card.weights_sha256}, version {card.version}",
        **pins,
    }


def _names(entry: Stored, between: str = ", ") -> str:
    return between.join(entry.names) or "(no name)"


def _score(entry: Stored) -> str:
    scores = entry.card.origin.scores if entry.card else {}
    shown = [name for name in ("eval/item_f1", "eval/score") if name in scores]
    return f"{shown[0].removeprefix('eval/')} {scores[shown[0]]:.3f}" if shown else ""


def _state(entry: Stored) -> str:
    return f"[red]{escape(entry.fault)}[/red]" if entry.fault else "[green]good[/green]"
