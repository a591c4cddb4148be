"""The sampler: what it draws, how often, and the log-probability that it reports."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarm.engine.kernels import sampled


def draw(
    logits: list[float], count: int = 1, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    fill = np.ones(count)
    places = np.arange(count, dtype=np.uint64)
    return sampled(rows, fill * temperature, fill * top_p, np.full(count, seed, np.uint64), places)


def test_tokens_come_as_often_as_their_probability_says():
    ids, _ = draw([math.log(0.5), math.log(0.3), math.log(0.2)], 20_000)
    # Three standard deviations of 0.0035.
    assert np.bincount(ids) / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.011)


def test_the_logprob_is_that_of_the_whole_softmax_after_temperature():
    logits = [0.0, math.log(2), math.log(5)]
    ids, logp = draw(logits, 200, temperature=0.5)
    # exp(2 x): 1, 4, 25 of 30.
    assert set(ids.tolist()) == {0, 1, 2}
    assert logp == pytest.approx([math.log([1 / 30, 4 / 30, 25 / 30][i]) for i in ids], abs=1e-6)


def test_temperature_zero_takes_the_best_and_reports_its_logprob_at_one():
    ids, logp = draw([0.0, math.log(3)], 50, temperature=0)
    assert set(ids.tolist()) == {1}
    assert logp == pytest.approx(math.log(0.75), abs=1e-6)


def test_top_p_keeps_the_smallest_set_and_renormalises():
    # 0.5 alone is less than 0.6; with 0.3 it is enough: 5/8 and 3/8 are left.
    ids, logp = draw([math.log(0.2), math.log(0.5), math.log(0.3)], 500, top_p=0.6)
    assert set(ids.tolist()) == {1, 2}
    assert logp == pytest.approx([math.log({1: 5 / 8, 2: 3 / 8}[i]) for i in ids], abs=1e-6)


def test_an_impossible_token_is_never_drawn():
    ids, _ = draw([-200.0, 0.0, -200.0], 500)
    assert set(ids.tolist()) == {1}


def test_seeds_and_places_draw_differently():
    a, _ = draw([0.0] * 64, 200, seed=1)
    b, _ = draw([0.0] * 64, 200, seed=2)
    assert len(set(a.tolist())) > 50
    assert (a == b).mean() < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_marked(bad: float):
    ids, _ = draw([0.0, bad, 1.0])
    assert ids.tolist() == [-1]


def test_a_long_row_agrees_with_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=1003).astype(np.float32) * 3
    ids, logp = sampled(
        np.tile(logits, (300, 1)), np.ones(300), np.ones(300), np.zeros(300, np.uint64), np.arange(300, dtype=np.uint64)
    )
    x = logits.astype(np.float64)
    want = x - x.max() - np.log(np.exp(x - x.max()).sum())
    np.testing.assert_allclose(logp, want[ids], atol=1e-6)
