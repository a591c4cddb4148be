"""One bar with the time left for a job of several phases, and a line with the latest numbers.

How long a phase takes is first a guess and then measured; a slower machine stretches the
guesses of the phases to come as well. On a terminal the bar is drawn in place; elsewhere a plain
line is printed every ten seconds. Not here: where the numbers come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_SECONDS = 10.0
_TRUST = 5.0  # seconds of measured work after which measurement outweighs the guesses


@dataclass(frozen=True, slots=True)
class Phase:
    """`Phase("ppo", 40, 6.0)`: 40 units of work (iterations), about 6 seconds each on a common machine."""

    name: str
    units: int
    guess: float

    def __post_init__(self) -> None:
        if self.units < 0 or not self.guess > 0:
            raise ValueError(f"phase {self.name}: {self.units} units of {self.guess} s, want 0 or more of more than 0")


@dataclass(frozen=True, slots=True)
class Spent:
    """What a phase has behind it. `measured` of the `done` units took `seconds`; the others were done earlier."""

    done: int = 0
    measured: int = 0
    seconds: float = 0.0
    closed: bool = False


def slowness(phases: Sequence[Phase], spent: Sequence[Spent]) -> float:
    """Measured over guessed time, 1.0 before anything is measured."""
    seconds = sum(s.seconds for s in spent)
    guessed = sum(p.guess * s.measured for p, s in zip(phases, spent, strict=True))
    return (seconds + _TRUST) / (guessed + _TRUST)


def unit_seconds(phase: Phase, spent: Spent, slow: float) -> float:
    """Seconds a unit: the measured mean, in which the stretched guess counts as one unit."""
    return (phase.guess * slow + spent.seconds) / (1 + spent.measured)


def forecast(phases: Sequence[Phase], spent: Sequence[Spent], since: float) -> tuple[float, float]:
    """(share of the work done, seconds left), `since` seconds after the last unit of the phase at work."""
    slow = slowness(phases, spent)
    done = left = 0.0
    for phase, s in zip(phases, spent, strict=True):
        unit = unit_seconds(phase, s, slow)
        done += s.done * unit
        left += 0.0 if s.closed else max(0, phase.units - s.done) * unit
    begun = min(since, 0.9 * left)
    return (done + begun) / (done + left) if done + left else 1.0, left - begun


class Progress:
    """`with Progress("wide_search", phases) as p: p.begin("ppo", done=12); p.advance(metrics={"item_f1": .6})`."""

    def __init__(
        self,
        title: str,
        phases: Sequence[Phase],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._phases, self._clock = title, list(phases), clock
        self._spent = [Spent() for _ in phases]
        self._console = console or Console()
        self._start = self._last = clock()
        self._printed = float("-inf")
        self._at: int | None = None
        self._share = 0.0
        self._metrics: Mapping[str, float] = {}
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close(len(self._phases))
            self._say(always=True)
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, name: str, done: int = 0) -> None:
        """Goes to a phase; those before it are over. `done` of its units were done by an earlier process."""
        self._at = [p.name for p in self._phases].index(name)
        self._close(self._at)
        self._spent[self._at] = Spent(done=done)
        self._last, self._metrics = self._clock(), {}
        self._say(always=True)

    def advance(self, units: int = 1, metrics: Mapping[str, float] | None = None) -> None:
        """Units of the phase are done; `metrics` replaces the numbers that are shown."""
        if self._at is None:
            raise RuntimeError("advance before begin")
        now, s = self._clock(), self._spent[self._at]
        self._spent[self._at] = Spent(s.done + units, s.measured + units, s.seconds + now - self._last)
        self._last = now
        self._metrics = self._metrics if metrics is None else metrics
        self._say()

    @property
    def share(self) -> float:
        """Share of the work done, from 0 to 1; it never falls."""
        since = self._clock() - self._last if self._at is not None else 0.0
        self._share = max(self._share, forecast(self._phases, self._spent, since)[0])
        return self._share

    @property
    def seconds_left(self) -> float:
        return forecast(self._phases, self._spent, self._clock() - self._last if self._at is not None else 0.0)[1]

    def _close(self, before: int) -> None:
        for k, (phase, s) in enumerate(zip(self._phases[:before], self._spent[:before], strict=True)):
            self._spent[k] = Spent(phase.units, s.measured, s.seconds, closed=True)

    def _say(self, *, always: bool = False) -> None:
        now = self._clock()
        if self._console.is_terminal or not (always or now - self._printed >= _PLAIN_SECONDS):
            return
        self._printed = now
        self._console.print(f"{self._title} {self._times()} · {self._line()}", highlight=False, markup=False)

    def _times(self) -> str:
        elapsed = self._clock() - self._start
        return f"{100 * self.share:3.0f} % · {clock_text(elapsed)} elapsed · {clock_text(self.seconds_left)} left"

    def _line(self) -> str:
        if self._at is None:
            return "starting"
        phase, done = self._phases[self._at], self._spent[self._at].done
        count = f"{phase.name} {done}/{phase.units}" if phase.units > 1 else phase.name
        return " · ".join([count, *(f"{k.rpartition('/')[2]} {v:.3g}" for k, v in self._metrics.items())])

    def _render(self) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(f"[bold]{escape(self._title)}[/bold]", ProgressBar(total=1.0, completed=self.share), self._times())
        return Group(row, Text(self._line(), style="dim", no_wrap=True, overflow="ellipsis"))


def clock_text(seconds: float) -> str:
    """`1:05`, `1:01:05`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
