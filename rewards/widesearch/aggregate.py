"""Over N trials of each instance: avg@N, max@N, pass@N and min@N of the seven values.

Not here: running trials, or guessing a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rewards.widesearch.spec import VALUES, Scores


class MissingTrialError(ValueError):
    """An instance has fewer trials than were asked for, so no mean over it would be comparable."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Means over instances of the mean, the largest and the least of N trials, by name of the value.

    Each value is maximised on its own: `max["f1_by_item"]` is Max@N, `max["score"]` is Pass@N.
    """

    trials: int
    instances: int
    avg: Mapping[str, float]
    max: Mapping[str, float]
    min: Mapping[str, float]

    @property
    def pass_at_n(self) -> float:
        return self.max["score"]


def aggregate(trials: Mapping[str, Sequence[Scores | None]], n: int) -> Aggregate:
    """Aggregates `{instance id: its first n trials}` (WideSearch, arXiv 2508.07999, section 4).

    Raises MissingTrialError when an instance has fewer than `n` trials or one of them is None, ValueError
    when there is no instance or `n` is below 1.
    """
    if n < 1 or not trials:
        raise ValueError(f"aggregate: {len(trials)} instances and n = {n}, want at least 1 of each")
    complete = [_complete(name, scores, n) for name, scores in trials.items()]
    return Aggregate(n, len(complete), _mean_of(fmean, complete), _mean_of(max, complete), _mean_of(min, complete))


def _complete(name: str, scores: Sequence[Scores | None], n: int) -> list[dict[str, float]]:
    found = [s.as_json() for s in scores[:n] if s is not None]
    if len(found) < n:
        raise MissingTrialError(f"instance {name}: {len(found)} trials, want {n}")
    return found


def _mean_of(over: Callable[[list[float]], float], instances: list[list[dict[str, float]]]) -> dict[str, float]:
    return {name: fmean(over([trial[name] for trial in trials]) for trials in instances) for name in VALUES}
