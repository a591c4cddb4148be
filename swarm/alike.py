"""Whether one engine could serve two checkpoints, told from their files before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from swarm.folders import CheckpointError, file_sha256, read_json

_FIELDS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "tie_word_embeddings"),
)


def check_alike(folder: Path, other: Path) -> None:
    """Raises CheckpointError where the engine of `other` cannot take the weights of `folder`, or would misread its ids.

    Compared are architecture, sizes, vocabulary and tokenizer.
    """
    if (folder / "config.json").resolve() == (other / "config.json").resolve():
        return
    mine, its = read_json(folder / "config.json"), read_json(other / "config.json")
    for name in _FIELDS:
        if mine.get(name) != its.get(name):
            wanted = f"{its.get(name)} as {other} has, whose engine it would be served by"
            raise CheckpointError(f"{folder}: {name} = {mine.get(name)}, want {wanted}")
    if _tokenizer(folder) != _tokenizer(other):
        raise CheckpointError(f"{folder}: another tokenizer.json than {other}, whose engine it would be served by")


def _tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    return file_sha256(path) if path.exists() else ""
