"""Models on disk: a Hugging Face folder, written whole or not at all, and checked before it is used.

    config.json   model.safetensors   tokenizer files   checkpoint.json (version, sha256 of the weights)

Weights are read from safetensors only, one file or several. Not here: a trainer's state, which is `swarm.states`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from swarm.folders import CheckpointError, line, read_json, replace, settled, write_json
from swarm.types import CheckpointRef

ARCHITECTURE = "Qwen3ForCausalLM"
_META = "checkpoint.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_HEADER_LIMIT = 100_000_000
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast | None, folder: Path, version: int
) -> CheckpointRef:
    """Writes the model as a folder that transformers loads, replacing what is there.

    Raises CheckpointError if the disk refuses; the folder is then as it was.
    """
    tensors = _canonical(model.state_dict(), tied=bool(model.config.tie_word_embeddings))
    sha = weights_sha256(tensors)

    def write(into: Path) -> None:
        dtype = str(model.dtype).removeprefix("torch.")
        config = json.loads(model.config.to_json_string(use_diff=False))
        write_json(into / "config.json", {**config, "architectures": [ARCHITECTURE], "dtype": dtype})
        save_file({k: t.contiguous() for k, t in tensors.items()}, into / "model.safetensors", {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(str(into))  # pyright: ignore[reportUnknownMemberType]
        write_json(into / _META, {"version": version, "sha256": sha})

    replace(folder, write)
    return CheckpointRef(folder, sha, version)


def ref_of(folder: Path) -> CheckpointRef:
    """The reference of a model folder: its weights' sha256 computed, its version 0 if it does not say.

    Raises CheckpointError if the folder is no checkpoint, or is not what was saved.
    """
    sha = weights_sha256(_read_weights(settled(folder)))
    meta = read_json(folder / _META) if (folder / _META).exists() else {}
    saved, version = meta.get("sha256", sha), meta.get("version", 0)
    if saved != sha:
        raise CheckpointError(f"{folder}: corrupt, its weights have sha256 {sha[:12]}, want {str(saved)[:12]} as saved")
    if not isinstance(version, int):
        raise CheckpointError(f"{folder}: {_META} has version {version!r}, want a whole number")
    return CheckpointRef(folder, sha, version)


def load_model(ref: CheckpointRef) -> Qwen3ForCausalLM:
    """The model of a reference, on the CPU, in the dtype of its file, in evaluation mode.

    Raises CheckpointError if it is missing, corrupt, of another architecture, pickled, has a vocabulary
    smaller than its tokenizer's, or has other weights than the reference.
    """
    folder = settled(ref.path)
    config = _read_config(folder)
    tensors = _canonical(_read_weights(folder), tied=bool(config.tie_word_embeddings))
    sha = weights_sha256(tensors)
    if sha != ref.sha256:
        raise CheckpointError(f"{folder}: its weights have sha256 {sha[:12]}, want {ref.sha256[:12]}")
    _check_vocabulary(folder, config)
    return _build(folder, config, tensors)


def weights_sha256(weights: torch.nn.Module | Mapping[str, Tensor]) -> str:
    """sha256 of the names, dtypes, shapes and bytes of all weights in the order of their names.

    The same for a model, its state dict and its file, however the file is laid out; a head
    that equals the embedding counts as tied and once.
    """
    state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    digest = hashlib.sha256()
    for name, tensor in sorted(_canonical(state).items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _canonical(state: Mapping[str, Tensor], *, tied: bool = True) -> dict[str, Tensor]:
    out = {name: t.detach() for name, t in state.items()}
    head, embedding = out.get(_HEAD), out.get(_EMBEDDING)
    if tied and head is not None and embedding is not None and _equal(head, embedding):
        del out[_HEAD]
    return out


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _read_config(folder: Path) -> Qwen3Config:
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json, want a {ARCHITECTURE} checkpoint")
    raw = read_json(folder / "config.json")
    if raw.get("architectures") != [ARCHITECTURE]:
        raise CheckpointError(f"{folder}: architecture {raw.get('architectures')}, want {ARCHITECTURE}")
    try:
        return Qwen3Config.from_dict(raw)  # pyright: ignore[reportUnknownMemberType]
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise CheckpointError(f"{folder}: config.json is no Qwen3 configuration: {line(e)}") from e


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
        seen = f"only pickled weights ({pickles[0]}), which are never loaded" if pickles else "no weights"
        raise CheckpointError(f"{folder}: {seen}, want model.safetensors")
    return {name: t for file in files for name, t in read_tensors(file).items()}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, on the CPU. Raises CheckpointError if it is missing or corrupt.

    The header's length is checked first: the header is read into memory before anything else is known.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            header = int.from_bytes(f.read(8), "little")
        if size < 8 or header > min(size - 8, _HEADER_LIMIT):
            limit = max(0, min(size - 8, _HEADER_LIMIT))
            raise CheckpointError(f"{file}: corrupt, header of {header} bytes, want at most {limit}")
        return {name: t.clone() for name, t in load_file(file).items()}  # not a view of the file, which may go
    except FileNotFoundError as e:
        raise CheckpointError(f"{file}: missing") from e
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: corrupt: {line(e)}") from e


def _check_vocabulary(folder: Path, config: Qwen3Config) -> None:
    if not (folder / "tokenizer.json").exists():
        return
    raw = read_json(folder / "tokenizer.json")
    ids = [*raw.get("model", {}).get("vocab", {}).values(), *(t["id"] for t in raw.get("added_tokens", []))]
    tokens = 1 + max(ids, default=-1)
    if tokens > config.vocab_size:
        raise CheckpointError(f"{folder}: tokenizer of {tokens} tokens, want at most the model's {config.vocab_size}")


def _build(folder: Path, config: Qwen3Config, tensors: dict[str, Tensor]) -> Qwen3ForCausalLM:
    """Shapes are compared before any memory is taken for them: a foreign config may ask for anything."""
    layers = sum(name.endswith("input_layernorm.weight") for name in tensors)
    if config.num_hidden_layers != layers:
        raise CheckpointError(f"{folder}: weights of {layers} layers, config.json says {config.num_hidden_layers}")
    try:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder}: config.json gives no model: {line(e)}") from e
    wanted = {name: t.shape for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted[_HEAD]
    if wanted.keys() != tensors.keys():
        name = sorted(wanted.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"{folder}: {'no' if name in wanted else 'unexpected'} tensor {name}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            seen = tuple(tensors[name].shape)
            raise CheckpointError(f"{folder}: tensor {name} has shape {seen}, want {tuple(shape)}")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = Qwen3RotaryEmbedding(config)  # holds buffers that no file has
    return model.eval()
