"""A rollout as lanes on two axes: where every turn of every agent lies in critical steps, and about where in seconds.

    main     ▇▇      ▇          ▇        a stage: the agent's own steps, then those of its slowest subagent
      a        ▇▇▇▇▇                     slack 0: on the critical path
      b        ▇▇▇                       slack 2: two steps sooner than the slowest

Steps are exact, and so are seconds where the record has them turn by turn (`Trace.acts`). Where it has only those of
the whole agent, they are shared out by tokens: a turn's place is about right, and an agent's length is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from recipes.view.tokens import turns_of
from swarm.types import Ledger, Rollout, Span, Stage


class Turn(Struct):
    """`start` and `own` in critical steps, `steps` those of the whole stage; `start_s`, `own_s`, `seconds` likewise.

    `window` counts the agent's context windows; `logprob` is the mean of its `tokens` sampled tokens, `lowest` the
    least. `children` are lanes. `signals`: means of the learner's values, where there are any.
    """

    start: int
    own: int
    steps: int
    start_s: float
    own_s: float
    seconds: float
    window: int
    tokens: int
    logprob: float | None
    lowest: float | None
    children: tuple[int, ...] = ()
    signals: dict[str, list[float]] = {}


class Lane(Struct):
    """One agent. `turn` is the turn of `parent` that it was started in, -1 for the first agent.

    `slack` and `slack_s`: how much sooner than the slowest of its stage it was through. `critical` and `critical_s`:
    on the longest chain from the first agent. `timed`: its turns' seconds are measured. `wanted`: rows of the gold
    table that it brought, `new` those that none started before it had.
    """

    lane: int
    parent: int
    turn: int
    name: str
    status: str
    error: str
    checkpoint: str
    prompt: str
    answer: str
    rows: int
    start: int
    steps: int
    start_s: float
    seconds: float
    ledger: Ledger
    slack: int
    slack_s: float
    critical: bool
    critical_s: bool
    turns: list[Turn]
    timed: bool
    wanted: int = 0
    new: int = 0


def lanes_of(root: Rollout) -> tuple[list[Lane], list[Rollout]]:
    """The agents in the order in which they were started, every one before its own; and the rollout of each."""
    lanes: list[Lane] = []
    rollouts: list[Rollout] = []
    _place(root, _First(), lanes, rollouts)
    return lanes, rollouts


class _First(Struct, frozen=True):
    """Where an agent begins."""

    parent: int = -1
    turn: int = -1
    start: int = 0
    start_s: float = 0.0
    slack: int = 0
    slack_s: float = 0.0
    critical: bool = True
    critical_s: bool = True


def _place(rollout: Rollout, at: _First, lanes: list[Lane], rollouts: list[Rollout]) -> None:
    lane = _lane(rollout, at, len(lanes))
    lanes.append(lane)
    rollouts.append(rollout)
    for k, children in enumerate(started(rollout, len(lane.turns))):
        turn = lane.turns[k]
        slowest = max((c.ledger.critical_steps for c in children), default=0)
        slowest_s = max((c.ledger.seconds for c in children), default=0.0)
        numbers: list[int] = []
        for child in children:
            slack, slack_s = slowest - child.ledger.critical_steps, slowest_s - child.ledger.seconds
            numbers.append(len(lanes))
            first = _First(
                parent=lane.lane,
                turn=k,
                start=turn.start + turn.own,
                start_s=turn.start_s + turn.own_s,
                slack=slack,
                slack_s=slack_s,
                critical=lane.critical and slack == 0,
                critical_s=lane.critical_s and slack_s == 0,
            )
            _place(child, first, lanes, rollouts)
        turn.children = tuple(numbers)


def _lane(rollout: Rollout, at: _First, number: int) -> Lane:
    return Lane(
        lane=number,
        parent=at.parent,
        turn=at.turn,
        name=rollout.trace.agent,
        status=rollout.trace.status,
        error=rollout.trace.error,
        checkpoint=rollout.trace.checkpoint,
        prompt=rollout.prompt,
        answer=rollout.answer,
        rows=len(rollout.table),
        start=at.start,
        steps=rollout.ledger.critical_steps,
        start_s=at.start_s,
        seconds=rollout.ledger.seconds,
        ledger=rollout.ledger,
        slack=at.slack,
        slack_s=at.slack_s,
        critical=at.critical,
        critical_s=at.critical_s,
        turns=_turns(rollout, at),
        timed=bool(rollout.trace.acts),
    )


def started(rollout: Rollout, turns: int) -> list[list[Rollout]]:
    """The subagents that each turn started: as the record tells, or as the ledger counts them.

    Those that a ledger does not count, since they were off the longest chain, stand with the turn of the one before.
    """
    groups: list[list[Rollout]] = [[] for _ in range(turns)]
    left = list(rollout.children)
    last = 0
    for k, costs in enumerate(_costs(rollout)):
        for steps in costs:
            place = next((i for i, c in enumerate(left) if steps in (None, c.ledger.critical_steps)), 0)
            groups[last if place else k] += left[:place]
            groups[k] += left[place : place + 1]
            del left[: place + 1]
            last = k
    if left:
        groups[last] += left
    return groups


def _costs(rollout: Rollout) -> list[tuple[int | None, ...]]:
    """For each turn, the critical steps of those that it started, None where any will do."""
    acts = rollout.trace.acts
    if acts and sum(len(act.children) for act in acts) == len(rollout.children):
        return [(None,) * len(act.children) for act in acts]
    return [stage.subagents for stage in rollout.ledger.stages]


def _turns(rollout: Rollout, at: _First) -> list[Turn]:
    said = turns_of(rollout.trace)
    stages = rollout.ledger.stages
    n = max(len(said), len(stages), len(rollout.trace.acts))
    stages = (*stages, *(Stage(0) for _ in range(n - len(stages))))
    spans = [*said, *((0, ()) for _ in range(n - len(said)))]
    times = _times(rollout, [_tokens(sampled) for _, sampled in spans])
    turns: list[Turn] = []
    step, second = at.start, at.start_s
    for (window, sampled), stage, (own_s, seconds) in zip(spans, stages, times, strict=True):
        logprobs = [x for span in sampled for x in span.logprobs]
        turns.append(
            Turn(
                start=step,
                own=stage.main,
                steps=stage.critical_steps,
                start_s=second,
                own_s=own_s,
                seconds=seconds,
                window=window,
                tokens=_tokens(sampled),
                logprob=sum(logprobs) / len(logprobs) if logprobs else None,
                lowest=min(logprobs, default=None),
            )
        )
        step, second = step + stage.critical_steps, second + seconds
    return turns


def _times(rollout: Rollout, tokens: Sequence[int]) -> list[tuple[float, float]]:
    """Of each turn the seconds of its own, and those with the wait for its subagents."""
    acts = rollout.trace.acts
    if acts:
        whole = [(a.seconds if a.children else a.seconds + a.calling, a.seconds + a.calling) for a in acts]
        return whole + [(0.0, 0.0)] * (len(tokens) - len(acts))
    waited = [max((c.ledger.seconds for c in group), default=0.0) for group in started(rollout, len(tokens))]
    own = _shared(max(0.0, rollout.ledger.seconds - sum(waited)), tokens)
    return [(a, a + b) for a, b in zip(own, waited, strict=True)]


def _tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.ids) for span in spans)


def _shared(seconds: float, tokens: Sequence[int]) -> list[float]:
    """Seconds by tokens; a turn of none counts as one."""
    whole = sum(max(1, n) for n in tokens)
    return [seconds * max(1, n) / whole for n in tokens]
