# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What of a policy is trained: everything, LoRA adapters beside its matrices, or its last layers.

    all           every parameter
    lora          W + (alpha / rank) B A for linear layers, A and B trained, all else frozen (arXiv 2106.09685)
    last_layers   the last layers and the norm after them

The policy stays the module that it was; a serving engine and a checkpoint get plain weights with the adapters
merged in, made anew and never in place. The only file that imports peft. Not here: optimizers, files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.checks import want
from swarm.rl.head import layers_of
from swarm.seeds import derive

_want = partial(want, "adapt")

Kind = Literal["all", "lora", "last_layers"]
_NAME = "default"


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """`AdaptConfig("lora", rank=16, alpha=32)`, `AdaptConfig("last_layers", layers=2)`; everything by default.

    `targets`: names of linear layers that get adapters, as `("q_proj", "v_proj")`; none means all those of the
    decoder layers. `layers`: how many are trained from the end. The fields of another kind are refused.
    """

    kind: Kind = "all"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    layers: int = 1

    def __post_init__(self) -> None:
        _want("kind", self.kind, self.kind in ("all", "lora", "last_layers"), "'all', 'lora' or 'last_layers'")
        for name, x in (("rank", self.rank), ("layers", self.layers)):
            _want(name, x, x >= 1, "at least 1")
        _want("alpha", self.alpha, 0 < self.alpha < math.inf, "a finite number above 0")
        _want("targets", self.targets, len(set(self.targets)) == len(self.targets), "each name once")
        plain = {"rank": 8, "alpha": 16.0, "targets": (), "layers": 1}
        own = {"all": (), "lora": ("rank", "alpha", "targets"), "last_layers": ("layers",)}[self.kind]
        for name, x in (("rank", self.rank), ("alpha", self.alpha), ("targets", self.targets), ("layers", self.layers)):
            _want(name, x, name in own or x == plain[name], f"{plain[name]!r} with kind = {self.kind!r}")


def adapt(policy: PreTrainedModel, config: AdaptConfig, seed: int) -> None:
    """Freezes what is not trained and adds what is, in place; the policy says what it said before.

    The adapters' first weights depend on `seed` alone. Raises ValueError for a policy of which something is frozen
    already, a target that no linear layer of it has, and more layers than it has.
    """
    if config.kind == "all":
        return
    if adapted(policy):
        raise ValueError("adapt: some parameters of the policy are frozen already, want one that is trained as a whole")
    if config.kind == "lora":
        _add_adapters(policy, config, seed)
    else:
        _train_last(policy, config.layers)


def adapted(policy: nn.Module) -> bool:
    """Whether a part of it is frozen."""
    return not all(p.requires_grad for p in policy.parameters())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by their plain names; where there is an adapter, W + (alpha / rank) B A, differentiable in both.

    Without adapters they are the module's own, not copied; a tied head is there under one name.
    """
    return _merged(model, dict(model.named_parameters()))


@torch.no_grad()
def merged_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain model that says what the policy says: for an engine to serve, and for `save`.

    What has no adapter is shared with the policy, so copy before the next step; the policy is not touched.
    """
    return {name: x.detach() for name, x in _merged(policy, dict(policy.state_dict())).items()}


def trained_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, or of a network with frozen parameters only those that are trained; tensors are shared."""
    if not adapted(network):
        return network.state_dict()
    return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}


def load_trained(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Takes what `trained_state` gave. Raises ValueError, with nothing changed, where names or shapes differ."""
    if not adapted(network):
        network.load_state_dict(dict(state))
        return
    own = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for name in sorted(own.keys() | state.keys()):
        seen = tuple(state[name].shape) if name in state else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if seen != wanted:
            raise ValueError(f"adapt: the state has {seen} for {name}, want {wanted}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


def frozen_weights(network: nn.Module) -> dict[str, Tensor]:
    """What the trained part was trained beside: equal as long as nothing but that is trained."""
    return {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}


# --- LoRA ---------------------------------------------------------------------------------


def _add_adapters(policy: PreTrainedModel, config: AdaptConfig, seed: int) -> None:
    targets = _targets(policy, config.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "adapters"))
        # peft declares whole numbers, and divides.
        alpha: Any = config.alpha
        lora = LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
        inject_adapter_in_model(lora, policy, _NAME)
    for p in policy.parameters():
        if p.requires_grad:
            p.data = p.data.float()  # steps of a small rate are lost in bf16
    policy.eval()


def _targets(policy: PreTrainedModel, names: tuple[str, ...]) -> list[str]:
    """Full names of the linear layers that get an adapter."""
    where, _ = layers_of(policy)
    linear = [n for n, m in policy.named_modules() if isinstance(m, nn.Linear) and f".{where}." in f".{n}"]
    for name in names:
        if not any(n.endswith(f".{name}") for n in linear):
            have = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in linear}))
            raise ValueError(f"adapt: targets has {name!r}, want linear layers of {type(policy).__name__}: {have}")
    chosen = [n for n in linear if not names or any(n.endswith(f".{name}") for name in names)]
    if not chosen:
        raise ValueError(f"adapt: {type(policy).__name__} has no linear layers, want some for kind = 'lora'")
    return chosen


def _merged(model: nn.Module, named: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(".lora_A." in name for name in named):
        return named
    out = {name.replace(".base_layer.", "."): x for name, x in named.items() if ".lora_" not in name}
    for name, layer in _adapters(model):
        a_rM, b_Fr = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        w_FM = out[f"{name}.weight"]
        out[f"{name}.weight"] = w_FM + (b_Fr @ a_rM * layer.scaling[_NAME]).to(w_FM.dtype)
    return out


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


# --- last layers --------------------------------------------------------------------------


def _train_last(policy: PreTrainedModel, count: int) -> None:
    where, layers = layers_of(policy)
    if count > len(layers):
        raise ValueError(f"adapt: layers = {count}, want at most the {len(layers)} of the policy")
    parts = list(policy.base_model.named_children())
    after = [m for _, m in parts[[n for n, _ in parts].index(where) + 1 :]]
    policy.requires_grad_(False)
    for module in (*layers[-count:], *after):
        module.requires_grad_(True)
