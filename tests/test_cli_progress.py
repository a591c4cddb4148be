"""The progress display, with a clock that the test turns."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from recipes.progress import Phase, Progress, Spent, clock_text, forecast, unit_seconds

PHASES = (Phase("world", 1, 10.0), Phase("ppo", 4, 5.0), Phase("evaluation", 100, 0.2))


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=False)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_before_anything_is_measured_the_guesses_stand() -> None:
    assert forecast(PHASES, [Spent()] * 3, since=0.0) == (0.0, 10 + 20 + 20)


def test_the_time_left_runs_down_within_a_unit() -> None:
    assert forecast(PHASES, [Spent()] * 3, since=5.0) == (0.1, 45.0)


def test_a_slow_machine_stretches_the_phases_to_come() -> None:
    spent = [Spent(1, 1, 25.0, closed=True), Spent(), Spent()]
    # (25 + 5) / (10 + 5) = 2: twice as slow as guessed, 40 s of guesses become 80.
    assert forecast(PHASES, spent, since=0.0)[1] == pytest.approx(80.0)


def test_measured_units_outweigh_the_guess() -> None:
    assert unit_seconds(Phase("ppo", 40, 5.0), Spent(9, 9, 18.0), slow=1.0) == pytest.approx(2.3)


def test_units_of_an_earlier_process_count_but_are_not_measured() -> None:
    with Progress(plain(), {"ppo": 40}, {"ppo": 5.0}, Clock()) as progress:
        progress.skip("ppo", 20)
        assert progress.share == pytest.approx(0.5)
        assert progress.seconds_left == pytest.approx(100.0)


def test_the_first_call_of_a_phase_begins_it_and_is_not_measured() -> None:
    clock = Clock(1000.0)
    with Progress(plain(), {"ppo": 40}, {"ppo": 5.0}, clock) as progress:
        clock.now = 2000.0
        progress.advance("ppo", 20)
        assert progress.seconds_left == pytest.approx(100.0)


def test_later_calls_are_measured() -> None:
    clock = Clock()
    with Progress(plain(), {"ppo": 3}, {"ppo": 5.0}, clock) as progress:
        progress.begin("ppo")
        clock.now = 20.0
        progress.advance("ppo", 2)
        # Slowness (20 + 5) / (10 + 5) = 5/3, a unit (5 · 5/3 + 20) / (1 + 2).
        assert progress.seconds_left == pytest.approx((25 / 3 + 20) / 3)


def test_a_phase_that_ended_early_is_over() -> None:
    with Progress(plain(), {"ppo": 4, "evaluation": 100}, {"evaluation": 0.2}, Clock()) as progress:
        progress.begin("ppo")
        progress.begin("evaluation")
        assert progress.seconds_left == pytest.approx(20.0)


def test_the_bar_never_falls() -> None:
    clock = Clock()
    with Progress(plain(), {"world": 1, "ppo": 4}, {"world": 10.0, "ppo": 5.0}, clock) as progress:
        progress.begin("world")
        clock.now = 9.0
        before = progress.share
        progress.begin("ppo")
        clock.now = 300.0
        progress.advance("ppo")
        assert progress.share >= before


def test_a_plain_line_comes_every_ten_seconds() -> None:
    clock, console = Clock(), plain()
    with Progress(console, {"ppo": 40}, None, clock) as progress:
        progress.begin("ppo")
        for now in (4.0, 8.0, 12.0, 16.0):
            clock.now = now
            progress.note("item-F1 0.61")
            progress.advance("ppo")
        lines = printed(console)
    assert len(lines) == 2
    assert lines[1].endswith("ppo 2/40 · item-F1 0.61")
    assert "0:12 elapsed" in lines[1]


def test_the_last_line_says_that_all_is_done() -> None:
    console = plain()
    with Progress(console, {"ppo": 4, "evaluation": 100}, None, Clock()) as progress:
        progress.begin("evaluation")
    assert printed(console)[-1] == "100 % · 0:00 elapsed · 0:00 left · evaluation 100/100"


def test_a_terminal_gets_a_bar_and_the_latest_numbers() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Progress(console, {"ppo": 4}, None, Clock()) as progress:
        progress.advance("ppo")
        progress.note("item-F1 0.5")
    text = "\n".join(printed(console))
    assert "━" in text
    assert "ppo 4/4 · item-F1 0.5" in text


def test_times_are_read_at_a_glance() -> None:
    assert [clock_text(s) for s in (-1.0, 5.4, 65.0, 3665.0)] == ["0:00", "0:05", "1:05", "1:01:05"]


def test_a_phase_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="phase ppo: 4 units of 0 s"):
        Phase("ppo", 4, 0)
