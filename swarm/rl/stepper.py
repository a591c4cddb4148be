# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""One network's optimizer: gradients summed over processes, clipped, applied or skipped.

Every loss is already divided by the global count, so gradients are added, over micro-batches and over
processes alike, and no average is taken anywhere. That is why the network is not wrapped for data-parallel
training: processes may have different numbers of micro-batches, and meet once a step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from swarm.rl.processes import backward, total
from swarm.rl.schedule import LrSchedule


class Stepper:
    """AdamW over a network's trainable parameters, with its schedule and its count of steps.

    `stepper.backward(loss)` for each micro-batch, then `stepper.step()`.
    """

    def __init__(
        self,
        network: nn.Module,
        schedule: LrSchedule,
        accelerator: Accelerator,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        clip: float = 1.0,
    ) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=schedule.peak, betas=betas, fused=True)
        self.schedule, self.accelerator, self.clip = schedule, accelerator, clip
        self.steps = self.skipped = 0
        self._finite = True

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

        Where a loss or a gradient of any process is not finite, nothing is changed but `skipped`.
        """
        self._reduce()
        norm = float(clip_grad_norm_(self.parameters, self.clip))
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self.optimizer.step()
        self.steps += finite
        self.skipped += not finite
        self.optimizer.zero_grad()
        self._finite = True
        return norm

    def _reduce(self) -> None:
        first = self.parameters[0]
        if first.grad is None:
            first.grad = torch.zeros_like(first)
        if not self._finite:
            # A loss can be infinite with finite gradients; every process must hear of it.
            first.grad.fill_(math.nan)
        if self.accelerator.num_processes == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = total(self.accelerator, torch.cat([g.flatten() for g in grads]))
        for p, g in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = g.view_as(p)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.skipped = state["steps"], state["skipped"]
