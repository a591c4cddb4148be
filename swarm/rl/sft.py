# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Supervised steps: weighted cross-entropy on sampled spans, over the rows and the forward that PPO uses.

The recipe holds the data and the order of steps; here is one step. Not here: demonstrations, evaluation.
Axes: S rows, N action tokens, n those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.rl.batch import turns_of
from swarm.rl.forward import chosen, hidden_states, log_policy
from swarm.rl.losses import mean_over
from swarm.rl.optim import OptimizerConfig
from swarm.rl.processes import alone, total
from swarm.rl.rows import Rows, micro_batches, rows_of
from swarm.rl.schedule import LrSchedule
from swarm.rl.stepper import Stepper
from swarm.types import Trace


@dataclass(frozen=True, slots=True)
class SFTConfig:
    """`SFTConfig(LrSchedule(3e-3, warmup=50, total=1600, decay="cosine"))`. `micro_tokens` bounds one forward."""

    lr: LrSchedule = field(default_factory=lambda: LrSchedule(3e-3))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(betas=(0.9, 0.98)))
    micro_tokens: int = 4096
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.micro_tokens < 1:
            raise ValueError(f"sft: micro_tokens = {self.micro_tokens}, want at least 1")


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows to imitate; `weight_N` is what each action token counts for, 0 for one that is shown only."""

    rows: Rows
    weight_N: Tensor


@dataclass(frozen=True, slots=True)
class SFTMetrics:
    """`loss` in nats a token, weighted; `tokens` went through the model, of which `actions` were predicted."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    actions: int


def examples(traces: Sequence[Trace], weight: Callable[[Trace, int], float] = lambda trace, turn: 1.0) -> Examples:
    """One row a segment of every trace, of whatever role; `weight(trace, turn)` weighs a turn, counted from 0."""
    rows = rows_of([s for t in traces for s in t.segments])
    weights: list[float] = []
    for trace in traces:
        turns = turns_of(trace.segments)
        by_turn = [weight(trace, k) for k in range(turns[-1] + 1 if turns else 0)]
        weights.extend(by_turn[k] for k in turns)
    return Examples(rows, torch.tensor(weights, dtype=torch.float32))


def sft_stepper(model: PreTrainedModel, config: SFTConfig, accelerator: Accelerator | None = None) -> Stepper:
    """The optimizer of a supervised run; its `state_dict` is all that a resume needs beside the weights."""
    accelerator = accelerator or alone()
    nn.Module.to(model.eval(), accelerator.device)
    return Stepper(model, config.lr, accelerator, config.optimizer)


def sft_step(
    model: PreTrainedModel, stepper: Stepper, config: SFTConfig, data: Examples, chosen_S: Tensor
) -> SFTMetrics:
    """One optimizer step on the chosen rows: Σ w·(−log π) / Σ w, at temperature 1.

    A step whose weights are all 0 changes nothing. With several processes, each chooses rows of its own.
    """
    batches = micro_batches(data.rows, chosen_S, config.micro_tokens)
    weights = [data.weight_N[m.index_n] for m in batches]
    count = total(stepper.accelerator, torch.stack([w.sum() for w in weights] or [torch.zeros(())]).sum())
    lr, loss_sum, norm = stepper.lr, 0.0, 0.0
    if count > 0:
        for micro, weight_n in zip(batches, weights, strict=True):
            logp_n = chosen(log_policy(model, hidden_states(model, micro, config.bf16)), micro.target_n)
            loss = mean_over(-logp_n * weight_n, count)
            stepper.backward(loss)
            loss_sum += float(loss.detach())
        norm = stepper.step()
    return SFTMetrics(loss_sum, norm, lr, sum(len(m.ids_T) for m in batches), sum(len(m.index_n) for m in batches))


@torch.no_grad()
def sft_loss(model: PreTrainedModel, config: SFTConfig, data: Examples) -> float:
    """The weighted cross-entropy of all examples, in nats a token; 0.0 where nothing has a weight."""
    total = 0.0
    for micro in micro_batches(data.rows, torch.arange(len(data.rows)), config.micro_tokens):
        logp_n = chosen(log_policy(model, hidden_states(model, micro, config.bf16)), micro.target_n)
        total -= float((logp_n * data.weight_N[micro.index_n]).sum())
    return total / max(float(data.weight_N.sum()), 1e-12)
