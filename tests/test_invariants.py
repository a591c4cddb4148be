"""The nine invariants of the design, as properties of rollouts and updates from end to end.

What stands elsewhere is not repeated here:
1   test_compaction (every sampled id once), test_loop (the prompt only grows)
2   test_engine_embedded (log-probabilities over turns), test_rl_signals (every surrogate, a shared trunk)
3   test_rl_gae_properties (all forms, splits, observations, NaN), test_rl_learner (splits of traces)
4   test_rl_processes (two processes), test_rl_rows (shared beginnings), test_engine_body (padded rows)
5   test_train (the checksum in a run's summary)
6   test_parl, test_rl_schedule (worked values), test_train (a killed run goes on with its λ)
7   test_rl_learner (worked targets)
8   test_parl, test_rl_batch (failed children)
9   test_records (every rollout comes back exactly), test_loop (the same seed gives the same rollout)
Axes: N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rewards.parl import ParlConfig, parl
from swarm.checkpoint import weights_sha256
from swarm.context import ContextPolicy
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness, begin, run
from swarm.records import read, write
from swarm.replay import timeless
from swarm.rl.advantages import AdvantageConfig
from swarm.rl.batch import collect
from swarm.rl.critic import Critic, CriticConfig
from swarm.rl.distill import DistillConfig, Teacher
from swarm.rl.learner import Learner
from swarm.rl.losses import KLConfig, whiten
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.signals import Frozen, signals_of
from swarm.rl.surrogate import SurrogateConfig
from swarm.types import Budget, Rollout, Sampling, Span, Turn
from tests import test_compaction, test_spawning
from tests.engine_cases import compile_kernels
from tests.engine_cases import tiny as engine_model
from tests.known_checks import reference, sampled_by
from tests.rl_cases import prompt, rollout, said, seen, some_rollouts, tiny
from tests.swarm_cases import TASK, call, chat, harness, says
from tests.test_rl_learner import gradients, split

CONFIG = PPOConfig(critic=CriticConfig(warmup_updates=0), optimizer=OptimizerConfig(max_grad_norm=1e9), minibatches=1)
STILL = replace(CONFIG, lr=1e-12, critic_lr=1e-12)
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    compile_kernels()
    Learner(tiny(), CONFIG).update(collect(some_rollouts(2)))


def near(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), atol=atol, rtol=0)


def finished(h: Harness, seed: int = 1) -> Rollout:
    return trio.run(run, h, begin(h, TASK, seed))


# --- 1: tokens in, tokens out ----------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@given(
    words=st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=12), min_size=1, max_size=6),
    kind=st.sampled_from(["none", "compaction", "truncation"]),
)
def test_whatever_ids_are_sampled_are_the_trained_ones_and_contexts_grow_or_are_replaced(
    words: list[list[int]], kind: Any
) -> None:
    # Ids at random: halves of characters, markers in the middle of a turn, what no text would be encoded to.
    said_: list[list[int]] = []

    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        noise = [i for i in words[len(said_) % len(words)] if i not in chat().stop]
        said_.append([*noise, *chat().encode_turn("", (call("echo", text="x"),))])
        return said_[-1]

    context = ContextPolicy() if kind == "none" else ContextPolicy(kind, threshold=200, summary_tokens=60, keep=1)
    engine = test_compaction.Heard(ScriptedEngine(speak))
    h = replace(harness(says()), engine=engine, context=context, budget=Budget(7, 900))
    r = finished(replace(h, sampling=Sampling(100, stop=chat().stop)))
    told = [c.ids for c in engine.said]
    assert test_compaction.sampled(r.trace.segments) == told
    assert collect([rewarded(r)]).rows.target_N.tolist() == [i for ids in told for i in ids]
    opened = {s.spans[0].ids for s in r.trace.segments[1:]}
    for before, ids, after in zip(engine.asked, told, engine.asked[1:], strict=False):
        assert after[: len(before) + len(ids)] == [*before, *ids] or tuple(after) in opened


def rewarded(r: Rollout, f1: float = 0.5) -> Rollout:
    return parl(replace(r, task=replace(TASK, meta={"pages": 2})), f1, ParlConfig(), 0)


# --- 2: before the first step ------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=5)
@given(seeds, st.sampled_from([0.5, 1.0, 1.3]))
def test_what_the_embedded_engine_sampled_has_ratio_one_and_no_kl_before_the_first_step(
    seed: int, temperature: float
) -> None:
    async def roll_out(model: Qwen3ForCausalLM) -> list[Rollout]:
        async with EmbeddedEngine(model, max_len=256, cache_bytes=1 << 20) as engine:
            return [await one(engine, seed + k) for k in range(4)]

    async def one(engine: EmbeddedEngine, own: int) -> Rollout:
        spans = [prompt(*range(1, 3 + own % 30))]
        for turn in range(3):
            c = await engine.generate([i for s in spans for i in s.ids], Sampling(9, temperature, seed=own + turn))
            spans += [Span("sampled", c.ids, c.logprobs, c.version), seen(5, turn)]
        return rollout(spans, reward=own % 7 / 7)

    model = engine_model()
    metrics = Learner(model, replace(STILL, temperature=temperature)).update(collect(trio.run(roll_out, model)))
    assert metrics.policy is not None
    # A temperature below 1 divides the logits' rounding with them.
    exact = 1e-5 / min(1.0, temperature)
    assert metrics.drift_max < exact
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=exact)
    assert abs(metrics.policy.approx_kl) < 1e-5


# --- 3: advantages -----------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8)
@given(seeds)
def test_undiscounted_the_advantage_of_every_action_is_reward_minus_value_whatever_was_compacted(seed: int) -> None:
    batch, learner = collect(some_rollouts(4, seed)), Learner(tiny(), STILL)
    assert isinstance(learner.critic, Critic)
    torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(seed))
    s = learner.signals(batch)
    near(s.advantage_N, whiten(batch.reward_R[batch.rollout_N].double() - s.value_N.double()), 1e-4)
    near(s.target_N, batch.reward_R[batch.rollout_N])


@pytest.mark.slow
@settings(max_examples=5)
@given(st.floats(0, 1), st.floats(0, 1), seeds)
def test_splitting_where_the_context_stays_leaves_the_gradient_for_every_discount(
    gamma: float, lam: float, seed: int
) -> None:
    config = replace(CONFIG, advantage=AdvantageConfig(gamma=gamma, lam=lam, lam_critic=lam))
    whole = some_rollouts(3, seed)
    one, many = (gradients(Learner(tiny(), config), collect(r)) for r in (whole, [split(r) for r in whole]))
    for a, b in zip(one, many, strict=True):
        near(a, b, 1e-4)


def test_ids_after_the_last_action_are_read_by_nothing() -> None:
    # The same rollouts with another observation at their end: the same signals and gradients, bit for bit.
    def ends(*ids: int) -> list[Rollout]:
        return [rollout([prompt(1, 2), said(3, k), seen(4), said(5), seen(*ids)], reward=k / 9) for k in (2, 7)]

    one, other = (gradients(Learner(tiny(), CONFIG), collect(ends(*ids))) for ids in ((6, 7), (30, 31)))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- 4: one count ------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dis": {"surrogate": SurrogateConfig("dis", clip_low=0.7, clip_high=4.0)},
    "kl": {"kl": KLConfig(0.2), "entropy_coef": 0.01},
    "shared": {"critic": CriticConfig(trunk="shared", layers=None, warmup_updates=0)},
    "distilled": {"distill": DistillConfig((Teacher(Path("t")),), "full")},
}


def learner_of(config: PPOConfig) -> Learner:
    reference_ = tiny(7) if config.kl.coef else None
    return Learner(tiny(), config, frozen=Frozen(reference_, tuple(tiny(8) for _ in config.distill.teachers)))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_one_micro_batch_of_eight_rollouts_has_the_gradient_of_eight_of_one(name: str) -> None:
    batch = sampled_by(tiny(), some_rollouts(8))
    config = replace(CONFIG, **VARIANTS[name])
    found = [gradients(learner_of(replace(config, micro_tokens=n)), batch) for n in (10**6, 40, 1)]
    for part in found[1:]:
        for a, b in zip(found[0], part, strict=True):
            near(a, b)


def padded(model: Qwen3ForCausalLM, rollouts: Sequence[Rollout]) -> Tensor:
    """log π [N] of the actions by transformers' forward over one batch that is padded on the right."""
    segments = [s for r in rollouts for s in r.trace.segments]
    ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(s.ids) for s in segments], batch_first=True)
    mask_BT = torch.nn.utils.rnn.pad_sequence([torch.ones(len(s.ids)).long() for s in segments], batch_first=True)
    logp_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits.log_softmax(-1)
    logp_BT = logp_BTV[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
    return torch.cat([logp_BT[b, : len(s.ids) - 1][torch.tensor(s.mask[1:])] for b, s in enumerate(segments)])


@pytest.mark.slow
@settings(max_examples=4)
@given(seeds)
def test_packed_padded_and_one_by_one_are_the_same_update(seed: int) -> None:
    rollouts = some_rollouts(5, seed)
    batch, learner = sampled_by(tiny(), rollouts), Learner(tiny(), replace(CONFIG, micro_tokens=10**6))
    s = learner.signals(batch)
    packed = gradients(learner, batch)
    for forward in (padded, reference):
        model = tiny()
        ratio_N = (forward(model, rollouts) - batch.logp_rollout_N).exp()
        near(ratio_N.detach(), torch.ones(len(batch)))
        (-(ratio_N * s.advantage_N).sum() / len(batch)).backward()
        for a, p in zip(packed, [p for p in model.parameters() if p.grad is not None], strict=True):
            near(a, p.grad if p.grad is not None else torch.zeros(()))


# --- 5: frozen -----------------------------------------------------------------------------


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_what_is_frozen_has_the_same_checksum_after_training(trunk: Any) -> None:
    critic = CriticConfig() if trunk == "own" else CriticConfig(trunk="shared", layers=None)
    config = replace(CONFIG, critic=replace(critic, warmup_updates=1), kl=KLConfig(0.1), lr=0.01)
    config = replace(config, distill=DistillConfig((Teacher(Path("a")), Teacher(Path("b"))), "full"))
    frozen = Frozen(tiny(5), (tiny(6), tiny(7)))
    assert frozen.reference is not None
    before = [weights_sha256(m) for m in (frozen.reference, *frozen.teachers)]
    learner = Learner(tiny(), config, frozen=frozen)
    start = weights_sha256(learner.policy)
    for k in range(2):
        learner.update(collect(some_rollouts(3, k)))
    assert [weights_sha256(m) for m in (frozen.reference, *frozen.teachers)] == before
    assert weights_sha256(tiny(5)) == before[0]
    assert weights_sha256(learner.policy) != start
    assert all(p.grad is None for m in (frozen.reference, *frozen.teachers) for p in m.parameters())


# --- 6: λ1, λ2 ------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_the_lambdas_are_a_function_of_the_step_that_falls_to_exactly_zero(
    parallel: float, finish: float, steps: int, at: list[int]
) -> None:
    config = ParlConfig(lambda_parallel=parallel, lambda_finish=finish, anneal_steps=steps)
    assert config.lambdas(0) == pytest.approx((parallel, finish))
    values = {k: config.lambdas(k) for k in (*at, *reversed(at))}
    assert all(config.lambdas(k) == v for k, v in values.items())
    for early, late in pairwise(sorted(values)):
        assert all(a >= b >= 0 for a, b in zip(values[early], values[late], strict=True))
    assert all(config.lambdas(k) == (0.0, 0.0) for k in (steps, steps + 1, 10 * steps))


# --- 7: spawning turns ---------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 3), st.floats(0, 1))
def test_a_turn_that_spawns_receives_the_reward_like_every_other_and_the_childs_turns_nothing(
    spawns: int, f1: float
) -> None:
    assigned = tuple(test_spawning.assign(f"p{k}") for k in range(spawns))
    turns = [Turn("", (test_spawning.CREATE, *assigned)), Turn("", (call("echo", text="x"),)), Turn("done")]
    r = finished(test_spawning.swarm(says(*turns)))
    assert len(r.children) == spawns
    r = rewarded(r, f1)
    assert r.reward is not None
    batch = collect([r])
    sampled = [len(s.ids) for s in r.trace.segments[0].spans if s.kind == "sampled"]
    assert len(batch) == sum(sampled)
    assert batch.turn_N.tolist() == [t for t, n in enumerate(sampled) for _ in range(n)]
    s = signals_of(batch, STILL, tiny(), Frozen(), lambda micro: torch.zeros(len(micro.index_n)))
    near(s.target_N, torch.full((len(batch),), r.reward.total))


# --- 8: infrastructure errors ----------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 6))
def test_an_engine_that_fails_anywhere_makes_no_reward_and_no_training(fail_at: int) -> None:
    # Calls 0 and 1 are the orchestrator's, 3 to 6 those of its two children; at 2 none fails.
    child = harness(test_spawning.READ, steps=20, fail_at=[fail_at - 3] if fail_at >= 3 else [])
    turns = (Turn("", (test_spawning.CREATE, test_spawning.assign("p"), test_spawning.assign("q"))), Turn("done"))
    lead = test_spawning.swarm(says(*turns), child)
    if fail_at < 2:
        lead = replace(lead, engine=harness(says(*turns), fail_at=[fail_at]).engine)
    r = finished(lead)
    failed = fail_at != 2
    assert r.failed is failed
    assert (rewarded(r).reward is None) is failed
    batch = collect([rewarded(r)])
    assert batch.left_out == ({"failed": 1} if failed else {})
    assert (len(batch) == 0) is failed


# --- 9: replay --------------------------------------------------------------------------------


def replaying(r: Rollout) -> ScriptedEngine:
    """An engine that says after each context of a recorded tree what was said there."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def remember(r: Rollout) -> None:
        for segment in r.trace.segments:
            before: tuple[int, ...] = ()
            for span in segment.spans:
                if span.kind == "sampled":
                    known[before] = span.ids
                before += span.ids
        for c in r.children:
            remember(c)

    remember(r)
    return ScriptedEngine(lambda ids, _: known[tuple(ids)])


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(3, 14), st.integers(0, 2), st.sampled_from(["compaction", "truncation"]))
def test_a_compacting_rollout_is_replayed_from_its_record_token_for_token(
    tmp_path: Path, steps: int, keep: int, kind: str
) -> None:
    h = test_compaction.agent(steps=steps, keep=keep, kind=kind)
    again(tmp_path, finished(h), lambda engine: replace(h, engine=engine))


def test_a_swarm_is_replayed_from_its_record_with_its_ledger_and_its_reward(tmp_path: Path) -> None:
    turns = (Turn("", (test_spawning.CREATE, *(test_spawning.assign(p) for p in "pqr"))), Turn("#1 #2"))

    def swarm(engine: ScriptedEngine | None = None) -> Harness:
        child = harness(test_spawning.READ, steps=20)
        lead = test_spawning.swarm(says(*turns), child if engine is None else replace(child, engine=engine))
        return lead if engine is None else replace(lead, engine=engine)

    r = finished(swarm())
    assert len(r.children) == 3
    again(tmp_path, r, swarm)


def again(folder: Path, r: Rollout, harness_of: Any) -> None:
    """Writes a rollout, reads it, runs it on what was recorded, and compares all of it but the clock."""
    (folder / "r.rec").unlink(missing_ok=True)
    write(folder / "r.rec", [r])
    (recorded,) = read(folder / "r.rec")
    replayed = finished(harness_of(replaying(recorded)))
    assert timeless(replayed) == timeless(r)
    assert rewarded(replayed).reward == rewarded(r).reward is not None
