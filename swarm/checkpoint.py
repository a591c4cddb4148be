# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Models on disk: a Hugging Face folder, written whole or not at all, and checked before it is used.

    config.json   model.safetensors   tokenizer files   checkpoint.json (version, sha256 of the weights)

Any causal language model that transformers itself has; no code from a folder is ever run. Weights are read from
safetensors only, one file or several. Not here: a trainer's state, which is `swarm.states`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import logging

from swarm.folders import CheckpointError, file_sha256, line, read_json, replace, settled, write_json
from swarm.types import CheckpointRef

ADAPTER_CONFIG = "adapter_config.json"
_META = "checkpoint.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_HEADER_LIMIT = 100_000_000
_HEAD = "lm_head.weight"
_OF_THE_LOADER = ("is_local", "local_files_only")


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    version: int,
    weights: Mapping[str, Tensor] | None = None,
) -> CheckpointRef:
    """Writes the model as a folder that transformers loads, replacing what is there.

    `weights`, in the form that `filed` gives, are written in the place of the model's own: those of a policy with
    adapters, merged. Raises CheckpointError if the disk refuses; the folder is then as it was. Raises ValueError
    for a model with adapters without them.
    """
    tensors = filed(model) if weights is None else dict(weights)
    sha = weights_sha256(tensors)

    def write(into: Path) -> None:
        dtype = str(model.dtype).removeprefix("torch.")
        config = json.loads(model.config.to_json_string(use_diff=False))
        write_json(into / "config.json", {**config, "architectures": [type(model).__name__], "dtype": dtype})
        save_file({k: t.contiguous() for k, t in tensors.items()}, into / "model.safetensors", {"format": "pt"})
        if tokenizer is not None:
            _write_tokenizer(tokenizer, into)
        write_json(into / _META, {"version": version, "sha256": sha})

    replace(folder, write)
    return CheckpointRef(folder, sha, version)


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, into: Path) -> None:
    """Its files, without what transformers adds of how it was loaded: equal tokenizers are equal files."""
    tokenizer.save_pretrained(str(into))
    config = read_json(into / "tokenizer_config.json")
    write_json(into / "tokenizer_config.json", {k: v for k, v in config.items() if k not in _OF_THE_LOADER})


def filed(model: PreTrainedModel, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A state dict of the model, its own by default, with the names and shapes that a file has; tensors are shared.

    Some families hold in one tensor what their files have in several, as the experts of a mixture; a tied head is
    not in a file. This is also what vLLM takes. Raises ValueError for names that the plain model has not.
    """
    state = dict(model.state_dict() if weights is None else weights)
    wanted = {n.replace(".base_layer.", ".") for n in model.state_dict() if ".lora_" not in n}
    strange = sorted(state.keys() - wanted)
    if strange:
        raise ValueError(f"checkpoint: {strange[0]} is none of the model's, want the weights of {type(model).__name__}")
    for name, source in _tied(model).items():
        if name in state and source in state and _equal(state[name], state[source]):
            del state[name]
    plain = _canonical(state, tied=bool(model.config.tie_word_embeddings))
    return cast("dict[str, Tensor]", revert_weight_conversion(model, plain))


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


def frozen_ref(folder: Path) -> CheckpointRef:
    """The reference of what a subagent may be served from: a checkpoint, or a LoRA adapter, by its file's sha256.

    Raises CheckpointError as `ref_of` does.
    """
    if not (settled(folder) / ADAPTER_CONFIG).exists():
        return ref_of(folder)
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        raise CheckpointError(f"{folder}: {ADAPTER_CONFIG} without {file.name}, want an adapter in safetensors")
    return CheckpointRef(folder, file_sha256(file))


def load_model(ref: CheckpointRef) -> PreTrainedModel:
    """The model of a reference, on the CPU, in the dtype of its file, in evaluation mode.

    Raises CheckpointError if it is missing, corrupt, of an architecture that transformers has not, pickled, has a
    vocabulary smaller than its tokenizer's, or has other weights than the reference.
    """
    folder = settled(ref.path)
    config, architecture = _read_config(folder)
    tensors = _canonical(_read_weights(folder), tied=bool(config.tie_word_embeddings))
    sha = weights_sha256(tensors)
    if sha != ref.sha256:
        raise CheckpointError(f"{folder}: its weights have sha256 {sha[:12]}, want {ref.sha256[:12]}")
    _check_vocabulary(folder, config)
    _check_layers(folder, config, tensors)
    _check_shapes(folder, config, architecture, tensors)
    if isinstance(config, Qwen3Config) and architecture is Qwen3ForCausalLM:
        return _qwen3(config, tensors)
    return _loaded(folder, config, architecture, tensors)


def weights_sha256(weights: PreTrainedModel | Mapping[str, Tensor]) -> str:
    """sha256 of the names, dtypes, shapes and bytes of all weights in the order of their names.

    The same for a model and its file, however the file is laid out, and for the model's state dict where that has
    the file's names; a head that equals the embedding counts as tied and once.
    """
    state = filed(weights) if isinstance(weights, PreTrainedModel) else weights
    digest = hashlib.sha256()
    for name, tensor in sorted(_canonical(state).items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _canonical(state: Mapping[str, Tensor], *, tied: bool = True) -> dict[str, Tensor]:
    out = {name: t.detach() for name, t in state.items()}
    head = out.get(_HEAD)
    if tied and head is not None and any(_equal(head, t) for name, t in out.items() if name != _HEAD):
        del out[_HEAD]
    return out


def _tied(model: PreTrainedModel) -> Mapping[str, str]:
    """Names of parameters that are others, and which."""
    return model.all_tied_weights_keys


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _read_config(folder: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The configuration, and the class of transformers that it is of. What else a folder may name is not looked at."""
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json, want a checkpoint of a causal language model")
    raw = read_json(folder / "config.json")
    family, named = raw.get("model_type"), raw.get("architectures")
    known = family if isinstance(family, str) and family in CONFIG_MAPPING else None
    config_class: Any = PreTrainedConfig if known is None else CONFIG_MAPPING[known]
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if not isinstance(architecture, type):
        raise CheckpointError(f"{folder}: model_type {family!r}, want one that transformers has a causal model of")
    if named != [architecture.__name__]:
        raise CheckpointError(f"{folder}: architecture {named} of {family!r}, want {architecture.__name__}")
    try:
        config = config_class.from_dict(raw)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as e:
        kind = config_class.__name__.removesuffix("Config")
        raise CheckpointError(f"{folder}: config.json is no {kind} configuration: {line(e)}") from e
    if config.get_text_config() is not config:
        raise CheckpointError(f"{folder}: {architecture.__name__} is of more than text, want a model of text alone")
    return config, architecture


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


def _check_vocabulary(folder: Path, config: PreTrainedConfig) -> None:
    """Special tokens may have ids beyond: Gemma's tokenizer names an image that its text model has no row for."""
    if not (folder / "tokenizer.json").exists():
        return
    raw = read_json(folder / "tokenizer.json")
    vocab: Any = raw.get("model", {}).get("vocab", {})
    ids: list[int] = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += [t["id"] for t in raw.get("added_tokens", []) if not t.get("special", False)]
    tokens = 1 + max(ids, default=-1)
    if tokens > config.vocab_size:
        raise CheckpointError(f"{folder}: tokenizer of {tokens} tokens, want at most the model's {config.vocab_size}")


def _check_layers(folder: Path, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Before anything is built: a foreign config may ask for any number of modules."""
    numbers = (re.search(r"\.(\d+)\.", name) for name in tensors)
    layers = len({found[1] for found in numbers if found})
    if config.num_hidden_layers != layers:
        raise CheckpointError(f"{folder}: weights of {layers} layers, config.json says {config.num_hidden_layers}")


def _check_shapes(
    folder: Path, config: PreTrainedConfig, architecture: type[PreTrainedModel], tensors: dict[str, Tensor]
) -> None:
    """Shapes are compared before any memory is taken for them. A copy of a tied head is dropped from `tensors`."""
    try:
        with torch.device("meta"):
            model = architecture(config)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder}: config.json gives no model: {line(e)}") from e
    for name, source in _tied(model).items():
        if name in tensors and source in tensors and _equal(tensors[name], tensors[source]):
            del tensors[name]
    wanted = {name: t.shape for name, t in filed(model).items()}
    if wanted.keys() != tensors.keys():
        name = sorted(wanted.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"{folder}: {'no' if name in wanted else 'unexpected'} tensor {name}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            seen = tuple(tensors[name].shape)
            raise CheckpointError(f"{folder}: tensor {name} has shape {seen}, want {tuple(shape)}")


def _qwen3(config: Qwen3Config, tensors: dict[str, Tensor]) -> Qwen3ForCausalLM:
    """Takes the tensors as they are, without a copy."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = Qwen3RotaryEmbedding(config)  # holds buffers that no file has
    return model.eval()


def _loaded(
    folder: Path, config: PreTrainedConfig, architecture: type[PreTrainedModel], tensors: dict[str, Tensor]
) -> PreTrainedModel:
    """As transformers loads it, which knows how a family's file becomes its modules and their buffers."""
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()})
    if len(dtypes) != 1:
        raise CheckpointError(f"{folder}: weights of {', '.join(dtypes) or 'no float type'}, want one float type")
    with _no_progress_bar():
        model = architecture.from_pretrained(None, config=config, state_dict=tensors, dtype=getattr(torch, dtypes[0]))
    return model.eval()


@contextmanager
def _no_progress_bar() -> Generator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
