"""The run folder: one writer, a recipe that stays what it was, metrics that a kill cannot spoil.

    runs/NAME/   recipe.json   metrics.jsonl   done.json   run.lock   checkpoints/ rollouts/ report/

Not here: what a checkpoint or a record holds, and what a report says.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from filelock import FileLock, Timeout

from swarm.folders import flush

_FOLDERS = ("checkpoints", "rollouts", "report")
_ABSENT = object()


class RunDirError(ValueError):
    """A run folder that cannot be used; the message is one line for the user."""


class RunDir:
    """A run folder held by this process: `with RunDir(Path("runs/x"), recipe) as run: run.log({"step": 1})`.

    `recipe` is what JSON can hold; the folder keeps it whole. `clean` empties the folder of an earlier
    run first. Raises RunDirError if another process writes there (its pid is named), if the folder holds
    something else, or was made with another recipe (the first differing field is named).
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], *, clean: bool = False) -> None:
        self.path = path
        if _foreign(path):
            raise RunDirError(f"{path}: not a run folder (it has no recipe.json), want a new or an empty one")
        self._lock = _acquire(path)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            if clean:
                _empty(path)
            _keep_recipe(path, recipe)
            for name in _FOLDERS:
                (path / name).mkdir(exist_ok=True)
            _drop_torn_line(path / "metrics.jsonl")
            self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)
            undo.pop_all()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._metrics.close()
        (self.path / "run.pid").unlink(missing_ok=True)
        self._lock.release()

    @property
    def done(self) -> dict[str, Any] | None:
        """What `finish` was given, or None while the run is not over."""
        return read_done(self.path)

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one line of metrics; `row["step"]` is the step that it belongs to."""
        _append_whole(self._metrics, (json.dumps({**row, "step": int(row["step"])}) + "\n").encode(), self.path)

    def rewind(self, step: int) -> None:
        """Drops the metrics past `step`, from where a resumed run goes on, and the mark of a finished run."""
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        self._metrics.close()
        _write_whole(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self._metrics = (self.path / "metrics.jsonl").open("ab", buffering=0)
        (self.path / "done.json").unlink(missing_ok=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as over."""
        _write_whole(self.path / "done.json", json.dumps(summary, indent=1) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder, oldest first; a torn last line is left out. No lock is needed."""
    file = path / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    whole, _, _ = text.rpartition("\n")
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as e:
        raise RunDirError(f"{file}: corrupt: {e}") from e


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe that a run folder was made with. Raises RunDirError if there is none, or it is corrupt."""
    return _read_object(path / "recipe.json", f"{path}: no run here")


def read_done(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None."""
    return _read_object(path / "done.json", "") if (path / "done.json").exists() else None


def _acquire(path: Path) -> FileLock:
    """The lock is the operating system's, so that a dead owner holds nothing; the pid is for the message."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / "run.lock", timeout=0)
        lock.acquire()
        (path / "run.pid").write_text(f"{os.getpid()}\n")
    except Timeout as e:
        pid = (path / "run.pid").read_text().strip() if (path / "run.pid").exists() else "unknown"
        raise RunDirError(f"{path}: in use by process {pid}, want one writer a run") from e
    except OSError as e:
        raise RunDirError(f"{path}: cannot be made or written: {e.strerror or e}") from e
    return lock


def _foreign(path: Path) -> bool:
    """True for a folder with files of somebody else, which --clean must not remove."""
    if not path.exists() or (path / "recipe.json").exists():
        return False
    return not path.is_dir() or any(p.name not in ("run.lock", "run.pid", "recipe.json.new") for p in path.iterdir())


def _empty(path: Path) -> None:
    """The recipe goes last: without it the rest would be taken for somebody else's."""
    for entry in sorted(path.iterdir(), key=lambda p: p.name == "recipe.json"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in ("run.lock", "run.pid"):
            entry.unlink()


def _keep_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    text = json.dumps(recipe, indent=1) + "\n"
    if not (path / "recipe.json").exists():
        _write_whole(path / "recipe.json", text)
        return
    differing = _first_difference(read_recipe(path), json.loads(text), "")
    if differing:
        raise RunDirError(f"{path}: made with another recipe: {differing}; want the same, another folder, or --clean")


def _first_difference(old: object, new: object, name: str) -> str:
    """`ppo.lr was 0.0001, is 0.0002`, or nothing. A list counts as one value."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return "" if old == new else f"{name.removeprefix('.')} was {_shown(old)}, is {_shown(new)}"
    a, b = cast(dict[str, Any], old), cast(dict[str, Any], new)
    differences = (_first_difference(a.get(k, _ABSENT), b.get(k, _ABSENT), f"{name}.{k}") for k in {**a, **b})
    return next((d for d in differences if d), "")


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)[:80]


def _drop_torn_line(file: Path) -> None:
    """A kill may leave half a line: what is appended next must not continue it."""
    if file.exists():
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(file, data.rfind(b"\n") + 1)


def _append_whole(f: FileIO, line: bytes, path: Path) -> None:
    """Unbuffered, so that a line is there or not, and a full disk leaves nothing to fail again at closing."""
    before = f.tell()
    try:
        if f.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as e:
        f.truncate(before)
        f.seek(before)
        raise RunDirError(f"{path}: cannot write metrics: {e.strerror or e}; earlier ones are intact") from e


def _write_whole(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text)
        flush(new)
        new.replace(path)
        flush(path.parent)
    except OSError as e:
        new.unlink(missing_ok=True)
        raise RunDirError(f"{path}: cannot write: {e.strerror or e}; what was there is intact") from e


def _read_object(path: Path, missing: str) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise RunDirError(missing or f"{path}: missing") from e
    except (OSError, ValueError) as e:
        raise RunDirError(f"{path}: corrupt: {e}") from e
    if not isinstance(value, dict):
        raise RunDirError(f"{path}: corrupt: {type(value).__name__}, want a JSON object")
    return cast(dict[str, Any], value)
