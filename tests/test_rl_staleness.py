"""How old a token may be: versions by token, rollouts that are dropped, and what an update says of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.loop import begin, close, step
from swarm.rl.batch import collect
from swarm.rl.learner import Learner
from swarm.rl.mismatch import Drift, DriftConfig, warning
from swarm.types import Reward, Rollout, Turn
from tests.rl_cases import on_policy, prompt, rollout, said, seen, some_rollouts, tiny
from tests.swarm_cases import TASK, call, engine, harness, says
from tests.test_rl_learner import CONFIG, equal, weights


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    Learner(tiny(), CONFIG).update(collect(some_rollouts(2)))


def of_versions(*versions: int) -> Rollout:
    """A turn of two tokens of each version."""
    spans = [prompt(1)]
    for v in versions:
        spans += [said(2, 3, version=v), seen(4)]
    return rollout(spans)


def test_every_token_keeps_the_version_of_the_weights_that_sampled_it() -> None:
    batch = collect([of_versions(3, 4), rollout([prompt(1), said(2, version=4)], [prompt(3), said(5, version=5)])])
    assert batch.version_N.tolist() == [3, 3, 4, 4, 4, 5]


async def test_a_rollout_that_goes_on_across_an_update_has_tokens_of_both_versions() -> None:
    works = engine(says(Turn("", (call("echo", text="x"),)), Turn("done")))
    h = replace(harness(says()), engine=works)
    state = await step(h, begin(h, TASK, seed=1))
    works.version = 1
    state = await step(h, state)
    batch = collect([replace(close(state), reward=Reward({"perf": 1.0}, {"perf": 1.0}))])
    first, second = (len(s.ids) for s in state.segment.spans if s.kind == "sampled")
    assert batch.version_N.tolist() == [0] * first + [1] * second


def test_a_rollout_is_dropped_and_counted_when_any_of_its_tokens_is_too_old() -> None:
    rollouts = [of_versions(2, 2), of_versions(1, 2), of_versions(2, 1), of_versions(1, 1), of_versions(3)]
    batch = collect(rollouts, oldest=2)
    assert batch.left_out == {"stale": 3}
    assert batch.version_N.tolist() == [2, 2, 2, 2, 3, 3]


def test_the_oldest_version_itself_is_kept_and_without_a_bound_all_are() -> None:
    assert len(collect([of_versions(2)], oldest=2)) == 2
    assert collect([of_versions(0), of_versions(9)]).left_out == {}


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=5), st.integers(0, 4))
def test_what_is_kept_and_what_is_dropped_is_all_there_was(versions: list[list[int]], oldest: int) -> None:
    batch = collect([of_versions(*v) for v in versions], oldest=oldest)
    kept = [v for v in versions if min(v) >= oldest]
    assert batch.version_N.tolist() == [x for v in kept for x in v for _ in range(2)]
    assert len(batch.reward_R) + batch.left_out.get("stale", 0) == len(versions)


def test_a_truncated_rollout_can_be_stale_and_a_failed_one_is_counted_as_failed() -> None:
    old = [replace(r, trace=replace(r.trace, status=s)) for r in [of_versions(0)] for s in ("truncated", "error")]
    assert collect(old, oldest=1).left_out == {"stale": 1, "failed": 1}


@pytest.mark.parametrize(("staleness", "oldest"), [(0, [0, 1, 2]), (1, [-1, 0, 1]), (2, [-2, -1, 0])])
def test_the_learner_takes_tokens_so_many_updates_behind_and_none_older(staleness: int, oldest: list[int]) -> None:
    learner = Learner(tiny(), replace(CONFIG, max_staleness=staleness))
    for k, want in enumerate(oldest):
        assert learner.oldest == want
        assert len(collect([of_versions(k - staleness)], oldest=learner.oldest)) == 2
        assert collect([of_versions(k - staleness - 1)], oldest=learner.oldest).left_out == {"stale": 1}
        learner.update(collect([of_versions(k)]))


def test_an_update_says_how_far_behind_its_oldest_token_is_and_how_many_were_dropped() -> None:
    learner = Learner(tiny(), replace(CONFIG, max_staleness=2))
    for _ in range(3):
        learner.update(collect([of_versions(learner.updates)]))
    batch = collect([of_versions(3, 3), of_versions(1, 3), of_versions(0, 3)], oldest=learner.oldest)
    metrics = learner.update(batch)
    assert (metrics.staleness, metrics.left_out, metrics.rollouts) == (2, {"stale": 1}, 2)


def test_a_batch_of_nothing_but_stale_rollouts_changes_no_weight_and_counts_as_an_update() -> None:
    learner = Learner(tiny(), CONFIG)
    before = weights(learner)
    metrics = learner.update(collect([of_versions(-1)], oldest=learner.oldest))
    assert equal(before, weights(learner))
    assert (metrics.left_out, metrics.tokens, metrics.staleness, learner.updates) == ({"stale": 1}, 0, 0, 1)


def test_stale_rollouts_have_no_part_in_the_gradient() -> None:
    fresh, a, b = some_rollouts(4), Learner(tiny(), CONFIG), Learner(tiny(), CONFIG)
    a.update(collect(fresh, oldest=0))
    b.update(collect([of_versions(-1), *fresh, of_versions(-2)], oldest=0))
    assert equal(weights(a), weights(b))


def test_a_warning_of_drift_says_when_old_tokens_are_in_it() -> None:
    seen_ = Drift(0.5, 0.5, 0.1, 1.0)
    assert warning(seen_, DriftConfig()).endswith("(5%)")
    assert warning(seen_, DriftConfig(), staleness=2).endswith("(5%), the oldest tokens 2 updates behind")


def test_an_update_on_old_tokens_says_so_in_its_alarm() -> None:
    learner = Learner(tiny(), replace(CONFIG, max_staleness=1))
    batch = on_policy(learner.policy, collect(some_rollouts(4)))
    learner.update(batch)
    off = replace(batch, logp_rollout_N=batch.logp_rollout_N - 1.0)
    assert torch.equal(off.version_N, torch.zeros_like(off.version_N))
    assert learner.update(off).alarms[0].endswith("the oldest tokens 1 updates behind")
