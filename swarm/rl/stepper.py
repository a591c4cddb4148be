# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The steps of what is trained together: gradients summed over processes, clipped, applied or skipped.

Every loss is already divided by the global count, so gradients are added, over micro-batches and over
processes alike, and no average is taken anywhere. That is why the network is not wrapped for data-parallel
training: processes may have different numbers of micro-batches, and meet once a step.
Not here: which optimizer moves which parameter (`swarm.rl.optim`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from swarm.rl.optim import Named, OptimizerConfig, build, trainable
from swarm.rl.processes import backward, total
from swarm.rl.schedule import LrSchedule


class Stepper:
    """The optimizers of a network's trainable parameters, with their schedule and their count of steps.

    `stepper.backward(loss)` for each micro-batch, then `stepper.step()`. `network` may be several, as an
    `nn.ModuleDict` or as a list of names and parameters: a trunk and the value head on it step as one.
    """

    def __init__(
        self,
        network: nn.Module | Named,
        schedule: LrSchedule,
        accelerator: Accelerator,
        config: OptimizerConfig | None = None,
        *,
        weight_decay: float | None = None,
        clip: float | None = None,
    ) -> None:
        config = config or OptimizerConfig()
        if weight_decay is not None:
            config = replace(config, weight_decay=weight_decay)
        if clip is not None:
            config = replace(config, max_grad_norm=clip)
        self.named = trainable(network)
        self.parameters = [p for _, p in self.named]
        self.optimizers = build(self.named, config, schedule.peak)
        owner = {id(p): o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        self._owners = [owner[id(p)] for p in self.parameters]
        self.schedule, self.accelerator, self.config = schedule, accelerator, config
        self.steps = self.skipped = 0
        self._finite = True

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first of the optimizers, which is the only one unless there are hidden matrices for Muon."""
        return self.optimizers[0]

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self.schedule.at(self.steps)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this micro-batch's share of the loss."""
        self._finite = self._finite and math.isfinite(float(loss.detach()))
        backward(self.accelerator, loss)

    def step(self) -> float:
        """Applies the gradients and forgets them; returns their norm before clipping.

        A parameter that no process has a gradient for is left as it is. Where a loss or a gradient of any
        process is not finite, nothing is changed but `skipped`.
        """
        norm = math.nan
        if self._reduce():
            norm = float(clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        finite = math.isfinite(norm)
        for optimizer in self.optimizers:
            if finite:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr
                optimizer.step()
            optimizer.zero_grad()
        self.steps += finite
        self.skipped += not finite
        self._finite = True
        return norm

    def _reduce(self) -> bool:
        """Sums the gradients over processes; whether all losses, here and there, were finite.

        A loss can be infinite with finite gradients, so each process says so beside its gradients, and
        beside them which parameters it has a gradient for at all.
        """
        if self.accelerator.num_processes == 1:
            return self._finite
        here = self.parameters[0]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flags = [float(not self._finite), *(float(p.grad is not None) for p in self.parameters)]
        flat = total(self.accelerator, torch.cat([here.new_tensor(flags), *(g.flatten() for g in grads)]))
        failed, *has_grad = flat[: len(flags)].tolist()
        summed = flat[len(flags) :].split([p.numel() for p in self.parameters])
        for p, g, has in zip(self.parameters, summed, has_grad, strict=True):
            p.grad = g.view_as(p).to(p.dtype) if has else None
        return failed == 0

    def reset_moments(self) -> None:
        """Forgets what the optimizers remember of earlier gradients; the count of steps, and so the rate, goes on."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """The moments by parameter and the counts; tensors are shared, so save before the next step."""
        owned = zip(self.named, self._owners, strict=True)
        return {
            "kind": self.config.kind,
            "shapes": self._shapes(),
            "moments": {name: dict(o.state[p]) for (name, p), o in owned if p in o.state},
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where `state_dict` was taken.

        Raises ValueError, with nothing changed, for the state of another kind of optimizer or network. Rates,
        decay and the like are not in the state: they are the configuration's.
        """
        self._check(state)
        self.reset_moments()
        for (name, p), optimizer in zip(self.named, self._owners, strict=True):
            if name in state["moments"]:
                kept = state["moments"][name]
                optimizer.state[p] = {key: x.detach().to(p.device, copy=True) for key, x in kept.items()}
        self.steps, self.skipped = state["steps"], state["skipped"]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.named}

    def _check(self, state: Mapping[str, Any]) -> None:
        for field in ("kind", "shapes", "moments", "steps", "skipped"):
            _want(field in state, f"no field {field!r}", "what state_dict gives")
        _want(state["kind"] == self.config.kind, f"kind = {state['kind']!r}", repr(self.config.kind))
        shapes, seen = self._shapes(), {name: tuple(shape) for name, shape in state["shapes"].items()}
        for name in (*seen, *shapes):
            have, want = seen.get(name, "missing"), shapes.get(name, "no such parameter")
            _want(have == want, f"{name} {have}", f"{want}")
        for name, kept in state["moments"].items():
            for key, x in kept.items():
                want = () if key == "step" else shapes.get(name, "no such parameter")
                _want(tuple(x.shape) == want, f"{key} of {name} {tuple(x.shape)}", f"{want}")


def _want(right: bool, seen: str, wanted: str) -> None:
    if not right:
        raise ValueError(f"optimizer state: {seen}, want {wanted}")
