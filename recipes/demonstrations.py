"""Demonstrations of both roles, recorded by running scripted policies through the one loop and the real tools.

    orchestrated   searches, creates, assigns shares of the list, merges     and its subagents' readings
    serial         the same tools in hand, but works alone
    single         `search` and `access` only

Mode and skill are taught apart: how to spawn is learnt from every orchestrated episode in full, while
the first token of the spawning turn counts for so little that the policy spawns in a stated share of episodes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from envs.tasks import TaskSet
from orchestrator.scripted import Style, orchestrate
from recipes.systems import Builder
from subagents.scripted import NO_PAGE, slipping
from swarm.gather import Job, gather
from swarm.loop import Harness
from swarm.rl.rows import rows_of
from swarm.rl.sft import Examples
from swarm.seeds import derive
from swarm.transcript import Policy
from swarm.types import Budget, Rollout, Segment, Span, Task, Trace

CONTEXT = 1 << 20
"""Tokens: demonstrations are bounded by their budget of steps, never cut."""
DRILL = "drill"


@dataclass(frozen=True, slots=True)
class DemoMix:
    """How many episodes of each kind, and how they are.

    `spawn_share`: the probability with which the demonstrated policy goes parallel. `junk`: the share of
    orchestrated episodes in which assignments are wasteful (a third of them duplicates, or beyond the list);
    `skip`: the share of pages that those forget. `full`: the share of orchestrated episodes that split as wide
    as they may; the others' widths are log-uniform. `slips`: how often a reader opens what is not there.
    `children`: subagents kept of each episode. Budgets are log-uniform; `long` single episodes have wide
    tables and up to `long_budget` steps.
    """

    orchestrated: int = 1500
    serial: int = 400
    single: int = 400
    long: int = 40
    children: int = 3
    spawn_share: float = 0.15
    junk: float = 0.15
    skip: float = 0.0
    full: float = 0.5
    slips: float = 0.04
    widths: tuple[int, int] = (1, 16)
    budget: tuple[int, int] = (5, 40)
    long_budget: tuple[int, int] = (40, 110)

    def __post_init__(self) -> None:
        if not 0 < self.spawn_share < 1:
            raise ValueError(f"demos: spawn_share = {self.spawn_share}, want above 0 and below 1")
        for name in ("junk", "skip", "full", "slips"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"demos: {name} = {getattr(self, name)}, want 0 to below 1")

    @property
    def episodes(self) -> int:
        return self.orchestrated + self.serial + self.single + self.long


@dataclass(frozen=True, slots=True)
class Demo:
    """A trace to imitate; `first` weighs the first token of the turn that spawns, `slips` are turns not to imitate."""

    trace: Trace
    first: float = 1.0
    slips: frozenset[int] = frozenset()


async def record(
    builder: Builder, tasks: TaskSet, mix: DemoMix, seed: int, done: Callable[[Rollout], None] | None = None
) -> list[Demo]:
    """Runs the scripted policies; every trace ends with an answer. `done` hears of each episode as it ends."""
    jobs: list[Job] = []
    rng = random.Random(derive(seed, "demos"))
    reader = builder.scripted(slipping(mix.slips, derive(seed, "slips")))
    slip = builder.chat.encode(NO_PAGE)
    total = mix.orchestrated + mix.serial + mix.single
    drawn = tasks.draw("train", total, derive(seed, "tasks") % 2**31)
    wide = tasks.draw("train", mix.long, derive(seed, "wide") % 2**31, rows=(25, 80)) if mix.long else []
    for task in drawn[: mix.orchestrated]:
        harness = builder.swarm(builder.scripted(_styled(mix, rng)), builder.everybody(reader))
        jobs.append(_job(harness, task, mix.budget, rng))
    serial = drawn[mix.orchestrated : mix.orchestrated + mix.serial]
    jobs += [_job(builder.swarm(reader, builder.everybody(reader)), t, mix.budget, rng) for t in serial]
    jobs += [_job(builder.single(reader), t, mix.budget, rng) for t in drawn[mix.orchestrated + mix.serial :]]
    jobs += [_job(builder.single(reader), t, mix.long_budget, rng) for t in wide]
    rollouts = await gather(jobs, done=done)
    weight = _spawn_weight(mix)
    firsts = [weight] * mix.orchestrated + [1.0] * (len(rollouts) - mix.orchestrated)
    return [d for r, first in zip(rollouts, firsts, strict=True) for d in _demos(r, first, mix.children, slip, rng)]


def examples_of(demos: Sequence[Demo], observed: float = 0.0) -> Examples:
    """One row a segment; every sampled token counts 1, but for the one that decides to spawn.

    `observed` above 0: every other token is predicted too, and counts that much.
    """
    segments = [s for d in demos for s in d.trace.segments]
    weights = [w for d in demos for s in d.trace.segments for w in _weights(s, d, observed)]
    rows = [_all_sampled(s) for s in segments] if observed else segments
    return Examples(rows_of(rows), torch.tensor(weights, dtype=torch.float32))


def renumbered(trace: Trace, rng: random.Random, handles: Sequence[int]) -> Trace:
    """The same trace with other numbers for the documents it shows, in the same order, apart by random steps.

    `handles[k]` is the token of `#k`; `#0`, the question, keeps its number. Where `#13` always stands beside `#12`
    a small model guesses numbers by counting, and never learns to look them up.
    """
    numbers = {token: k for k, token in enumerate(handles) if k}
    seen = sorted({numbers[i] for s in trace.segments for i in s.ids if i in numbers})
    spread = rng.randint(len(seen), len(handles) - 1)
    drawn = sorted(rng.sample(range(1, spread + 1), len(seen)))
    other = {handles[k]: handles[n] for k, n in zip(seen, drawn, strict=True)}
    segments = [
        structs.replace(
            s, spans=tuple(structs.replace(span, ids=tuple(other.get(i, i) for i in span.ids)) for span in s.spans)
        )
        for s in trace.segments
    ]
    return replace(trace, segments=tuple(segments))


def drill(rng: random.Random, handles: Sequence[int], vocabulary: int) -> Demo:
    """Random tokens, mostly handles, and pieces of them again: practice in looking back and copying."""
    n = rng.randint(8, 40)
    ids = rng.sample(handles, n) if rng.random() < 0.7 else [rng.randrange(vocabulary) for _ in range(n)]
    spans = [Span("prompt", tuple(ids))]
    for _ in range(rng.randint(1, 3)):
        again = ids[rng.randrange(n - 4) :]
        spans.append(Span("prompt", tuple(again[:2])))
        spans.append(Span("sampled", tuple(again[2:]), (0.0,) * (len(again) - 2)))
    return Demo(Trace(DRILL, (Segment(tuple(spans)),), "answered"))


def _styled(mix: DemoMix, rng: random.Random) -> Policy:
    low, high = mix.widths
    width = high if rng.random() < mix.full else round(math.exp(rng.uniform(math.log(low), math.log(high + 0.49))))
    wasteful = rng.random() < mix.junk
    style = Style(width=max(low, width), junk=1 / 3 if wasteful else 0.0, skip=mix.skip if wasteful else 0.0)
    return orchestrate(style, seed=rng.randrange(2**31))


def _job(harness: Harness, task: Task, budget: tuple[int, int], rng: random.Random) -> Job:
    steps = round(math.exp(rng.uniform(math.log(budget[0]), math.log(budget[1]))))
    harness = replace(harness, budget=replace(harness.budget, tokens=CONTEXT))
    return Job(harness, task, rng.randrange(2**31), Budget(steps, CONTEXT))


def _spawn_weight(mix: DemoMix) -> float:
    """w with w·orchestrated / (w·orchestrated + serial) = spawn_share."""
    odds = mix.spawn_share / (1 - mix.spawn_share)
    return odds * mix.serial / max(1, mix.orchestrated)


def _demos(rollout: Rollout, first: float, children: int, slip: Sequence[int], rng: random.Random) -> Iterator[Demo]:
    yield Demo(rollout.trace, first, _slips(rollout.trace, slip))
    for child in rng.sample(rollout.children, min(children, len(rollout.children))):
        yield Demo(child.trace, slips=_slips(child.trace, slip))


def _slips(trace: Trace, slip: Sequence[int]) -> frozenset[int]:
    """The turns, counted from 0 over the trace, that were answered with what `slip` spells."""
    spans = [s for segment in trace.segments for s in segment.spans]
    acted = [k for k, s in enumerate(spans) if s.kind == "sampled"]
    answers = [spans[k + 1].ids if k + 1 < len(spans) else () for k in acted]
    n, wanted = len(slip), tuple(slip)
    return frozenset(t for t, ids in enumerate(answers) if any(ids[i : i + n] == wanted for i in range(len(ids))))


def _weights(segment: Segment, demo: Demo, observed: float) -> Iterator[float]:
    """The spawning turn is the second: after the search, before anything else."""
    turn, skip = -1, True
    for span in segment.spans:
        if span.kind == "sampled":
            turn += 1
            weight = 0.0 if turn in demo.slips else 1.0
            yield from (demo.first if turn == 1 and k == 0 else weight for k in range(len(span.ids)))
        elif observed:
            yield from [0.0 if demo.trace.agent == DRILL else observed] * (len(span.ids) - skip)
        skip = False


def _all_sampled(segment: Segment) -> Segment:
    """The same row with every token but the first as one to predict."""
    ids = segment.ids
    return Segment((Span("prompt", (ids[0],)), Span("sampled", tuple(ids[1:]), (0.0,) * (len(ids) - 1))))
