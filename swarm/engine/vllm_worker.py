# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a vLLM worker can do besides: named to vLLM as its worker extension, in this process or in a server's.

The CPU backend packs matrices into handlers of its own and drops the parameter. So a checksum of the parameters
would say nothing of what is served: a packed matrix is told by what it makes of a fixed input.
Imports no vllm: vLLM imports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EXTENSION = "swarm.engine.vllm_worker.Worker"
_PROBE_ROWS = 2


class Worker:
    """Becomes a base of vLLM's worker class: `collective_rpc("swarm_pack")`."""

    model_runner: Any

    def swarm_pack(self) -> int:
        """Packs again what a reload may have left as it was, which is the head when it is the embedding; how many."""
        modules = [m for m in self._packed() if m.weight.numel() > 0]
        for module in modules:
            module.quant_method.process_weights_after_loading(module)
        return len(modules)

    def swarm_clear(self) -> int:
        """Zeroes all keys and values; how many tensors. The CPU's attention reads whole blocks and masks what is not
        there, which 0 times a NaN is not: what broken weights computed would break what right ones do after them."""
        tensors: list[Tensor] = self.model_runner.kv_caches
        for tensor in tensors:
            tensor.zero_()
        return len(tensors)

    def swarm_served(self) -> dict[str, str]:
        """sha256 by name: of a parameter's bytes, of a packed matrix what it makes of a fixed input."""
        model = self.model_runner.get_model()
        found = {name: _sha(p) for name, p in model.named_parameters() if p.numel() > 0}
        names = {id(m): name for name, m in model.named_modules()}
        return found | {f"{names[id(m)]}()": _sha(_answer(m)) for m in self._packed()}

    def swarm_adapter(self, number: int) -> dict[str, str]:
        """sha256 by layer and matrix of what a LoRA adapter has in its slot; empty for one that is in none."""
        slots: list[int | None] = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        if number not in slots:
            return {}
        at, found = slots.index(number), dict[str, str]()
        for name, module in self.model_runner.get_model().named_modules():
            for side in ("lora_a_stacked", "lora_b_stacked"):
                parts: Sequence[Tensor] = getattr(module, side, ())
                # Layers that no adapter reaches have stacks of one slot, which is empty.
                mine = [(k, stack[at]) for k, stack in enumerate(parts) if len(stack) == len(slots)]
                found |= {f"{name}.{side}.{k}": _sha(matrix) for k, matrix in mine}
        return found

    def _packed(self) -> list[Any]:
        model: nn.Module = self.model_runner.get_model()
        return [m for m in model.modules() if hasattr(m, "cpu_linear")]


def digest_of(served: Sequence[Mapping[str, str]]) -> str:
    """One sha256 of what each worker's tensors hash to."""
    lines = [f"{k} {name} {sha}\n" for k, worker in enumerate(served) for name, sha in sorted(worker.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _answer(module: Any) -> Tensor:
    weight: Tensor = module.weight
    width = weight.shape[1] if weight.numel() > 0 else int(module.input_size_per_partition)
    x = torch.randn(_PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return module.cpu_linear(x, weight, None)


def _sha(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
