"""The core types: what was seen and said, what it cost, and the seams between parts.

Everything here is a frozen value or a protocol of one to three methods. Nothing here
knows a model, an environment or a reward: those meet through these types alone. What a swarm makes anew
every turn is a frozen `msgspec.Struct`, made in a tenth of the time of a frozen dataclass (changed copies by
`msgspec.structs.replace`); without `gc` where it holds nothing that could lead back to it.

    Rollout ── trace ── segments ── spans (token ids)
       │  └─ ledger ── stages
       └─ children (Rollouts of the subagents, in the order in which they were called)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from swarm.show import ledger_html, rollout_html, summary
from swarm.terms import Budget, Sampling, Setup, ToolSpec

SpanKind = Literal["prompt", "sampled", "observed"]
OpenedBy = Literal["start", "truncation", "compaction", "fork"]
Finish = Literal["stop", "length"]

Status = Literal["running", "answered", "exhausted", "truncated", "error"]
"""answered: ended by its own choice; exhausted: the visible budget forced the last turn
(a termination); truncated: cut from outside, by a deadline or the context limit;
error: the infrastructure failed, the rollout carries no information about the policy."""


class Span(Struct, frozen=True, gc=False):
    """A run of token ids of one origin: `Span("sampled", (17, 2), (-0.1, -0.3), version=4)`.

    `logprobs` (nats, at the sampling temperature) has one entry an id when sampled, none else.
    """

    kind: SpanKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    version: int = 0

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.kind == "sampled" else 0
        if len(self.logprobs) != expected:
            raise ValueError(
                f"{self.kind} span: {len(self.logprobs)} logprobs for {len(self.ids)} ids, want {expected}"
            )


class Segment(Struct, frozen=True, gc=False):
    """One context window, and one training row: its ids are the spans laid end to end."""

    spans: tuple[Span, ...]
    opened_by: OpenedBy = "start"

    @property
    def ids(self) -> list[int]:
        # A long context is laid together at the speed of a copy, not id by id.
        ids: list[int] = []
        for span in self.spans:
            ids += span.ids
        return ids

    @property
    def mask(self) -> list[bool]:
        """True where the policy acted."""
        return [span.kind == "sampled" for span in self.spans for _ in span.ids]

    @property
    def logprobs(self) -> list[float]:
        """One entry an id, 0.0 where the policy did not act."""
        return [x for span in self.spans for x in (span.logprobs or (0.0,) * len(span.ids))]

    def extended(self, *spans: Span) -> Segment:
        return Segment((*self.spans, *[s for s in spans if s.ids]), self.opened_by)


class Act(Struct, frozen=True, gc=False, omit_defaults=True):
    """One turn as it went: `Act(17, results=(ToolResult(("created",)), ToolResult(("none",))), children=(1,))`.

    `sampled`: how many ids were said, `cached` and `queued` (seconds) as its `Completion` has them. `results` are what
    its calls gave back, as it came, without the rollouts of children; these ran for the calls at the places `children`,
    and those at `refused` were not run. `seconds` passed until it was said, `calling` until all results were there.
    `given`: the ids of a turn that nobody sampled, put in the agent's mouth by a fork.
    """

    sampled: int
    cached: int = 0
    queued: float = 0.0
    results: tuple[ToolResult, ...] = ()
    children: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    seconds: float = 0.0
    calling: float = 0.0
    given: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """What one agent saw and said. `agent` is its lineage: `"main"`, `"main/3:reader"`.

    `checkpoint`: sha256 of the frozen weights that served it from beginning to end, "" for a policy that is trained,
    whose spans have versions. `acts` has one entry a turn and `setup` how it was run, where the loop ran it: with both
    it can be replayed (`swarm.replay`).
    """

    agent: str
    segments: tuple[Segment, ...]
    status: Status
    error: str = ""
    checkpoint: str = ""
    acts: tuple[Act, ...] = ()
    setup: Setup | None = None


class Stage(Struct, frozen=True, gc=False):
    """One turn's cost in steps: `Stage(1, (3, 5, 2))` is 1 + max(3, 5, 2) = 6 critical steps.

    `main` is max(1, ordinary tool calls of the turn); `subagents` the critical steps of each
    child started in it (Kimi K2.5, arXiv 2602.02276, section 3).
    """

    main: int
    subagents: tuple[int, ...] = ()

    @property
    def critical_steps(self) -> int:
        return self.main + max(self.subagents) if self.subagents else self.main


class Ledger(Struct, frozen=True, gc=False):
    """What one agent spent itself; the cost of children enters through `stages` only.

    Tokens: `prompt` were fed, of which `cached` were not computed again; `sampled` were produced.
    `counts` holds the events by kind (malformed_call, unknown_agent, ...).
    """

    stages: tuple[Stage, ...] = ()
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_sampled: int = 0
    seconds: float = 0.0
    seconds_queued: float = 0.0
    counts: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])

    @property
    def critical_steps(self) -> int:
        return sum(s.critical_steps for s in self.stages)

    @property
    def main_steps(self) -> int:
        return sum(s.main for s in self.stages)

    def _repr_html_(self) -> str:
        return ledger_html(self)


@dataclass(frozen=True, slots=True)
class Reward:
    """Named parts and their weights; the total is derived: `Reward({"perf": .8}, {"perf": 1.})`."""

    parts: Mapping[str, float]
    weights: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.weights.get(k, 0.0) * v for k, v in self.parts.items())


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. A policy sees `query` and, by the handle `#0`, `subject`; never `gold` or `meta`.

    `domain` is the family (`"airport"`), `columns` the names of the wanted table's columns,
    the first `keys` of which identify a row, `subject` the words to search for. The handles
    `#0.a`, `#0.b`, … stand for `names`, at most 26 texts.
    """

    id: str
    query: str
    subject: str
    domain: str
    columns: tuple[str, ...]
    gold: tuple[tuple[str, ...], ...]
    keys: int = 1
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: tuple[str, ...] = ()


Table = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A tree: one agent's trace on a task, and the rollouts of the subagents that it spawned.

    `answer` is the agent's last message, `table` the rows that it handed in (references
    resolved). `prompt` is what a subagent was asked; the root's is the task's query. `harness`: which of several
    made it, where one was drawn.
    """

    task: Task
    trace: Trace
    ledger: Ledger
    prompt: str = ""
    answer: str = ""
    table: Table = ()
    children: tuple[Rollout, ...] = ()
    reward: Reward | None = None
    harness: str = ""

    @property
    def total_steps(self) -> int:
        return self.ledger.main_steps + sum(c.total_steps for c in self.children)

    @property
    def failed(self) -> bool:
        """The infrastructure failed somewhere in the tree: kept out of every loss and mean."""
        return self.trace.status == "error" or any(c.failed for c in self.children)

    def _repr_html_(self) -> str:
        return rollout_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(summary(self))


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled. `ids` ends with the stop token when `finish == "stop"`.

    `logprobs`: nats after temperature. `cached`: how many prompt tokens were not computed again. Where the weights
    changed under way, `earlier` has the runs before: `((3, 17),)` says that 17 tokens came from version 3 and only
    the rest from `version`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish
    cached: int = 0
    seconds_queued: float = 0.0
    earlier: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        counts = [n for _, n in self.earlier]
        if min(counts, default=1) < 1 or sum(counts) > len(self.ids):
            raise ValueError(f"completion: earlier = {self.earlier} of {len(self.ids)} ids, want runs of 1 or more")

    @property
    def spans(self) -> tuple[Span, ...]:
        """One sampled span a version, in order."""
        if not self.earlier:
            return (Span("sampled", self.ids, self.logprobs, self.version),)
        spans: list[Span] = []
        at = 0
        for version, n in (*self.earlier, (self.version, len(self.ids) - sum(n for _, n in self.earlier))):
            spans.append(Span("sampled", self.ids[at : at + n], self.logprobs[at : at + n], version))
            at += n
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A folder in Hugging Face format, with the sha256 of its weights (see `swarm.checkpoint`)."""

    path: Path
    sha256: str
    version: int = 0


Mixture = tuple[tuple[CheckpointRef, float], ...]
"""Checkpoints of which each spawn draws one, by weight."""
Cast = Mapping[str, Mixture]
"""Who plays which role: `{"": ((reader, 1.0),), "checker": ((small, 0.5), (large, 0.5))}`; "" is everybody else."""


class EngineError(Exception):
    """The engine failed, not the policy. Becomes `Status` "error" at the loop's boundary."""


class Engine(Protocol):
    """Token ids in, token ids out. Cancelling the awaiting task drops the request."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion: ...

    async def load(self, ref: CheckpointRef) -> None: ...


class ServingEngine(Engine, Protocol):
    """An engine whose weights a learner replaces, and which can say what it serves."""

    async def update(self, weights: Mapping[str, Any], version: int) -> None:
        """Takes weights (tensors by the names of the model's state dict); when it returns, they are in use.

        What is being sampled goes on, each token with the version that it came from. Raises EngineError.
        """
        ...

    async def checksum(self) -> str:
        """A sha256 of the weights as they are served: equal as long as they are, in one engine."""
        ...


# --- tools -----------------------------------------------------------------------------


class ToolCall(Struct, frozen=True, gc=False):
    """`ToolCall("access", {"url": "#17"})`."""

    name: str
    arguments: Mapping[str, Any]


class Artifact(Struct, frozen=True, gc=False, omit_defaults=True):
    """Something in a rollout's workspace that a short handle `#17` stands for.

    A document has a `url`, a `title` and lettered `cells` (`#17.b` is the value of its field b);
    a table has `rows`. Equal urls are one artifact: seen again, it keeps its handle and gains cells.
    """

    title: str
    url: str = ""
    cells: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    rows: Table = ()


class ToolResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a call gives back: text, in which each artifact stands for its handle's label.

    `parts=("1 hit:\\n", Artifact("Ohio", url="w/17"))` is shown as `1 hit:\\n[Doc #4](w/17) Ohio`.
    `error` names the kind of a refused or failed call and is counted; `child` is the rollout
    that the call ran.
    """

    parts: tuple[str | Artifact, ...]
    error: str = ""
    child: Rollout | None = None


class Turn(Struct, frozen=True, gc=False):
    """A parsed assistant message. `malformed` has a short reason for each call that did not parse."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


class ChatFormat(Protocol):
    """Renders a conversation into token ids, append-only, and reads the policy's turns back."""

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """A whole first prompt, up to where the assistant begins to speak."""
        ...

    def observe(self, results: Sequence[str], note: str, *, closed: bool) -> list[int]:
        """What follows an assistant turn: tool results, the budget note, the next turn's opening.

        `closed`: the sampled turn already ends with the end-of-turn token.
        """
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Turn:
        """Reads a sampled turn back, never raises. The `tools` type the arguments that are written as bare text."""
        ...

    def clipped(self, text: str, tokens: int) -> str:
        """As much of the text's beginning as so many tokens hold."""
        ...

    @property
    def stop(self) -> tuple[int, ...]: ...


class Runner(Protocol):
    """A way to run an agent on a task: the native loop (`swarm.loop.Harness`), or somebody else's agent."""

    @property
    def budget(self) -> Budget: ...

    def fits(self, task: Task) -> str:
        """Why it cannot run this task, in a few words; nothing where it can."""
        ...

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        """One rollout. What goes wrong in it is its status and its error, never an exception."""
        ...
