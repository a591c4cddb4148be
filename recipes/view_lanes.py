"""A rollout as lanes on two axes: where every turn of every agent lies in critical steps, and about where in seconds.

    main     ▇▇      ▇          ▇        a stage: the agent's own steps, then those of its slowest subagent
      a        ▇▇▇▇▇                     slack 0: on the critical path
      b        ▇▇▇                       slack 2: two steps sooner than the slowest

Steps are exact. An agent's seconds are measured as a whole; within an agent they are shared out by tokens, so that a
turn's place in seconds is about right, and an agent's length is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from recipes.view_tokens import turns_of
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
    on the longest chain from the first agent.
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
    )


def started(rollout: Rollout, turns: int) -> list[list[Rollout]]:
    """The subagents that each turn started, as the ledger counts them.

    Those that it does not count, since they were off the longest chain, stand with the turn of the one before.
    """
    groups: list[list[Rollout]] = [[] for _ in range(turns)]
    left = list(rollout.children)
    last = 0
    for k, stage in enumerate(rollout.ledger.stages):
        for steps in stage.subagents:
            if left and left[0].ledger.critical_steps != steps:
                place = next((i for i, c in enumerate(left) if c.ledger.critical_steps == steps), 0)
                groups[last] += left[:place]
                del left[:place]
            groups[k] += left[:1]
            del left[:1]
            last = k
    if left:
        groups[last] += left
    return groups


def _turns(rollout: Rollout, at: _First) -> list[Turn]:
    said = turns_of(rollout.trace)
    stages = rollout.ledger.stages
    n = max(len(said), len(stages))
    stages = (*stages, *(Stage(0) for _ in range(n - len(stages))))
    spans = [*said, *((0, ()) for _ in range(n - len(said)))]
    waited = [max((c.ledger.seconds for c in group), default=0.0) for group in started(rollout, n)]
    own_s = _shared(max(0.0, rollout.ledger.seconds - sum(waited)), [_tokens(s) for _, s in spans])
    turns: list[Turn] = []
    step, second = at.start, at.start_s
    for k, (window, sampled) in enumerate(spans):
        logprobs = [x for span in sampled for x in span.logprobs]
        turns.append(
            Turn(
                start=step,
                own=stages[k].main,
                steps=stages[k].critical_steps,
                start_s=second,
                own_s=own_s[k],
                seconds=own_s[k] + waited[k],
                window=window,
                tokens=_tokens(sampled),
                logprob=sum(logprobs) / len(logprobs) if logprobs else None,
                lowest=min(logprobs, default=None),
            )
        )
        step, second = step + stages[k].critical_steps, second + own_s[k] + waited[k]
    return turns


def _tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.ids) for span in spans)


def _shared(seconds: float, tokens: Sequence[int]) -> list[float]:
    """Seconds by tokens; a turn of none counts as one."""
    whole = sum(max(1, n) for n in tokens)
    return [seconds * max(1, n) / whole for n in tokens]
