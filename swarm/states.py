"""A trainer's state on disk: one folder a step, written whole or not at all, the newest few kept.

    states/step_000120/   tensors.safetensors   state.json   manifest.json (sha256 of both)

Not here: what the state consists of, and when it is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from swarm.checkpoint import read_tensors
from swarm.folders import CheckpointError, discard, file_sha256, read_json, replace, settled, visible, write_json

_STATE = ("tensors.safetensors", "state.json")
_MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


def save_state(folder: Path, state: Mapping[str, Any], *, keep: int = 2) -> None:
    """Writes a trainer's state as one folder, and drops all but the newest `keep` of its siblings.

    The folder's name ends in its step: `states/step_000120`. `state` nests dicts, lists and tuples of
    tensors, numbers, texts and None. Raises CheckpointError if the disk refuses, the states that were
    there being untouched then, and TypeError for anything else in `state`.
    """
    _step(folder)
    if keep < 1:
        raise ValueError(f"keep = {keep}, want at least 1")

    tensors: dict[str, Tensor] = {}
    plain = _pack(dict(state), "", tensors)

    def write(into: Path) -> None:
        save_file({k: t.detach().contiguous().clone() for k, t in tensors.items()}, into / _STATE[0])
        write_json(into / _STATE[1], {"state": plain})
        write_json(into / _MANIFEST, {name: file_sha256(into / name) for name in _STATE})

    replace(folder, write)
    for old in _states(folder.parent)[keep:]:
        discard(old)


def load_state(folder: Path) -> dict[str, Any]:
    """What `save_state` was given, tensors on the CPU.

    Raises CheckpointError if the folder is missing, incomplete or damaged.
    """
    manifest = read_json(settled(folder) / _MANIFEST)
    for name in _STATE:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder}: {name} is missing")
        if manifest.get(name) != file_sha256(folder / name):
            raise CheckpointError(f"{folder}: {name} is damaged, its sha256 is not the one in {_MANIFEST}")
    return _unpack(read_json(folder / _STATE[1])["state"], read_tensors(folder / _STATE[0]))


def latest(root: Path) -> Path | None:
    """The newest whole state under `root`, or None. Each damaged one on the way is logged as a warning."""
    for folder in _states(root):
        try:
            load_state(folder)
        except CheckpointError as e:
            log.warning("skipped a checkpoint: %s", e)
        else:
            return folder
    return None


def _states(root: Path) -> list[Path]:
    """Newest first; half-written folders begin with a dot."""
    if not root.is_dir():
        return []
    folders = {visible(p) for p in root.iterdir() if p.is_dir() and not p.name.endswith(".new")}
    return sorted((p for p in folders if p.name[-1].isdigit()), key=_step, reverse=True)


def _step(folder: Path) -> int:
    digits = folder.name[len(folder.name.rstrip("0123456789")) :]
    if not digits:
        raise ValueError(f"{folder}: want a name that ends in the step, such as step_000120")
    return int(digits)


def _pack(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """JSON that keeps what JSON has not: tensors (filed in `tensors`), tuples, and keys that are no texts."""
    match value:
        case Tensor():
            name = f"{len(tensors)}{path}"
            tensors[name] = value
            return {"tensor": name}
        case dict():
            items = cast(dict[object, object], value).items()
            return {"dict": [[_scalar(k, path), _pack(v, f"{path}.{k}", tensors)] for k, v in items]}
        case list() | tuple():
            elements = [_pack(v, f"{path}.{i}", tensors) for i, v in enumerate(cast(Iterable[object], value))]
            return {"tuple": elements} if isinstance(value, tuple) else elements
        case _:
            return _scalar(value, path)


def _scalar(value: object, path: str) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"state{path}: {type(value).__name__}, want tensors, numbers, texts, None, dicts, lists and tuples")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {k: _unpack(v, tensors) for k, v in items}
        case {"tuple": elements}:
            return tuple(_unpack(v, tensors) for v in elements)
        case list():
            return [_unpack(v, tensors) for v in cast(list[Any], value)]
        case _:
            return value
