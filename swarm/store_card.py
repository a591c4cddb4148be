"""The card of a published checkpoint: where it came from, and the sha256 of each of its files, by which it is checked.

    <id>/   config.json  model.safetensors  tokenizer files …  checkpoint.json   +   card.json   README.md

`id` is the sha256 of the files' names and sha256 and of that of the weights, so equal folders have one id and the same
weights with another tokenizer have another. The two cards are not in it. Not here: where folders stand (`swarm.store`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from swarm.folders import CheckpointError, file_sha256, flush, line, read_json
from swarm.types import CheckpointRef

CARD = "card.json"
README = "README.md"
_FORMAT = 1


class Origin(Struct, frozen=True):
    """Where it came from: `Origin("runs/wide_search", 20, recipe, {"eval/item_f1": 0.71})`.

    `source` is the folder of the run, or of the model that was added; the rest is of a run only: the iteration, the
    whole recipe as JSON, and the iteration's scores.
    """

    source: str
    step: int | None = None
    recipe: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    scores: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])


class Filed(Struct, frozen=True):
    """One file of a checkpoint; `size` in bytes."""

    sha256: str
    size: int


class Card(Struct, frozen=True):
    """What card.json says. `weights_sha256` is that of `CheckpointRef`, whatever the files' layout; `published` is in
    seconds since 1970, and the time of change of every file; `sha256` that of the card without it.
    """

    id: str
    weights_sha256: str
    version: int
    architecture: str
    parameters: int
    published: int
    origin: Origin
    files: Mapping[str, Filed]
    format: int = _FORMAT
    sha256: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files.values())


def seal(folder: Path, ref: CheckpointRef, origin: Origin, published: int) -> Card:
    """Writes card.json and README.md into a model folder that is whole, and flushes all of it to the disk.

    Raises CheckpointError for a folder in the folder.
    """
    files = {p.name: p for p in sorted(folder.iterdir()) if p.name not in (CARD, README)}
    for path in files.values():
        if not path.is_file():
            raise CheckpointError(f"{path}: no plain file, want a flat checkpoint folder")
    filed = {name: Filed(file_sha256(p), p.stat().st_size) for name, p in files.items()}
    card = Card(
        id=_identity(filed, ref.sha256),
        weights_sha256=ref.sha256,
        version=ref.version,
        architecture=str(read_json(folder / "config.json").get("architectures", ["?"])[0]),
        parameters=sum(_parameters(p) for name, p in files.items() if name.endswith(".safetensors")),
        published=published,
        origin=origin,
        files=filed,
    )
    card = msgspec.structs.replace(card, sha256=_own_sha256(card))
    (folder / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")
    (folder / README).write_text(readme(card))
    for path in folder.iterdir():
        os.utime(path, (published, published))
        flush(path)
    flush(folder)
    return card


def read_card(folder: Path) -> Card:
    """The card of a folder. Raises CheckpointError where there is none, or it is not as it was written."""
    path = folder / CARD
    try:
        card = msgspec.json.decode(path.read_bytes(), type=Card)
    except FileNotFoundError as e:
        raise CheckpointError(f"{path}: missing") from e
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path}: corrupt: {line(e)}") from e
    if card.format != _FORMAT:
        raise CheckpointError(f"{path}: format {card.format}, want {_FORMAT}")
    if card.sha256 != _own_sha256(card) or card.id != _identity(card.files, card.weights_sha256):
        raise CheckpointError(f"{path}: damaged, it does not have the sha256 that it says")
    return card


def fault_of(folder: Path, card: Card, *, thorough: bool) -> str:
    """What is wrong with the files of a folder, in one line, or "".

    A file with the size and the time that the card says is taken to be right unless `thorough`; any other is hashed.
    """
    for name, filed in card.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        seen = path.stat()
        if seen.st_size != filed.size:
            return f"{name} has {seen.st_size:,} bytes, want {filed.size:,}"
        if (thorough or seen.st_mtime_ns != card.published * 10**9) and file_sha256(path) != filed.sha256:
            return f"{name} is damaged, its sha256 is not the card's"
    known = {*card.files, CARD, README}
    strange = sorted(p.name for p in folder.iterdir() if p.name not in known and not p.name.startswith("."))
    return f"{strange[0]} is not on its card" if strange else ""


def readme(card: Card) -> str:
    """The card for people: Hugging Face's front matter, the origin, the scores, and how to load it."""
    origin = card.origin
    source = " ".join(origin.source.replace("`", "'").split())
    step = "" if origin.step is None else f", iteration {origin.step}"
    scores = [f"| {name} | {score:.4g} |" for name, score in sorted(origin.scores.items())]
    table = ["| score | |", "|---|---|", *scores, ""] if scores else []
    whole = " and the recipe of its run" if origin.recipe else ""
    return "\n".join(
        [
            *("---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""),
            *(f"# {card.architecture} of {card.parameters:,} parameters", "", f"From `{source}`{step}.", ""),
            *table,
            f"- version {card.version}, weights of sha256 `{card.weights_sha256}`",
            f"- `card.json` has the sha256 of every file{whole}",
            *("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""),
            "model = AutoModelForCausalLM.from_pretrained(FOLDER)",
            *("tokenizer = AutoTokenizer.from_pretrained(FOLDER)", "```", ""),
        ]
    )


def finite(scores: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers: `{"eval/item_f1": 0.71}` of a row of metrics."""
    numbers = {k: v for k, v in scores.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if math.isfinite(v)}


def _identity(files: Mapping[str, Filed], weights_sha256: str) -> str:
    lines = [f"{filed.sha256} {name}\n" for name, filed in sorted(files.items())]
    return hashlib.sha256("".join([f"{weights_sha256} weights\n", *lines]).encode()).hexdigest()


def _own_sha256(card: Card) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(card, sha256=""))).hexdigest()


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with file.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
