"""Two LoRA adapters and their base on one vLLM, in a process of its own; prints what was found as a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trio
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from swarm.checkpoint import save
from swarm.engine.probe import log_probabilities
from swarm.engine.vllm import vllm_engines
from swarm.engine.vllm_core import VLLMConfig
from swarm.types import Completion, EngineError, Sampling
from tests.engine_cases import VOCAB, tiny

PROMPT = [k * 7 % VOCAB for k in range(70)]


def model() -> Qwen3ForCausalLM:
    return tiny(1, head_dim=32)


def adapter(folder: Path, seed: int) -> Any:
    """Writes a LoRA adapter with weights of its own, as PEFT does; the model that it makes of the base."""
    adapted = get_peft_model(model(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def off(of: Any, c: Completion) -> float:
    return max(abs(a - b) for a, b in zip(log_probabilities(of, PROMPT, c.ids), c.logprobs, strict=True))


async def found(folder: Path) -> dict[str, Any]:
    save(model(), None, folder / "m", 0)
    models = [model(), *(adapter(folder / name, seed) for seed, name in enumerate("ab"))]
    config = VLLMConfig(max_len=256, cache_bytes=16 << 20, adapter_rank=8)
    out: dict[str, Any] = {}
    async with vllm_engines([folder / "m"], config, 0, [folder / "a", folder / "b"]) as engines:
        out["before"] = [await e.checksum() for e in engines]
        said: dict[int, Completion] = {}

        async def one(k: int) -> None:
            said[k] = await engines[k].generate(PROMPT, Sampling(20, seed=5))

        async with trio.open_nursery() as nursery:
            for k in range(3):
                nursery.start_soon(one, k)
        out["off"] = [[off(m, said[k]) for m in models] for k in range(3)]
        out["after"] = [await e.checksum() for e in engines]
        try:
            await engines[1].update(model().state_dict(), 2)
        except EngineError as e:
            out["update"] = str(e)
    try:
        async with vllm_engines([folder / "m"], config, 0, [folder / "none"]):
            pass
    except EngineError as e:
        out["missing"] = str(e)
    return out


if __name__ == "__main__":
    print(json.dumps(trio.run(found, Path(sys.argv[1]))))
