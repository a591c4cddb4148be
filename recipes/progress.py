"""One bar with the time left for a job of several phases, and a line with the latest numbers.

How long a phase takes is first a guess and then measured; a slower machine stretches the
guesses of the phases to come as well. On a terminal the bar is drawn in place; elsewhere a plain
line is printed every ten seconds. Not here: where the numbers come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_SECONDS = 10.0
_GUESS = 0.1
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
    units = [unit_seconds(p, s, slow) for p, s in zip(phases, spent, strict=True)]
    done = sum(s.done * u for s, u in zip(spent, units, strict=True))
    open_left = [(p.units - s.done) * u for p, s, u in zip(phases, spent, units, strict=True) if not s.closed]
    left = sum(max(0.0, x) for x in open_left)
    begun = min(since, 0.9 * max(0.0, open_left[0])) if open_left else 0.0  # a late unit eats no other phase's time
    return (done + begun) / (done + left) if done + left else 1.0, left - begun


class Progress:
    """`with Progress(console, {"ppo": 40, "evaluation": 1200}) as p: p.advance("ppo"); p.note("item-F1 .6")`.

    `phases` are units of work by name, in the order in which they come. `guess`: seconds a unit, where
    units of the phases differ much; only their ratios matter once something is measured.
    """

    def __init__(
        self,
        console: Console | None,
        phases: Mapping[str, int],
        guess: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phases = [Phase(name, units, (guess or {}).get(name, _GUESS)) for name, units in phases.items()]
        self._spent = [Spent() for _ in phases]
        self._console, self._clock = console or Console(), clock
        self._start = self._last = clock()
        self._printed = float("-inf")
        self._at: int | None = None
        self._share, self._note = 0.0, ""
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

    def begin(self, name: str) -> None:
        """Goes to a phase; those before it are over."""
        self._at = [p.name for p in self._phases].index(name)
        self._close(self._at)
        self._last, self._note = self._clock(), ""
        self._say(always=True)

    def skip(self, name: str, units: int) -> None:
        """Units of a phase that an earlier process did: they count, and say nothing about the speed."""
        s = self._spent[self._entered(name)]
        self._spent[self._entered(name)] = replace(s, done=s.done + units)

    def advance(self, name: str, units: int = 1) -> None:
        """Units of a phase are done. The first call begins the phase if `begin` did not, and is not measured."""
        if self._at is None or self._phases[self._at].name != name:
            return self.skip(name, units)
        now, s = self._clock(), self._spent[self._at]
        self._spent[self._at] = Spent(s.done + units, s.measured + units, s.seconds + now - self._last)
        self._last = now
        self._say()

    def note(self, text: str) -> None:
        """The latest numbers, shown beside the count."""
        self._note = text
        self._say()

    @property
    def share(self) -> float:
        """Share of the work done, from 0 to 1; it never falls."""
        self._share = max(self._share, self._forecast()[0])
        return self._share

    @property
    def seconds_left(self) -> float:
        return self._forecast()[1]

    def _forecast(self) -> tuple[float, float]:
        return forecast(self._phases, self._spent, 0.0 if self._at is None else self._clock() - self._last)

    def _entered(self, name: str) -> int:
        if self._at is None or self._phases[self._at].name != name:
            self.begin(name)
        return [p.name for p in self._phases].index(name)

    def _close(self, before: int) -> None:
        for k, (phase, s) in enumerate(zip(self._phases[:before], self._spent[:before], strict=True)):
            self._spent[k] = Spent(phase.units, s.measured, s.seconds, closed=True)

    def _say(self, *, always: bool = False) -> None:
        now = self._clock()
        if self._console.is_terminal or not (always or now - self._printed >= _PLAIN_SECONDS):
            return
        self._printed = now
        self._console.print(f"{self._times()} · {self._line()}", highlight=False, markup=False)

    def _times(self) -> str:
        elapsed = self._clock() - self._start
        return f"{100 * self.share:3.0f} % · {clock_text(elapsed)} elapsed · {clock_text(self.seconds_left)} left"

    def _line(self) -> str:
        if self._at is None:
            return "starting"
        phase, done = self._phases[self._at], self._spent[self._at].done
        count = f"{phase.name} {done}/{phase.units}" if phase.units > 1 else phase.name
        return f"{count} · {self._note}" if self._note else count

    def _render(self) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(ProgressBar(total=1.0, completed=self.share), self._times())
        return Group(row, Text(self._line(), style="dim", no_wrap=True, overflow="ellipsis"))


def clock_text(seconds: float) -> str:
    """`1:05`, `1:01:05`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
