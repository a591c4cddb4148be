# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The PPO update with a critic: from a batch of rollouts to new weights.

    batch ── values, π_old ── chained GAE ── whitening ──┬── critic: epochs × minibatches
             (no gradient)    (whole rollouts)           └── policy: epochs × minibatches
                                                             minibatch = whole rollouts
                                                             micro-batch = rows up to a token budget

One count of action tokens, over all micro-batches and processes of a minibatch, divides its loss. Each
process brings whole rollouts of its own. Not here: rollouts, rewards, files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from swarm.rl.batch import Batch
from swarm.rl.critic import Critic
from swarm.rl.forward import chosen, hidden_states, log_policy
from swarm.rl.gae import chained_gae, last_of_rollout
from swarm.rl.losses import clipped, entropy, explained_variance, k3, log_ratio, mean_over, ppo_loss, value_loss, whiten
from swarm.rl.ppo import Metrics, PolicyMetrics, PPOConfig
from swarm.rl.processes import alone, largest, same_everywhere, total
from swarm.rl.rows import MicroBatch, Rows, ends_of, micro_batches
from swarm.rl.schedule import LrSchedule
from swarm.rl.stepper import Stepper
from swarm.seeds import derive


@dataclass(frozen=True, slots=True)
class Signals:
    """What the losses are given, all [N] and fixed before the first step; `advantage_N` is whitened."""

    logp_old_N: Tensor
    advantage_N: Tensor
    value_N: Tensor
    target_N: Tensor
    logp_reference_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What some passes measured: `x_KM`, K quantities on M action tokens (a token counts once a pass),
    and the mean gradient norm of the steps."""

    x_KM: Tensor
    grad_norm: float


class Learner:
    """Policy, critic, their optimizers and the count of updates: `metrics = learner.update(collect(rollouts))`.

    `reference` is a frozen model, wanted when `kl_coef` is above 0. The policy is trained in place.
    """

    def __init__(
        self,
        policy: Qwen3ForCausalLM,
        config: PPOConfig,
        accelerator: Accelerator | None = None,
        reference: Qwen3ForCausalLM | None = None,
    ) -> None:
        if (config.kl_coef > 0) != (reference is not None):
            given = "a" if reference is not None else "no"
            raise ValueError(f"ppo: kl_coef = {config.kl_coef} and {given} reference, want both or neither")
        self.config = config
        self.accelerator = accelerator or alone()
        self.policy = policy.eval().to(self.accelerator.device)
        self.critic = Critic(self.policy, config.critic_layers).eval().to(self.accelerator.device)
        self.reference = None if reference is None else reference.eval().to(self.accelerator.device)
        self.policy_stepper = self._stepper(self.policy, config.schedule(config.lr))
        self.critic_stepper = self._stepper(self.critic, config.schedule(config.critic_lr))
        self.updates = 0
        same_everywhere(self.accelerator, (*self.policy.parameters(), *self.critic.parameters()))

    def _stepper(self, network: nn.Module, lr: LrSchedule) -> Stepper:
        c = self.config
        return Stepper(network, lr, self.accelerator, weight_decay=c.weight_decay, clip=c.max_grad_norm)

    @property
    def step(self) -> int:
        """Policy optimizer steps made so far: what λ1, λ2 and the learning rate are a function of."""
        return self.policy_stepper.steps

    def update(self, batch: Batch) -> Metrics:
        """Learns from the batch; a batch without tokens changes no weight."""
        batch = batch.to(self.accelerator.device)
        warming = self.updates < self.config.warmup_updates
        signals = self.signals(batch)
        first_N = signals.logp_old_N.clone()
        if self.config.old_logprobs == "rollout":
            first_N = self._logprobs(self.policy, batch) if warming else torch.full_like(first_N, math.nan)
        critic_epochs = self.config.warmup_critic_epochs if warming else self.config.critic_epochs
        critic = self._passes(self.critic_stepper, batch, critic_epochs, lambda m: self._value_losses(m, signals), 1)
        policy = None
        if not warming:
            begun = self.step

            def losses(micro: MicroBatch) -> Tensor:
                return self._policy_losses(micro, signals, first_N if self.step == begun else None)

            policy = self._passes(self.policy_stepper, batch, self.config.epochs, losses, 6)
        self.updates += 1
        return self._metrics(batch, signals, first_N, critic, policy)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later `update` depends on; tensors are shared, so save before the next one."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "policy_stepper": self.policy_stepper.state_dict(),
            "critic_stepper": self.critic_stepper.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state_dict` was taken. There is no other random state: every shuffle
        is seeded by the configured seed and the count of updates."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.policy_stepper.load_state_dict(state["policy_stepper"])
        self.critic_stepper.load_state_dict(state["critic_stepper"])
        self.updates = state["updates"]

    # --- before the first step ---------------------------------------------------------

    def signals(self, batch: Batch) -> Signals:
        """Values, advantages and targets of the batch under the weights as they are."""
        c = self.config
        value_N = self._read(batch.rows, lambda m: self.critic.values(m, c.bf16))
        cut_R = batch.cut_row_R >= 0
        bootstrap_R = torch.zeros_like(batch.reward_R)
        ends = ends_of(batch.rows, batch.cut_row_R[cut_R])
        bootstrap_R[cut_R] = self._read(ends, lambda m: self.critic.values(m, c.bf16))
        reward_N = torch.where(last_of_rollout(batch.rollout_N), batch.reward_R[batch.rollout_N], 0.0)
        chain = (reward_N, value_N, bootstrap_R, batch.rollout_N, c.gamma)
        advantage_N = chained_gae(*chain, c.lam_policy)
        critic_N = advantage_N if c.lam_critic == c.lam_policy else chained_gae(*chain, c.lam_critic)
        return Signals(
            logp_old_N=self._logprobs(self.policy, batch) if c.old_logprobs == "recompute" else batch.logp_old_N,
            advantage_N=whiten(advantage_N, self._sum).float(),
            value_N=value_N,
            target_N=(critic_N + value_N).float(),
            logp_reference_N=None if self.reference is None else self._logprobs(self.reference, batch),
        )

    def _logprobs(self, model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
        return self._read(batch.rows, lambda m: chosen(self._log_policy(model, m), m.target_n))

    @torch.no_grad()
    def _read(self, rows: Rows, of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Something [N] on every action token, float32, without gradient."""
        out_N = torch.zeros(len(rows.target_N), device=rows.target_N.device)
        for micro in micro_batches(rows, torch.arange(len(rows), device=out_N.device), self.config.micro_tokens):
            out_N[micro.index_n] = of(micro)
        return out_N

    def _log_policy(self, model: Qwen3ForCausalLM, micro: MicroBatch) -> Tensor:
        return log_policy(model, hidden_states(model, micro, self.config.bf16), self.config.temperature)

    # --- steps -------------------------------------------------------------------------

    def _value_losses(self, micro: MicroBatch, signals: Signals) -> Tensor:
        value_n = self.critic.values(micro, self.config.bf16)
        old_n, target_n = signals.value_N[micro.index_n], signals.target_N[micro.index_n]
        return value_loss(value_n, old_n, target_n, self.config.value_clip)[None]

    def _policy_losses(self, micro: MicroBatch, signals: Signals, first_N: Tensor | None) -> Tensor:
        """[6, n]: the loss; then clipped, k3, ratio, entropy, KL to the reference (no gradient wanted)."""
        c, at_n = self.config, micro.index_n
        logp_nV = self._log_policy(self.policy, micro)
        logp_n = chosen(logp_nV, micro.target_n)
        # Without a coefficient the entropy is only measured.
        entropy_n = entropy(logp_nV if c.entropy_coef > 0 else logp_nV.detach())
        if first_N is not None:
            first_N[at_n] = logp_n.detach()
        old_n, advantage_n = signals.logp_old_N[at_n], signals.advantage_N[at_n]
        loss_n = ppo_loss(logp_n, old_n, advantage_n, c.clip_low, c.clip_high, c.dual_clip)
        reference_n = torch.zeros_like(loss_n)
        if signals.logp_reference_N is not None:
            reference_n = k3(logp_n, signals.logp_reference_N[at_n])
        loss_n = loss_n - c.entropy_coef * entropy_n + c.kl_coef * reference_n
        now_n = logp_n.detach()
        return torch.stack([
            loss_n,
            clipped(now_n, old_n, advantage_n, c.clip_low, c.clip_high).float(),
            k3(old_n, now_n),
            log_ratio(now_n, old_n).exp(),
            entropy_n.detach(),
            reference_n.detach(),
        ])  # fmt: skip

    def _passes(
        self, stepper: Stepper, batch: Batch, epochs: int, losses: Callable[[MicroBatch], Tensor], kinds: int
    ) -> Tally:
        """Optimizer steps on `losses` [kinds, n], of which the first row is the loss."""
        measured = [torch.zeros(kinds, 0, device=batch.reward_R.device)]
        norms: list[float] = []
        for epoch in range(epochs):
            for rows_S in self._minibatches(batch, epoch, kinds):
                count = self._sum(batch.rows.actions_S[rows_S].sum())
                if count == 0:
                    continue
                for micro in micro_batches(batch.rows, rows_S, self.config.micro_tokens):
                    x_Kn = losses(micro)
                    stepper.backward(mean_over(x_Kn[0], count))
                    measured.append(x_Kn.detach())
                norms.append(stepper.step())
        finite = [x for x in norms if math.isfinite(x)]
        return Tally(torch.cat(measured, dim=1), sum(finite) / max(len(finite), 1))

    def _minibatches(self, batch: Batch, *salt: int) -> Iterator[Tensor]:
        """The rows of each minibatch. Rollouts stay whole; a rollout is in exactly one."""
        generator = torch.Generator().manual_seed(derive(self.config.seed, self.updates, *salt))
        order_R = torch.randperm(len(batch.reward_R), generator=generator).to(batch.rollout_S.device)
        for k in range(self.config.minibatches):
            yield torch.isin(batch.rollout_S, order_R[k :: self.config.minibatches]).nonzero()[:, 0]

    # --- over processes ----------------------------------------------------------------

    def _sum(self, x: Tensor) -> Tensor:
        return total(self.accelerator, x)

    def _max(self, x_N: Tensor) -> float:
        return float(largest(self.accelerator, x_N.max() if len(x_N) else torch.zeros((), device=x_N.device)))

    def _mean(self, x_KN: Tensor) -> list[float]:
        """The means over the last axis, over all processes."""
        count = self._sum(torch.tensor(float(x_KN.shape[-1]), device=x_KN.device))
        return (self._sum(x_KN.double().sum(-1)) / count.clamp(min=1)).flatten().tolist()

    def _metrics(self, batch: Batch, signals: Signals, first_N: Tensor, critic: Tally, policy: Tally | None) -> Metrics:
        drift_N = (first_N - batch.logp_old_N).abs()
        drift_N = drift_N[~first_N.isnan()]
        tokens = self._sum(torch.tensor(len(batch), device=drift_N.device))
        rollouts = self._sum(torch.tensor(len(batch.reward_R), device=drift_N.device))
        return Metrics(
            tokens=int(tokens),
            rollouts=int(rollouts),
            left_out=batch.left_out,
            reward=self._mean(batch.reward_R[None])[0],
            value_loss=self._mean(critic.x_KM)[0],
            explained_variance=explained_variance(signals.value_N, signals.target_N, self._sum),
            critic_grad_norm=critic.grad_norm,
            critic_lr=self.critic_stepper.lr,
            drift_mean=self._mean(drift_N[None])[0],
            drift_max=self._max(drift_N),
            policy_steps=self.policy_stepper.steps,
            critic_steps=self.critic_stepper.steps,
            skipped=self.policy_stepper.skipped + self.critic_stepper.skipped,
            policy=None if policy is None else self._policy_metrics(policy),
        )

    def _policy_metrics(self, tally: Tally) -> PolicyMetrics:
        loss, clip_fraction, approx_kl, ratio_mean, entropy, kl_reference = self._mean(tally.x_KM)
        return PolicyMetrics(
            loss=loss,
            clip_fraction=clip_fraction,
            approx_kl=approx_kl,
            ratio_mean=ratio_mean,
            ratio_max=self._max(tally.x_KM[3]),
            entropy=entropy,
            kl_reference=kl_reference,
            grad_norm=tally.grad_norm,
            lr=self.policy_stepper.lr,
        )
