# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The PPO update with a critic: from a batch of rollouts to new weights.

    batch ── signals ──┬── critic: epochs × minibatches         minibatch = whole rollouts
         (no gradient) └── policy: epochs × minibatches         micro-batch = rows up to a token budget

With a shared trunk the critic is a head on the policy, and the two losses are one pass. One count of action
tokens, over all micro-batches and processes of a minibatch, divides its loss. Each process brings whole
rollouts of its own. Not here: what the losses are given (`swarm.rl.signals`), rollouts, rewards, files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.checkpoint import filed, weights_sha256
from swarm.rl.adapt import adapt, adapted, frozen_weights, load_trained, merged_state_dict, trained_state
from swarm.rl.batch import Batch
from swarm.rl.credit import Credit
from swarm.rl.critic import Critic, ValueHead
from swarm.rl.distill import routed_kl
from swarm.rl.forward import hidden_states, log_chosen, packs
from swarm.rl.head import check_head, head_of
from swarm.rl.losses import k3, kl, log_ratio, mean_over, value_loss
from swarm.rl.measure import POLICY_TERMS, Tally, metrics_of
from swarm.rl.ppo import Metrics, PPOConfig
from swarm.rl.processes import alone, same_everywhere, total
from swarm.rl.rows import MicroBatch, micro_batches
from swarm.rl.signals import Frozen, Signals, logprobs, signals_of
from swarm.rl.stepper import Stepper
from swarm.rl.surrogate import surrogate
from swarm.seeds import derive

_RATIO = 1 + POLICY_TERMS.index("ratio")


class Learner:
    """Policy, critic, their optimizers and the count of updates: `metrics = learner.update(collect(rollouts))`.

    The policy, any causal model, is trained in place. `credit` is that of the last update. `frozen` holds the models
    that the configuration's KL term and teachers want. Raises ValueError for a model whose logits are not made as
    `swarm.rl.head` says.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        config: PPOConfig,
        accelerator: Accelerator | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        self.config, self.frozen = config, frozen or Frozen()
        self.frozen.check(config)
        self.accelerator = accelerator or alone()
        device = self.accelerator.device
        self.policy = policy.eval().to(device)
        others = [m for m in (self.frozen.reference, *self.frozen.teachers) if m is not None]
        for model in others:
            nn.Module.to(model.eval(), device)
        for model in (self.policy, *others):
            if not packs(model):
                check_head(model)
        shared = config.critic.trunk == "shared"
        head = ValueHead(self.policy.config.hidden_size) if shared else Critic(self.policy, config.critic.layers)
        self.critic: ValueHead | Critic = head.eval().to(device)
        adapt(self.policy, config.adapt, config.seed)
        both = nn.ModuleDict({"policy": self.policy, "value": self.critic})
        self.policy_stepper = self._stepper(both if shared else self.policy, config.lr)
        self.critic_stepper = self._stepper(self.critic, config.critic_lr)
        self.updates = 0
        self.credit: Credit | None = None
        same_everywhere(self.accelerator, (*self.policy.parameters(), *self.critic.parameters()))

    def _stepper(self, network: nn.Module, lr: float) -> Stepper:
        return Stepper(network, self.config.schedule(lr), self.accelerator, self.config.optimizer)

    @property
    def step(self) -> int:
        """Policy optimizer steps made so far: what λ1, λ2 and the learning rate are a function of."""
        return self.policy_stepper.steps

    @property
    def oldest(self) -> int:
        """The oldest version of a token that the next update learns from."""
        return self.updates - self.config.max_staleness

    def update(self, batch: Batch) -> Metrics:
        """Learns from the batch; a batch without tokens changes no weight."""
        batch = batch.to(self.accelerator.device)
        warming = self.config.advantage.critic and self.updates < self.config.critic.warmup_updates
        signals = self.signals(batch)
        first_N = self._first(batch, signals, warming)
        if self.config.optimizer.reset_moments:
            # The engine has had new weights since the last update.
            self.policy_stepper.reset_moments()
            self.critic_stepper.reset_moments()
        critic, policy = self._critic_passes(batch, signals, warming), None
        ratio_N = torch.full_like(signals.logp_old_N, math.nan)
        if not warming:
            policy, joint = self._policy_passes(batch, signals, first_N, ratio_N)
            critic = critic or joint
        self.credit = Credit.of(batch, signals, ratio_N)
        metrics = metrics_of(self, batch, signals, first_N, critic, policy)
        self.updates += 1
        return metrics

    def signals(self, batch: Batch) -> Signals:
        """What the losses will be given, under the weights as they are."""
        return signals_of(batch, self.config, self.policy, self.frozen, self._values, self._sum)

    def weights(self) -> dict[str, Tensor]:
        """The policy as a plain model's file has it, for engines and checkpoints; copy before the next update."""
        return filed(self.policy, merged_state_dict(self.policy))

    @cached_property
    def _base(self) -> str:
        """sha256 of what the trained part of the policy stands on, "" where all is trained."""
        return weights_sha256(frozen_weights(self.policy)) if adapted(self.policy) else ""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later `update` depends on; tensors are shared, so save before the next one.

        Of an adapted policy it has what is trained alone: it goes on beside the same frozen weights.
        """
        return {
            "policy": trained_state(self.policy),
            "base": self._base,
            "critic": self.critic.state_dict(),
            "policy_stepper": self.policy_stepper.state_dict(),
            "critic_stepper": self.critic_stepper.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state_dict` was taken. There is no other random state: every shuffle
        is seeded by the configured seed and the count of updates. Raises ValueError for the state of a policy that
        was adapted otherwise or stands on other frozen weights."""
        base = state.get("base", "")
        if base != self._base:
            raise ValueError(f"learner: the state stands on frozen weights {base[:12]!r}, want {self._base[:12]!r}")
        load_trained(self.policy, state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.policy_stepper.load_state_dict(state["policy_stepper"])
        self.critic_stepper.load_state_dict(state["critic_stepper"])
        self.updates = state["updates"]

    # --- what a pass reads -------------------------------------------------------------

    def _values(self, micro: MicroBatch) -> Tensor:
        """V [n]. A shared trunk is not moved by what is made of these."""
        if isinstance(self.critic, Critic):
            return self.critic.values(micro, self.config.bf16)
        with torch.no_grad():
            h_nd = hidden_states(self.policy, micro, self.config.bf16)
        return self.critic.values(h_nd)

    def _first(self, batch: Batch, signals: Signals, warming: bool) -> Tensor:
        """The learner's own log-probabilities [N] before its first step. NaN: not known yet, the first
        minibatch will tell its own without a pass of their own."""
        if self.config.old_logprobs == "recompute":
            return signals.logp_old_N
        if warming:
            return logprobs(self.policy, batch.rows, self.config)
        return torch.full_like(signals.logp_old_N, math.nan)

    # --- losses ------------------------------------------------------------------------

    def _value_loss(self, value_n: Tensor, signals: Signals, micro: MicroBatch) -> Tensor:
        at_n = micro.index_n
        return value_loss(value_n, signals.value_N[at_n], signals.target_N[at_n], self.config.critic.value_clip)

    def _policy_losses(self, micro: MicroBatch, signals: Signals, batch: Batch, first_N: Tensor | None) -> Tensor:
        """[8, n]: the loss, then what is measured: `POLICY_TERMS`."""
        c, at_n = self.config, micro.index_n
        h_nd = hidden_states(self.policy, micro, c.bf16)
        logp_n, entropy_n = log_chosen(self.policy, h_nd, micro.target_n, c.temperature, with_entropy=True)
        if first_N is not None:
            first_N[at_n] = logp_n.detach()
        old_n, weight_n = signals.logp_old_N[at_n], signals.weight_N[at_n]
        s = surrogate(c.surrogate, logp_n, old_n, signals.advantage_N[at_n], batch.logp_rollout_N[at_n])
        loss_n, zero_n = weight_n * s.loss_N, torch.zeros_like(weight_n)
        if c.entropy_coef > 0:
            loss_n = loss_n - c.entropy_coef * entropy_n
        reference_n = teacher_n = value_n = zero_n
        if signals.logp_reference_N is not None:
            reference_n = kl(c.kl.estimator, logp_n, signals.logp_reference_N[at_n])
            loss_n = loss_n + c.kl.coef * reference_n if c.kl.where == "loss" else loss_n
        if signals.teachers and signals.weight_KN is not None:
            head = head_of(self.policy)
            teacher_n = routed_kl(h_nd, head, signals.teachers, signals.weight_KN[:, at_n], at_n, c.temperature)
            loss_n = loss_n + c.distill.coef * teacher_n
        if isinstance(self.critic, ValueHead) and c.advantage.critic:
            value_n = self._value_loss(self.critic.values(h_nd), signals, micro)
            loss_n = loss_n + c.critic.coef * value_n
        now_n = logp_n.detach()
        terms = (s.stopped_N.float(), k3(old_n, now_n), log_ratio(now_n, old_n).exp(), entropy_n, reference_n)
        return torch.stack([loss_n, *(x.detach() for x in (*terms, teacher_n, value_n))])

    # --- passes ------------------------------------------------------------------------

    def _critic_passes(self, batch: Batch, signals: Signals, warming: bool) -> Tally | None:
        """None where the policy's passes train the critic as well, or nothing does."""
        c = self.config
        if not c.advantage.critic:
            return Tally(torch.zeros(1, 0, device=batch.reward_R.device), 0.0)
        if isinstance(self.critic, ValueHead) and not warming:
            return None

        def losses(micro: MicroBatch) -> Tensor:
            return self._value_loss(self._values(micro), signals, micro)[None]

        epochs = c.critic.warmup_epochs if warming else c.critic.epochs
        return self._passes(self.critic_stepper, batch, epochs, losses, 1)

    def _policy_passes(self, batch: Batch, signals: Signals, first_N: Tensor, ratio_N: Tensor) -> tuple[Tally, Tally]:
        """The tally of the policy, and that of the value loss on a shared trunk. Fills in the ratios."""
        begun, known = self.step, self.config.old_logprobs == "recompute"

        def losses(micro: MicroBatch) -> Tensor:
            x_Kn = self._policy_losses(micro, signals, batch, None if known or self.step > begun else first_N)
            ratio_N[micro.index_n] = x_Kn[_RATIO].detach()
            return x_Kn

        tally = self._passes(self.policy_stepper, batch, self.config.epochs, losses, 1 + len(POLICY_TERMS))
        return tally, Tally(tally.x_KM[-1:], tally.grad_norm)

    def _passes(
        self, stepper: Stepper, batch: Batch, epochs: int, losses: Callable[[MicroBatch], Tensor], kinds: int
    ) -> Tally:
        """Optimizer steps on `losses` [kinds, n], of which the first row is the loss."""
        measured = [torch.zeros(kinds, 0, device=batch.reward_R.device)]
        norms: list[float] = []
        for epoch in range(epochs):
            for rows_S in self._minibatches(batch, epoch, stepper is self.critic_stepper):
                count = self._sum(batch.rows.actions_S[rows_S].sum())
                if count == 0:
                    continue
                for micro in micro_batches(batch.rows, rows_S, self.config.micro_tokens, packs(self.policy)):
                    x_Kn = losses(micro)
                    stepper.backward(mean_over(x_Kn[0], count))
                    measured.append(x_Kn.detach())
                norms.append(stepper.step())
        finite = [x for x in norms if math.isfinite(x)]
        return Tally(torch.cat(measured, dim=1), sum(finite) / max(len(finite), 1))

    def _minibatches(self, batch: Batch, epoch: int, critic: bool) -> Iterator[Tensor]:
        """The rows of each minibatch. Rollouts stay whole; a rollout is in exactly one."""
        seed = derive(self.config.seed, self.updates, epoch, 1 if critic else 6)
        order_R = torch.randperm(len(batch.reward_R), generator=torch.Generator().manual_seed(seed))
        order_R = order_R.to(batch.rollout_S.device)
        for k in range(self.config.minibatches):
            yield torch.isin(batch.rollout_S, order_R[k :: self.config.minibatches]).nonzero()[:, 0]

    def _sum(self, x: Tensor) -> Tensor:
        return total(self.accelerator, x)
