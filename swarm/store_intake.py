"""How a model folder from elsewhere gets into a store: checked, and without pickles and code.

Not here: how it is kept (`swarm.store`).
"""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from swarm.checkpoint import load_model, ref_of
from swarm.folders import CheckpointError, replace, settled, write_json
from swarm.store_card import CARD, README, Origin, fault_of, read_card
from swarm.types import CheckpointRef

_SOURCE_README = "README.source.md"
_TAKEN = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors", "LICENSE*", "NOTICE*"),
    *(README, _SOURCE_README),
)


def left_out(folder: Path) -> list[str]:
    """Names of what `copy` does not take along: pickles, code, folders."""
    cards = _cards(folder)
    return sorted(p.name for p in folder.iterdir() if not (_wanted(p) or p.name in cards or p.name.startswith(".")))


def copy(folder: Path, into: Path) -> CheckpointRef:
    """Copies a model folder, links followed; its README, if it is not a store's, becomes README.source.md.

    Raises CheckpointError, naming `folder`, for what `load_model` would refuse: no weights in safetensors, corrupt
    ones, another architecture than transformers has, shapes or a vocabulary that do not fit.
    """
    ref = ref_of(folder)
    load_model(ref)

    def write(new: Path) -> None:
        for path in folder.iterdir():
            if _wanted(path) and path.name not in _cards(folder):
                shutil.copyfile(path, new / (_SOURCE_README if path.name == README else path.name))
        if not (new / "checkpoint.json").exists():
            write_json(new / "checkpoint.json", {"version": ref.version, "sha256": ref.sha256})

    replace(into, write)
    copied = ref_of(into)
    if copied.sha256 != ref.sha256:
        raise CheckpointError(f"{folder}: changed while it was copied, want a folder that nobody writes to")
    return copied


def origin_of(folder: Path) -> Origin:
    """What its card says, of a folder that a store has published; otherwise the folder.

    Raises CheckpointError where its files are not those of its card.
    """
    if not (settled(folder) / CARD).exists():
        return Origin(os.fspath(folder))
    card = read_card(folder)
    fault = fault_of(folder, card, thorough=True)
    if fault:
        raise CheckpointError(f"{folder}: {fault}")
    return card.origin


def _wanted(path: Path) -> bool:
    return path.is_file() and any(fnmatch(path.name, pattern) for pattern in _TAKEN)


def _cards(folder: Path) -> tuple[str, ...]:
    """The cards of a folder that a store has published: they are written anew."""
    return (CARD, README) if (folder / CARD).exists() else ()
