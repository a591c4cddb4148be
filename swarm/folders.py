"""Folders that are written whole or not at all, and the JSON in them.

    write .name.new ─ flush ─ rename name → .name.old ─ rename .name.new → name ─ remove .name.old

A crash between the two renames leaves only the old folder under its other name: `settled` puts it back.
One writer a folder. Not here: what a folder holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message is one line for the user."""


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Has `write` fill a new folder and puts it in the place of `folder`.

    Raises CheckpointError, with what was there unchanged, if the disk refuses.
    """
    folder = folder.absolute()
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    with _disk(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        settled(folder, missing_ok=True)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, new, ignore_errors=True)
            new.mkdir()
            write(new)
            for path in (*new.iterdir(), new):
                flush(path)
            undo.pop_all()
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def settled(folder: Path, *, missing_ok: bool = False) -> Path:
    """The folder, put back first if a crash left it under its old name."""
    absolute = folder.absolute()
    old = absolute.with_name(f".{absolute.name}.old")
    if not absolute.exists() and old.exists():
        old.rename(absolute)
    if not missing_ok and not absolute.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    return folder


def visible(folder: Path) -> Path:
    name = folder.name
    return folder.with_name(name[1:-4]) if name.startswith(".") and name.endswith(".old") else folder


@contextmanager
def _disk(folder: Path) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else line(e)
        raise CheckpointError(f"{folder}: cannot write the checkpoint: {reason}; earlier ones are intact") from e


def flush(path: Path) -> None:
    """Waits until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise CheckpointError(f"{path}: missing") from e
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: corrupt: {line(e)}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: corrupt: {type(value).__name__}, want a JSON object")
    return cast(dict[str, Any], value)


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def line(e: BaseException) -> str:
    return " ".join(str(e).split())[:200] or type(e).__name__


def discard(folder: Path) -> None:
    """Removes a folder, and what a crash may have left of it under its other names."""
    for path in (folder, *(folder.with_name(f".{folder.name}.{end}") for end in ("old", "new"))):
        shutil.rmtree(path, ignore_errors=True)
