# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which optimizer moves which parameter: AdamW for all, or Muon for hidden matrices and AdamW for the rest.

Not here: learning rates over time, clipping, processes (`swarm.rl.stepper`).
Axes: R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from swarm.checks import want

_want = partial(want, "optimizer")

Kind = Literal["adamw", "muon"]
NewtonSchulz = Literal["jordan", "two_phase"]
Named = Sequence[tuple[str, nn.Parameter]]

_FAST, _EXACT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
_COEFFICIENTS = {"jordan": (_FAST,) * 5, "two_phase": (_FAST,) * 8 + (_EXACT,) * 2}
_ADAMW_RMS = 0.2


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """`OptimizerConfig("muon", weight_decay=0.01)`. The learning rate is the schedule's, and suits either kind.

    `betas` and `eps` are AdamW's, `momentum`, `nesterov` and `newton_schulz` are Muon's. `weight_decay` spares
    what has one dimension. `max_grad_norm` clips the gradient of all parameters together.
    `reset_moments`: whether the moments are forgotten whenever new weights go to the sampler.
    """

    kind: Kind = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz: NewtonSchulz = "jordan"
    reset_moments: bool = False

    def __post_init__(self) -> None:
        _want("kind", self.kind, self.kind in ("adamw", "muon"), "'adamw' or 'muon'")
        _want("betas", self.betas, all(0 <= b < 1 for b in self.betas), "each from 0 to below 1")
        _want("eps", self.eps, 0 < self.eps < math.inf, "a finite number above 0")
        _want("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "a finite number of at least 0")
        _want("max_grad_norm", self.max_grad_norm, 0 < self.max_grad_norm < math.inf, "a finite number above 0")
        _want("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1")
        _want("newton_schulz", self.newton_schulz, self.newton_schulz in _COEFFICIENTS, "'jordan' or 'two_phase'")


def trainable(network: nn.Module | Named) -> list[tuple[str, nn.Parameter]]:
    """The parameters that want a gradient, with their names; a tied one is there once.

    Several networks are one `nn.ModuleDict`, or a list of names and parameters. Raises ValueError where a name
    or a parameter comes twice in such a list, or nothing is trainable.
    """
    given = list(network.named_parameters()) if isinstance(network, nn.Module) else list(network)
    named = [(name, p) for name, p in given if p.requires_grad]
    if not named:
        raise ValueError(f"optimizer: none of {len(given)} parameters is trainable, want at least one")
    names: set[str] = set()
    ids: set[int] = set()
    for name, p in named:
        if name in names or id(p) in ids:
            raise ValueError(f"optimizer: parameter {name} is given twice, want each name and parameter once")
        names.add(name)
        ids.add(id(p))
    return named


def for_muon(name: str, parameter: Tensor) -> bool:
    """Whether it is a hidden matrix: two dimensions, neither of 1, and neither an embedding nor a head by its name.

    What Muon's author leaves to AdamW: kellerjordan.github.io/posts/muon.
    """
    edge = any(part.startswith("embed") or part.endswith("head") for part in name.split("."))
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not edge


def build(named: Named, config: OptimizerConfig, lr: float) -> list[torch.optim.Optimizer]:
    """The optimizers that share out the parameters, each in exactly one of their groups."""
    hidden = [(n, p) for n, p in named if config.kind == "muon" and for_muon(n, p)]
    taken = {n for n, _ in hidden}
    rest = [(n, p) for n, p in named if n not in taken]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        muon = Muon(hidden, lr, config.momentum, config.nesterov, config.newton_schulz, config.weight_decay)
        optimizers.append(muon)
    if rest:
        optimizers.append(_adamw(rest, config, lr))
    return optimizers


def _adamw(named: Named, config: OptimizerConfig, lr: float) -> torch.optim.AdamW:
    decayed = {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": config.weight_decay}
    spared = {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [g for g in (decayed, spared) if g["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, in steps as large as AdamW's: `Muon(network.named_parameters(), lr=2e-4)`.

        B ← μB + G;  U = orthogonal(G + μB), or of B without Nesterov
        W ← (1 − lr·decay)·W − lr·0.2·√max(R, C)·U

    An orthogonal R×C matrix has RMS 1/√max(R, C), so that U's step has the RMS 0.2 which AdamW's has in
    practice, and one learning rate suits both. Sources: Muon (kellerjordan.github.io/posts/muon); scale and
    decay, Moonlight, arXiv 2502.16982, section 2.2. The momentum is kept in float32 whatever the weights are
    in, and never changed by the orthogonalisation. Raises ValueError for what is not a matrix.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz: NewtonSchulz = "jordan",
        weight_decay: float = 0.0,
    ) -> None:
        named = list(named)
        for name, p in named:
            if p.ndim != 2:
                raise ValueError(f"optimizer: muon got {name} of shape {tuple(p.shape)}, want 2 dimensions")
        self.momentum, self.nesterov = momentum, nesterov
        self.newton_schulz: NewtonSchulz = newton_schulz
        super().__init__([p for _, p in named], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step on every parameter that has a gradient."""
        for group in self.param_groups:
            lr = float(group["lr"])
            for p in group["params"]:
                if p.grad is not None:
                    update_RC = orthogonal(self._direction(p, p.grad), self.newton_schulz)
                    p.mul_(1.0 - lr * group["weight_decay"])
                    p.add_(update_RC.to(p.dtype), alpha=-lr * _ADAMW_RMS * math.sqrt(max(p.shape)))

    def _direction(self, p: Tensor, grad_RC: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=_at_least_fp32(p))
        buffer_RC: Tensor = state["momentum"]
        grad_RC = grad_RC.to(buffer_RC.dtype)
        buffer_RC.mul_(self.momentum).add_(grad_RC)
        return grad_RC + self.momentum * buffer_RC if self.nesterov else buffer_RC


def orthogonal(x_RC: Tensor, scheme: NewtonSchulz = "jordan") -> Tensor:
    """About UVᵀ of x = USVᵀ, [R, C], by Newton–Schulz: X ← aX + (bA + cA²)X, A = XXᵀ, from X = x/‖x‖.

    "jordan": five steps with (3.4445, −4.7750, 2.0315), which leave singular values in about 0.7 to 1.2 and
    lower where x has tiny ones. "two_phase": eight of them, then two with (2, −1.5, 0.5), which bring all to 1
    (DeepSeek-V4, section 2.4). Runs in float32 or better; `x_RC` is not changed; zeros stay zeros.
    """
    tall = x_RC.shape[0] > x_RC.shape[1]
    x = (x_RC.mT if tall else x_RC).to(_at_least_fp32(x_RC))
    x = x / x.norm().clamp(min=1e-7)
    for a, b, c in _COEFFICIENTS[scheme]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
