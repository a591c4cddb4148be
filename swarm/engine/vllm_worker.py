# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a vLLM worker can do besides: named to vLLM as its worker extension, in this process or in a server's.

The CPU backend packs matrices into handlers of its own and drops the parameter. So a checksum of the parameters
would say nothing of what is served: a packed matrix is told by what it makes of a fixed input.
Imports no vllm: vLLM imports it.
"""

from __future__ import annotations

import hashlib
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

    def swarm_served(self) -> dict[str, str]:
        """sha256 by name: of a parameter's bytes, of a packed matrix what it makes of a fixed input."""
        model = self.model_runner.get_model()
        found = {name: _sha(p) for name, p in model.named_parameters() if p.numel() > 0}
        names = {id(m): name for name, m in model.named_modules()}
        return found | {f"{names[id(m)]}()": _sha(_answer(m)) for m in self._packed()}

    def _packed(self) -> list[Any]:
        model: nn.Module = self.model_runner.get_model()
        return [m for m in model.modules() if hasattr(m, "cpu_linear")]


def _answer(module: Any) -> Tensor:
    weight: Tensor = module.weight
    width = weight.shape[1] if weight.numel() > 0 else int(module.input_size_per_partition)
    x = torch.randn(_PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return module.cpu_linear(x, weight, None)


def _sha(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
