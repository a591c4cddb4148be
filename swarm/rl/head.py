# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
"""How a family of models makes logits of its last hidden state, and where its layers are.

    logits = cap · tanh(s · (h Wᵀ + b) / cap)       without a cap: s · (h Wᵀ + b)

A family that does anything else is refused by `check_head`, which compares with the model's own logits.
Not here: hidden states (`swarm.rl.forward`), losses. Axes: n rows, d hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

_PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Head:
    """`Head(weight_Vd)` for most; Gemma 2 has `softcap=30.0`, Cohere and Granite a scale that is not 1."""

    weight_Vd: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, h_nd: Tensor) -> Tensor:
        """[n, V] in float32, whatever autocast says."""
        with torch.autocast(h_nd.device.type, enabled=False):
            bias_V = None if self.bias_V is None else self.bias_V.float()
            z_nV = F.linear(h_nd.float(), self.weight_Vd.float(), bias_V)
        if self.scale != 1.0:
            z_nV = z_nV * self.scale
        return z_nV if self.softcap is None else torch.tanh(z_nV / self.softcap) * self.softcap

    def detached(self) -> Head:
        bias_V = None if self.bias_V is None else self.bias_V.detach()
        return Head(self.weight_Vd.detach(), bias_V, self.scale, self.softcap)

    def tensors(self) -> tuple[Tensor, ...]:
        """What gradients arrive at: the matrix, and the bias where there is one."""
        return (self.weight_Vd,) if self.bias_V is None else (self.weight_Vd, self.bias_V)

    def with_tensors(self, weight_Vd: Tensor, bias_V: Tensor | None = None) -> Head:
        return Head(weight_Vd, bias_V, self.scale, self.softcap)


def head_of(model: PreTrainedModel) -> Head:
    """The head with the model's own parameters. Raises ValueError for a model without a linear one."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{type(model).__name__}: its head is {type(layer).__name__}, want a causal model's Linear")
    said = vars(model.config)
    scale = float(said.get("logit_scale") or 1.0) / float(said.get("logits_scaling") or 1.0)
    return Head(layer.weight, layer.bias, scale, said.get("final_logit_softcapping"))


def trunk(model: PreTrainedModel, ids_BL: Tensor) -> Tensor:
    """The model's own last hidden states [B, L, d] of rows that begin at position 0, padded at their end if at all.

    No mask: what is causal never sees a later token, and so no padding.
    """
    body: Any = model.base_model
    return body(input_ids=ids_BL, use_cache=False).last_hidden_state


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raises ValueError where the logits are not made of the last hidden state as `Head` says. One short forward."""
    # Tokens with ids far apart, so that no special one decides.
    vocab = int(model.config.vocab_size)
    ids_1L = (torch.arange(1, _PROBE_TOKENS + 1, device=model.device) * (vocab // 7 + 1) % vocab)[None]
    body: Any = model
    wanted_LV = body(input_ids=ids_1L, use_cache=False).logits[0].float()
    off = float((head_of(model).logits(trunk(model, ids_1L)[0]) - wanted_LV).abs().max())
    allowed = (1e-4 if model.dtype == torch.float32 else 0.05) * max(1.0, float(wanted_LV.abs().max()))
    if not off <= allowed:
        made = "matrix, bias, scale and soft cap on the last hidden state"
        raise ValueError(f"{type(model).__name__}: its logits are up to {off:.2g} off those of a {made}, want the same")


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder layers and their name in the model's trunk.

    Raises ValueError where there is no list of as many as the config says.
    """
    count = int(model.config.num_hidden_layers)
    found = [(n, m) for n, m in model.base_model.named_children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__}: {len(found)} lists of {count} layers in its trunk, want one")
    return found[0]
