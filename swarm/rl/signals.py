# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What the losses of an update are given, all of it fixed before the first step.

    batch ── values ── advantages (whole rollouts) ── whitening ── + teachers
          └─ π_old, reference, mismatch weights

The parts of the policy's loss come in as separate terms: rewards (with KL in the reward, if so asked) make the
advantage, which is whitened; what teachers say of a sampled token is added after that, so that its scale stays
its own. Not here: optimizer steps (`swarm.rl.learner`). Axes: N action tokens, R rollouts, K teachers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm.rl.advantages import Chain, advantages
from swarm.rl.batch import Batch
from swarm.rl.distill import TeacherStates, sampled, teacher_states, weights_KR
from swarm.rl.forward import hidden_states, log_chosen, packs
from swarm.rl.losses import kl, same, whiten
from swarm.rl.mismatch import weights_of
from swarm.rl.ppo import PPOConfig
from swarm.rl.rows import MicroBatch, Rows, ends_of, micro_batches


@dataclass(frozen=True, slots=True)
class Signals:
    """All [N] unless said; `advantage_N` is whitened and has the teachers' term.

    `weight_N` corrects the mismatch of sampler and learner. `teachers` and their `weight_KN` are there when
    distillation is over the whole vocabulary.
    """

    logp_old_N: Tensor
    advantage_N: Tensor
    value_N: Tensor
    target_N: Tensor
    weight_N: Tensor
    logp_reference_N: Tensor | None = None
    teachers: tuple[TeacherStates, ...] = ()
    weight_KN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """Models that are only read: the reference of a KL term, and the teachers in the order of the configuration."""

    reference: PreTrainedModel | None = None
    teachers: tuple[PreTrainedModel, ...] = ()

    def check(self, config: PPOConfig) -> None:
        """Raises ValueError where a model is missing that the configuration wants, or the other way round."""
        if (config.kl.coef > 0) != (self.reference is not None):
            given = "a" if self.reference is not None else "no"
            raise ValueError(f"ppo: kl.coef = {config.kl.coef} and {given} reference, want both or neither")
        if len(self.teachers) != len(config.distill.teachers):
            wanted = len(config.distill.teachers)
            raise ValueError(f"ppo: distill.teachers names {wanted}, {len(self.teachers)} given, want as many models")


def signals_of(
    batch: Batch,
    config: PPOConfig,
    policy: PreTrainedModel,
    frozen: Frozen,
    values: Callable[[MicroBatch], Tensor],
    reduce: Callable[[Tensor], Tensor] = same,
) -> Signals:
    """The signals of a batch under the weights as they are. `values` reads a critic [n]; `reduce` sums over
    processes. A process brings whole rollouts."""
    old_N = batch.logp_rollout_N
    if config.old_logprobs == "recompute":
        old_N = logprobs(policy, batch.rows, config)
    reference_N = None if frozen.reference is None else logprobs(frozen.reference, batch.rows, config)
    chain = _chain(
        batch,
        config,
        partial(read, of=values, micro_tokens=config.micro_tokens, share=packs(policy)),
        old_N,
        reference_N,
    )
    advantage_N, target_N = advantages(chain, config.advantage)
    advantage_N = whiten(advantage_N, reduce).float()
    states, weight_KN = _taught(batch, config, frozen.teachers)
    if weight_KN is not None and config.distill.form == "advantage":
        said_KN = [logprobs(t, batch.rows, config) for t in frozen.teachers]
        advantage_N = advantage_N + config.distill.coef * sampled(torch.stack(said_KN), old_N, weight_KN)
    return Signals(
        logp_old_N=old_N,
        advantage_N=advantage_N,
        value_N=chain.value_N,
        target_N=target_N.float(),
        weight_N=weights_of(config.mismatch, old_N, batch.logp_rollout_N, batch.segment_N),
        logp_reference_N=reference_N,
        teachers=states,
        weight_KN=weight_KN,
    )


def logprobs(model: PreTrainedModel, rows: Rows, config: PPOConfig) -> Tensor:
    """log π [N] of every action token, in nats at the sampler's temperature, without gradient."""

    def of(micro: MicroBatch) -> Tensor:
        h_nd = hidden_states(model, micro, config.bf16)
        return log_chosen(model, h_nd, micro.target_n, config.temperature)[0]

    return read(rows, of, config.micro_tokens, packs(model))


@torch.no_grad()
def read(rows: Rows, of: Callable[[MicroBatch], Tensor], micro_tokens: int, share: bool = True) -> Tensor:
    """Something [N] on every action token, float32, without gradient. `share`: see `micro_batches`."""
    out_N = torch.zeros(len(rows.target_N), device=rows.target_N.device)
    for micro in micro_batches(rows, torch.arange(len(rows), device=out_N.device), micro_tokens, share):
        out_N[micro.index_n] = of(micro)
    return out_N


def _chain(
    batch: Batch,
    config: PPOConfig,
    values: Callable[[Rows], Tensor],
    old_N: Tensor,
    reference_N: Tensor | None,
) -> Chain:
    value_N, bootstrap_R = torch.zeros_like(old_N), torch.zeros_like(batch.reward_R)
    if config.advantage.critic:
        value_N = values(batch.rows)
        cut_R = batch.cut_row_R >= 0
        bootstrap_R[cut_R] = values(ends_of(batch.rows, batch.cut_row_R[cut_R]))
    extra_N = None
    if reference_N is not None and config.kl.where == "reward":
        extra_N = -config.kl.coef * kl(config.kl.estimator, old_N, reference_N)
    return Chain(
        reward_R=batch.reward_R,
        bootstrap_R=bootstrap_R,
        extra_N=extra_N,
        value_N=value_N,
        rollout_N=batch.rollout_N,
        segment_N=batch.segment_N,
        turn_N=batch.turn_N,
        steps_N=batch.steps_N,
        group_R=batch.group_R,
    )


def _taught(
    batch: Batch, config: PPOConfig, models: Sequence[PreTrainedModel]
) -> tuple[tuple[TeacherStates, ...], Tensor | None]:
    """What each teacher counts for on each token, and for the whole vocabulary its states on the rows it is for."""
    if not models:
        return (), None
    weight_KR = weights_KR(config.distill.teachers, batch.domains).to(batch.reward_R.device)
    weight_KN = weight_KR[:, batch.rollout_N]
    if config.distill.form == "advantage":
        return (), weight_KN
    mine = (weight_R[batch.rollout_S].nonzero()[:, 0] for weight_R in weight_KR)
    pairs = zip(models, mine, strict=True)
    return tuple(teacher_states(m, batch.rows, s, config.micro_tokens, config.bf16) for m, s in pairs), weight_KN
