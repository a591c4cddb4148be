"""How the command line is read: one-line errors, and the kinds of values that options take.

Not here: the commands (`recipes.cli`), and the fields of recipes (`recipes.overrides`).
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from typing import NoReturn

from envs.world import FAMILIES


class UsageError(ValueError):
    """A command line that cannot be followed; the message is one line for the user."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`unknown recipe 'wide', nearest: wide_search`; all names where none is near."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"unknown {kind} {name!r}, " + (f"nearest: {', '.join(near)}" if near else f"want one of {', '.join(names)}")


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser_of(command: str, usage: str, words: str, example: str) -> Parser:
    """The parser of one command; `words` say what it does and where its output is."""
    return Parser(
        prog=f"swarm-rl {command}",
        usage=f"swarm-rl {command} {usage}",
        description=words,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not text.lstrip("+").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, want a number of 1 or more")
    return int(text)


def numbers(text: str) -> range:
    """`3-5` as range(3, 6), `7` as range(7, 8)."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{text!r}, want A or A-B, for example 3-5")
    return range(int(low), int(high or low) + 1)


def rows_range(text: str) -> tuple[int, int]:
    """`50-80` as (50, 80), `7` as (7, 7)."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{text!r}, want LOW-HIGH, for example 50-80")
    return int(low), int(high or low)


def listed(text: str) -> tuple[str, ...]:
    """`swarm,floor` as ("swarm", "floor"), each once."""
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}, want names with commas between them")
    return names


def command(text: str) -> tuple[str, ...]:
    """`python "my agent.py"` as ("python", "my agent.py")."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def family_name(text: str) -> str:
    """A family of tasks."""
    if text not in FAMILIES:
        raise argparse.ArgumentTypeError(unknown("family", text, FAMILIES))
    return text
