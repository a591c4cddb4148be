"""What a policy says today where it said something once: every recorded turn is sampled again after the same context.

    record ─▶ the context and the seed of each turn ─▶ engine ─▶ the first token that differs, and how far the
                                                                 log-probabilities before it are from the recorded

Equal seeds draw equal numbers, so a token differs only where the distribution has moved across one of them: with the
weights that made the record there is no difference. Not here: what a rollout would have become (`swarm.fork`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio
from msgspec import structs

from swarm.kept import RecordGap, lacks, places_of, turns_of
from swarm.replay import first_apart, tree
from swarm.seeds import derive
from swarm.types import Completion, Engine, EngineError, Rollout, Sampling, Segment, Trace

Engines = Callable[[Trace], Engine | None]
"""Who says an agent's turns today; None: nobody, its turns are left out."""


@dataclass(frozen=True, slots=True)
class Said:
    """A turn as it was recorded and as it is said today.

    `at`: the first token that differs, counted from 0, or -1. `drift`: the largest difference of log-probabilities, in
    nats, over the tokens before it. `error`: why the engine gave none.
    """

    agent: str
    turn: int
    recorded: tuple[int, ...]
    today: tuple[int, ...]
    at: int
    drift: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn that a policy sampled: after which ids, how, and what it said."""

    agent: str
    turn: int
    ids: list[int]
    sampling: Sampling
    said: Completion


async def recheck(rollout: Rollout, engines: Engines, *, at_once: int = 64) -> list[Said]:
    """All turns that were sampled, agent by agent, in the order in which they were said. Raises RecordGap."""
    if why := lacks(rollout):
        raise RecordGap(why)
    served = [(r.trace, engine) for r in tree(rollout) if (engine := engines(r.trace)) is not None]
    asked = [(turn, engine) for trace, engine in served for turn in sampled(trace)]
    found: dict[int, Said] = {}
    limit = trio.CapacityLimiter(at_once)

    async def ask(k: int, turn: Sampled, engine: Engine) -> None:
        async with limit:
            found[k] = await _again(turn, engine)

    async with trio.open_nursery() as nursery:
        for k, (turn, engine) in enumerate(asked):
            nursery.start_soon(ask, k, turn, engine)
    return [found[k] for k in range(len(asked))]


def sampled(trace: Trace) -> Iterator[Sampled]:
    """The turns of a trace that were sampled. Raises RecordGap for a trace that cannot be replayed."""
    setup, segments = trace.setup, trace.segments
    if setup is None:
        raise RecordGap(f"{trace.agent}: its record has no setup")
    places = places_of(trace)
    for turn, (place, said) in enumerate(zip(places, turns_of(trace), strict=True)):
        if trace.acts[turn].given:
            continue
        last = turn + 1 == len(places) or places[turn + 1].segment > place.segment
        summary = last and [s.opened_by for s in segments[place.segment + 1 : place.segment + 2]] == ["compaction"]
        terms = setup.terms
        most = terms.context.summary_tokens if summary else terms.sampling.max_tokens
        sampling = structs.replace(terms.sampling, max_tokens=most, seed=derive(setup.seed, turn))
        ids = Segment(segments[place.segment].spans[: place.span]).ids
        yield Sampled(trace.agent, turn, ids, sampling, said)


async def _again(turn: Sampled, engine: Engine) -> Said:
    was = turn.said
    try:
        now = await engine.generate(turn.ids, turn.sampling)
    except EngineError as e:
        return Said(turn.agent, turn.turn, was.ids, (), 0, 0.0, str(e))
    at = first_apart(was.ids, now.ids)
    shared = len(was.ids) if at < 0 else at
    pairs = zip(was.logprobs[:shared], now.logprobs[:shared], strict=True)
    return Said(turn.agent, turn.turn, was.ids, now.ids, at, max((abs(a - b) for a, b in pairs), default=0.0))
