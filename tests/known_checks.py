"""Named checks of what RL trainers have got wrong elsewhere: each raises AssertionError where it is wrong here.

They call the code by its modules, so that a fault which is put in there is seen. Not tests themselves: on the code
as it is, and on each fault, they are run by `tests.test_known_bugs`. Axes: N action tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import trio
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen3ForCausalLM

from swarm.engine import kernels
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import begin, run
from swarm.rl import batch as batches
from swarm.rl import forward, losses, signals
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.batch import Batch
from swarm.rl.critic import Critic, CriticConfig, ValueHead
from swarm.rl.distill import DistillConfig, Teacher
from swarm.rl.learner import Learner
from swarm.rl.mismatch import MismatchConfig
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.signals import Frozen
from swarm.rl.surrogate import SurrogateConfig
from swarm.types import Reward, Rollout
from tests import test_compaction
from tests.rl_cases import VOCAB, prompt, rollout, said, seen, some_rollouts, tiny
from tests.swarm_cases import TASK, chat, harness, says
from tests.test_rl_learner import gradients

CONFIG = PPOConfig(
    critic=CriticConfig(warmup_updates=0), optimizer=OptimizerConfig(max_grad_norm=1e9), minibatches=1, micro_tokens=1
)
WHOLE = replace(CONFIG, micro_tokens=10**6)
STILL = replace(WHOLE, lr=1e-12, critic_lr=1e-12)


def near(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), atol=atol, rtol=0)


def forks() -> list[Rollout]:
    """Uneven rollouts, and three that begin alike, so that their beginning is computed once."""
    common = prompt(*torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(9)).tolist())
    return [*some_rollouts(3), *(rollout([common, said(k, k + 1), seen(7), said(9)], reward=k / 9) for k in (3, 5, 8))]


def reference(model: Qwen3ForCausalLM, rollouts: Sequence[Rollout], temperature: float = 1.0) -> Tensor:
    """log π of every action token, [N], by transformers' own forward, one segment at a time."""
    found: list[Tensor] = []
    for segment in (s for r in rollouts for s in r.trace.segments):
        ids, at = torch.tensor(segment.ids), torch.tensor(segment.mask).nonzero()[:, 0]
        logp = (model(input_ids=ids[None]).logits[0, at - 1] / temperature).log_softmax(-1)
        found.append(logp.gather(-1, ids[at, None])[:, 0])
    return torch.cat(found)


def sampled_by(model: Qwen3ForCausalLM, rollouts: Sequence[Rollout], temperature: float = 1.0) -> Batch:
    """The batch as if the model had sampled it, by transformers' account."""
    with torch.no_grad():
        return replace(batches.collect(rollouts), logp_rollout_N=reference(model, rollouts, temperature))


# --- the gradient -----------------------------------------------------------------------


def check_the_gradient_is_that_of_one_mean_over_all_tokens() -> None:
    """−Σ w·A·ρ / N by transformers' forward, on rows of uneven lengths that go through the learner one by one."""
    _same_gradient(CONFIG, sampled_by(tiny(), some_rollouts(5)), some_rollouts(5))


def check_rejected_tokens_count_in_the_divisor() -> None:
    rollouts = some_rollouts(5)
    batch = sampled_by(tiny(), rollouts)
    off_N = batch.logp_rollout_N - 2.0 * (torch.arange(len(batch)) % 2)
    config = replace(CONFIG, mismatch=MismatchConfig("icepop"), old_logprobs="recompute")
    _same_gradient(config, replace(batch, logp_rollout_N=off_N), rollouts)


def _same_gradient(config: PPOConfig, batch: Batch, rollouts: Sequence[Rollout]) -> None:
    learner, model = Learner(tiny(), config), tiny()
    s = learner.signals(batch)
    ratio_N = (reference(model, rollouts) - s.logp_old_N).exp()
    (-(s.weight_N * s.advantage_N * ratio_N).sum() / len(batch)).backward()
    want = [p.grad for p in model.parameters() if p.grad is not None]
    for got, w in zip(gradients(learner, batch), want, strict=True):
        near(got, w)


@dataclass
class Rank:
    """One of two processes, as a thread: what both bring to a sum or a gathering lies in `both`."""

    rank: int
    both: list[Any]
    barrier: threading.Barrier
    num_processes: int = 2
    device = torch.device("cpu")

    def gather(self, x: Tensor) -> Tensor:
        self.both[self.rank] = x.detach().clone()
        self.barrier.wait()
        out = torch.stack(self.both)
        self.barrier.wait()
        return out

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return self.gather(x).sum(0)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)


def check_two_processes_make_the_step_of_one() -> None:
    rollouts, both, barrier = some_rollouts(5), [None, None], threading.Barrier(2, timeout=60)
    learners = [Learner(tiny(), CONFIG, cast(Accelerator, Rank(k, both, barrier))) for k in range(2)]
    want = gradients(Learner(tiny(), CONFIG), batches.collect(rollouts))
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda k: gradients(learners[k], batches.collect(rollouts[k::2])), range(2)):
            for got, w in zip(found, want, strict=True):
                near(got, w)


def check_whitening_keeps_a_small_variance_beside_a_large_mean() -> None:
    # 1000 ∓ .01: μ = 1000, σ = .01, so −1 and 1.
    near(losses.whiten(torch.tensor([999.99, 1000.01])), torch.tensor([-1.0, 1.0]), atol=1e-2)


def check_every_group_of_parameters_follows_the_schedule() -> None:
    learner = Learner(tiny(), replace(CONFIG, lr_warmup=8, optimizer=OptimizerConfig("muon")))
    for k in range(2):
        learner.update(batches.collect(some_rollouts(3, k)))
    for stepper in (learner.policy_stepper, learner.critic_stepper):
        rates = {g["lr"] for o in stepper.optimizers for g in o.param_groups}
        assert rates == {stepper.schedule.at(1)}, rates


# --- log-probabilities and values -------------------------------------------------------


def check_log_probabilities_are_those_of_transformers_row_by_row() -> None:
    model, rollouts = tiny(), forks()
    got = signals.logprobs(model, batches.collect(rollouts).rows, replace(WHOLE, temperature=0.7))
    near(got, reference(model, rollouts, 0.7).detach())


def check_the_first_ratio_is_one() -> None:
    """The canary: before the first step the learner says what the sampler said of every token."""
    learner = Learner(tiny(), replace(STILL, temperature=0.7))
    metrics = learner.update(sampled_by(learner.policy, forks(), 0.7))
    assert metrics.policy is not None
    assert abs(metrics.policy.ratio_max - 1) < 1e-5
    assert abs(metrics.policy.ratio_mean - 1) < 1e-5
    assert abs(metrics.policy.approx_kl) < 1e-5
    assert metrics.drift_max < 1e-5


def check_the_mean_ratio_to_the_engines_samples_is_one() -> None:
    """200 tokens by the engine's own sampler after one prompt, then an update on them."""
    learner = Learner(tiny(), STILL)
    with torch.no_grad():
        logits_V = learner.policy(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    ones, seeds = np.ones(200), np.arange(200).astype(np.uint64)
    ids, logps = kernels.sampled(logits_V.expand(200, -1).numpy().copy(), ones, ones, seeds, seeds)
    said_ = [
        rollout([prompt(1, 2, 3), said(i, logprob=x)], reward=i / VOCAB)
        for i, x in zip(ids.tolist(), logps.tolist(), strict=True)
    ]
    metrics = learner.update(batches.collect(said_))
    assert metrics.policy is not None
    assert abs(metrics.policy.ratio_mean - 1) < 1e-5
    assert metrics.alarms == ()


def check_the_heads_products_are_as_exact_as_float32() -> None:
    h_nd, target_n = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    head_Vd = tiny().model.embed_tokens.weight.double()
    want = (h_nd.double() @ head_Vd.T).log_softmax(-1)[range(6), target_n]
    near(forward.log_chosen(tiny(), h_nd, target_n)[0], want.detach())


def check_log_probabilities_do_not_depend_on_the_batch() -> None:
    rows = batches.collect(some_rollouts(6)).rows
    near(signals.logprobs(tiny(), rows, WHOLE), signals.logprobs(tiny(), rows, CONFIG))


def check_a_document_does_not_see_its_neighbours() -> None:
    one, other = (rollout([prompt(*ids), said(4, 5)], reward=0.0) for ids in ((1, 2, 3), (9, 8, 7)))
    second = rollout([prompt(6, 5), said(3, 2)], reward=1.0)
    a, b = (signals.logprobs(tiny(), batches.collect([r, second]).rows, WHOLE) for r in (one, other))
    assert torch.equal(a[2:], b[2:])
    assert not torch.equal(a[:2], b[:2])


def check_a_value_does_not_see_its_own_token() -> None:
    learner = with_values()
    a, b = (
        learner.signals(batches.collect([rollout([prompt(1, 2), said(3, x), seen(5), said(6)])])).value_N
        for x in (4, 9)
    )
    assert (a == b).tolist() == [True, True, False]


def check_values_do_not_depend_on_the_temperature() -> None:
    batch = batches.collect(some_rollouts(3))
    a, b = (with_values(temperature=t).signals(batch).value_N for t in (1.0, 0.7))
    assert torch.equal(a, b)


def with_values(**changes: Any) -> Learner:
    learner = Learner(tiny(), replace(STILL, **changes))
    torch.nn.init.normal_(head(learner).weight, generator=torch.Generator().manual_seed(0))
    return learner


def always(value: float, config: PPOConfig = STILL) -> Learner:
    """A learner whose critic says so of every context."""
    learner = Learner(tiny(), config)
    head(learner).bias.data.fill_(value)
    return learner


def head(learner: Learner) -> ValueHead:
    assert isinstance(learner.critic, Critic)
    return learner.critic.head


# --- ids, masks and rewards -----------------------------------------------------------------


def check_every_sampled_token_is_an_action_with_its_logprob() -> None:
    spans = [prompt(1), said(2, 3, logprob=-0.5), seen(4), said(5, 0, logprob=-0.25)]
    batch = batches.collect([rollout(spans)])
    assert batch.rows.target_N.tolist() == [2, 3, 5, 0]
    assert batch.logp_rollout_N.tolist() == [-0.5, -0.5, -0.25, -0.25]


def check_the_reward_reaches_every_action() -> None:
    """γ = λ = 1: targets are the reward, also where an observation comes after the last action."""
    rollouts = [rollout([prompt(1), said(2), seen(3), said(4)], reward=0.25), rollout([prompt(1), said(2), seen(3)])]
    near(Learner(tiny(), STILL).signals(batches.collect(rollouts)).target_N, torch.tensor([0.25, 0.25, 1.0]))


def check_a_perfect_critic_leaves_no_advantage_whatever_was_observed() -> None:
    """V ≡ R, λ < 1: what lies between two turns takes nothing away."""
    learner = always(0.5, replace(STILL, advantage=AdvantageConfig(lam=0.95, lam_critic=0.95)))
    rollouts = [replace(r, reward=Reward({"perf": 0.5}, {"perf": 1.0})) for r in some_rollouts(4)]
    s = learner.signals(batches.collect(rollouts))
    near(s.advantage_N, torch.zeros(len(s.advantage_N)))
    near(s.target_N, torch.full((len(s.target_N),), 0.5))


def check_a_cut_is_followed_by_the_critics_value_and_an_end_by_nothing() -> None:
    cut = rollout([prompt(1), said(2), seen(3)], reward=9.0, status="truncated")
    ended = rollout([prompt(1), said(2), seen(3)], reward=0.7)
    near(always(0.4).signals(batches.collect([cut, ended])).target_N, torch.tensor([0.4, 0.7]))


def check_trained_ids_are_those_that_the_engine_sampled() -> None:
    """Digits one by one, which the tokenizer would have put together."""
    ids = [i for digit in "100" for i in chat().encode(digit)]
    assert len(chat().encode("100")) == 1
    spelling = replace(harness(says()), engine=ScriptedEngine(lambda *_: [*ids, *chat().stop]))
    r = trio.run(run, spelling, begin(spelling, TASK, seed=1))
    assert test_compaction.sampled(r.trace.segments) == [(*ids, *chat().stop)]


def check_a_summary_is_trained_once() -> None:
    h = test_compaction.agent(keep=1)
    r = trio.run(test_compaction.rollout, h)
    assert len(r.trace.segments) > 2
    assert test_compaction.sampled(r.trace.segments) == [c.ids for c in cast(test_compaction.Heard, h.engine).said]


# --- terms ------------------------------------------------------------------------------------


def check_the_term_of_a_teacher_keeps_its_scale() -> None:
    """Its difference to no teacher is log π_T − log π, however large the rewards are."""
    rollouts = [replace(r, reward=Reward({"perf": 1.0}, {"perf": 1000.0 * k})) for k, r in enumerate(some_rollouts(3))]
    batch, teacher = sampled_by(tiny(), rollouts), tiny(3)
    config = replace(STILL, distill=DistillConfig((Teacher(cast(Any, "t")),)))
    taught = Learner(tiny(), config, frozen=Frozen(teachers=(teacher,))).signals(batch).advantage_N
    plain = Learner(tiny(), STILL).signals(batch).advantage_N
    near(taught - plain, reference(teacher, rollouts).detach() - batch.logp_rollout_N)


def check_two_corrections_of_one_mismatch_are_refused() -> None:
    try:
        PPOConfig(surrogate=SurrogateConfig("dis"), mismatch=MismatchConfig("tis"))
    except ValueError:
        return
    raise AssertionError("dis with tis was accepted")
