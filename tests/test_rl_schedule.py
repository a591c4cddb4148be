"""Annealed weights and learning rates."""

from __future__ import annotations

import pytest

from swarm.rl.schedule import Anneal, LrSchedule


def test_an_anneal_starts_at_its_start_and_is_half_way_at_half_its_steps() -> None:
    assert Anneal(0.3, 100).value(0) == 0.3
    assert Anneal(0.3, 100).value(50) == pytest.approx(0.15)


@pytest.mark.parametrize("steps", [1, 3, 7, 100])
def test_an_anneal_is_exactly_zero_at_its_steps_and_after_and_not_before(steps: int) -> None:
    weight = Anneal(0.3, steps)
    assert weight.value(steps) == weight.value(steps + 1) == weight.value(10**9) == 0.0
    assert weight.value(steps - 1) > 0.0


@pytest.mark.parametrize(
    ("start", "steps", "named"), [(-0.1, 5, "start"), (float("nan"), 5, "start"), (0.1, 0, "steps")]
)
def test_a_bad_anneal_is_refused_with_its_field(start: float, steps: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} = .*want"):
        Anneal(start, steps)


def test_a_warm_up_rises_linearly_and_reaches_the_peak_on_its_last_step() -> None:
    assert [LrSchedule(1.0, warmup=4).at(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_decay_ends_at_its_floor() -> None:
    lr = LrSchedule(2.0, warmup=2, total=12, decay="linear", floor=0.1)
    assert [lr.at(2), lr.at(7), lr.at(12), lr.at(99)] == pytest.approx([2.0, 1.1, 0.2, 0.2])


def test_a_cosine_decay_is_half_way_down_in_the_middle() -> None:
    lr = LrSchedule(2.0, total=10, decay="cosine")
    assert [lr.at(0), lr.at(5), lr.at(10)] == pytest.approx([2.0, 1.0, 0.0])


def test_a_decay_without_a_total_is_refused() -> None:
    with pytest.raises(ValueError, match="total = 0, want more than warmup = 0"):
        LrSchedule(1.0, decay="linear")
