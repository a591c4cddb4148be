"""A recipe's fields by dotted name: set from the command line, written to JSON, listed for `--help`.

A recipe is a frozen dataclass nested by owner, so `ppo.lr` is the field `lr` of the field `ppo`.
Not here: which recipes there are (`recipes.cli`), or what their fields mean (their docstrings).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from rich.markup import escape
from rich.table import Table

R = TypeVar("R")


class OverrideError(ValueError):
    """A field or a value that a recipe does not take; the message is one line for the user."""


def apply(recipe: R, arguments: Sequence[str]) -> R:
    """The recipe with fields replaced: `apply(recipe, ["--ppo.lr", "2e-4", "--seed=3"])`.

    All values are set before anything is checked, so fields that depend on each other can be
    changed together. Raises `OverrideError`: an unknown field, a value of the wrong type, a value
    that the recipe refuses.
    """
    return _rebuilt(recipe, _nested(recipe, _pairs(arguments)))


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise OverrideError(f"unexpected argument {name!r}, want --field value")
        if not equals:
            if not rest or _is_flag(rest[0]):
                raise OverrideError(f"{name} has no value, want {name} VALUE")
            value = rest.pop(0)
        yield name[2:].replace("-", "_"), value


def _is_flag(word: str) -> bool:
    return word.startswith("--") and word[2:3].isalpha()


def _nested(recipe: Any, pairs: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """`{"ppo": {"lr": 2e-4}}`: the converted values, laid out like the recipe."""
    known = {name: (owner, field) for name, owner, field in _leaves(recipe)}
    tree: dict[str, Any] = {}
    for name, text in pairs:
        if name not in known:
            raise OverrideError(_unknown(name, recipe, list(known)))
        owner, field = known[name]
        *sections, leaf = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[leaf] = _converted(name, text, get_type_hints(type(owner))[field.name])
    return tree


def _unknown(name: str, recipe: Any, known: Sequence[str]) -> str:
    inside = [k for k in known if k.startswith(name + ".")]
    if inside:
        return f"{name} is a section, set one of its fields: {', '.join('--' + k for k in inside[:4])} ..."
    leaf = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    same_word = [k for k in known if leaf in k.replace(".", "_").split("_")]
    near = list(dict.fromkeys([*same_leaf, *same_word]))[:3] or near
    return f"unknown field --{name}, " + (f"nearest: {', '.join('--' + k for k in near)}" if near else "see --help")


def _leaves(recipe: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """(dotted name, the section that owns it, the field) of every field that is not itself a section."""
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, recipe, field


def _converted(name: str, text: str, wanted: Any) -> Any:
    try:
        return _convert(text, wanted)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise OverrideError(f"--{name} = {text!r}, want {type_name(wanted)}") from error


def _convert(text: str, wanted: Any) -> Any:
    options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else ()
    if type(None) in options:
        if text.lower() in ("none", "null"):
            return None
        return _convert(text, Union[tuple(o for o in options if o is not type(None))])  # noqa: UP007
    if wanted is str or wanted is Path:
        return wanted(text)
    if get_origin(wanted) in (tuple, list, dict) or wanted in (tuple, list, dict):
        raw = msgspec.json.decode(text) if text.lstrip()[:1] in ("[", "{") else [v for v in text.split(",") if v]
        value = msgspec.convert(raw, wanted, strict=False, dec_hook=_decode_path)
        known = set(_paths(to_json(value))) if isinstance(raw, dict) else set[str]()
        if isinstance(raw, dict) and (extra := [name for name in _paths(raw) if name not in known]):
            raise ValueError(f"unknown field {extra[0]}")
        return value
    return msgspec.convert(text, wanted, strict=False, dec_hook=_decode_path)


def type_name(wanted: Any) -> str:
    """A type as a user reads it: `int`, `tuple[str, ...]`, `'offline' | 'online'`."""
    if get_origin(wanted) in (Union, types.UnionType):
        return " | ".join(type_name(o) for o in get_args(wanted))
    if wanted is bool:
        return "true | false"
    if wanted is type(None):
        return "none"
    text = str(wanted) if get_origin(wanted) else getattr(wanted, "__name__", str(wanted))
    if text.startswith("typing.Literal"):
        return " | ".join(repr(o) for o in get_args(wanted))
    return text.replace("typing.", "")


def _rebuilt(recipe: R, changes: Mapping[str, Any]) -> R:
    values = {
        name: _rebuilt(getattr(recipe, name), value) if dataclasses.is_dataclass(getattr(recipe, name)) else value
        for name, value in changes.items()
    }
    try:
        return dataclasses.replace(recipe, **values) if values else recipe  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportGeneralTypeIssues]
    except OverrideError:
        raise
    except ValueError as error:
        raise OverrideError(" ".join(str(error).split())) from error


# --- JSON ------------------------------------------------------------------------------


def to_json(recipe: Any) -> dict[str, Any]:
    """The whole recipe as JSON values (tuples as lists, paths as strings)."""
    return msgspec.json.decode(msgspec.json.encode(recipe, enc_hook=_encode_path))


def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
    """The recipe that `to_json` wrote. Raises `OverrideError` if a field is unknown, missing or of a wrong type."""
    try:
        recipe = msgspec.convert(data, cls, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise OverrideError(f"{cls.__name__}: {error}") from error
    known = set(_paths(to_json(recipe)))
    extra = [name for name in _paths(data) if name not in known]
    if extra:
        raise OverrideError(f"{cls.__name__}: unknown field {extra[0]}")
    return recipe


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a recipe holds a {type(value).__name__}, want numbers, strings, paths and tuples of them")


def _decode_path(wanted: type[Any], value: Any) -> Any:
    if issubclass(wanted, Path) and isinstance(value, str):
        return wanted(value)
    raise TypeError(f"{value!r}, want {type_name(wanted)}")


# --- help ------------------------------------------------------------------------------


def describe(recipe: Any) -> Table:
    """Every field with its value and type, a heading a section: what `train RECIPE --help` prints."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("field", "default", "type"):
        table.add_column(heading, overflow="fold")
    _describe_section(table, recipe, "")
    return table


def _describe_section(table: Table, section: Any, prefix: str) -> None:
    hints = get_type_hints(type(section))
    plain = [f for f in dataclasses.fields(section) if not dataclasses.is_dataclass(getattr(section, f.name))]
    if prefix and plain:
        first_line = (type(section).__doc__ or "").strip().split("\n")[0]
        table.add_row()
        table.add_row(f"[bold]{prefix[:-1]}[/bold]", f"[dim]{escape(first_line)}[/dim]", "")
    for field in plain:
        value = getattr(section, field.name)
        table.add_row(
            f"--{prefix}{field.name}", escape(_shown(value)), f"[dim]{escape(type_name(hints[field.name]))}[/dim]"
        )
    for field in dataclasses.fields(section):
        if field not in plain:
            _describe_section(table, getattr(section, field.name), f"{prefix}{field.name}.")


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(str(v) for v in value) if isinstance(value, tuple | list) else str(value)
