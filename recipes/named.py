"""Checkpoints by what people write for them: a folder, a name in the store, or the name of one that ships.

    resolve("runs/x/policy")     resolve("wide_search/best")     resolve("sloppy-1m")

Not here: the store itself (`swarm.store`).
"""

from __future__ import annotations

from pathlib import Path

from recipes.config import SHIPPED
from swarm import store


def resolve(text: str, root: Path = store.STORE) -> Path:
    """The folder of a checkpoint, for every option that takes one.

    A name in the store is meant before one that ships. A run has the whole path of what it began with: where that was
    one that ships and is no longer there, for the run came from elsewhere, it is the one that ships here. Raises
    CheckpointError where it is none of these, or damaged in the store.
    """
    shipped = _shipped(text)
    if shipped is None or Path(text).is_dir() or any(text in entry.names for entry in store.Store(root).entries()):
        return store.resolve(text, root)
    return shipped


def _shipped(text: str) -> Path | None:
    folder = SHIPPED.parent / Path(text).name
    meant = len(Path(text).parts) == 1 or Path(text).parts[-3:-1] == SHIPPED.parts[-3:-1]
    return folder if meant and (folder / "config.json").is_file() else None
