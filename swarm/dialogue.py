"""Records an agent that speaks in messages, not in tokens: whoever runs it, its calls become exact segments.

    messages ─▶ Talk ─▶ the longest beginning that was recorded ─┬─ its ids + what came since ─▶ engine ─▶ Reply
                                                                 └─ none: all laid out anew

A request that goes on from a recorded reply, equal message by message up to there, is asked with the ids as they were
sampled. If nothing went on from there before, that segment grows; if something did, a new one opens, a fork, whose
common beginning is prompt. A history that the client edited is prompt as a whole, a compaction. So each sampled id
is trained once, in the segment where it was sampled, after the very ids that the engine was given.

Requests may overlap; only the longest chain of those that do not costs steps. With a note the policy sees what is
left, as in the native loop, and its last turn is an answer. Not here: messages (`swarm.said`), who sends them, tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, cast

import trio
from msgspec import Struct, field, structs

from swarm.chains import Chain, Chains
from swarm.chat import Chat
from swarm.context import Ask, ContextPolicy, closed, last_ask, move, note
from swarm.said import DialogueError, Said, Talk, digest, said_key, talk_of
from swarm.seeds import derive
from swarm.types import (
    Budget,
    Completion,
    Engine,
    EngineError,
    Ledger,
    OpenedBy,
    Rollout,
    Sampling,
    Segment,
    Span,
    Status,
    Table,
    Task,
    ToolSpec,
    Trace,
    Turn,
)

__all__ = ["DialogueError", "Dialogues", "Over", "Reply", "Said"]

Over = Literal["", "budget", "context"]
"""Why nothing was sampled: the critical steps are spent, or the context is as long as it may be."""

_NEVER = ContextPolicy()


class Reply(Struct, frozen=True):
    """What the policy answers: `said` for the client, `completion` as it was sampled, after `prompt_tokens` ids.

    `turn` is all that was read in it; if it had to be the answer, `said` has none of its calls. Where `over` says why
    nothing was sampled, there is no completion and nothing said.
    """

    said: Said
    turn: Turn
    prompt_tokens: int
    completion: Completion | None = None
    over: Over = ""


class _Line(Struct):
    """A segment that grows, and its turns."""

    segment: Segment
    turns: list[Chain] = field(default_factory=list[Chain])


class _Context(Struct, frozen=True):
    """A line up to a reply, whose calls are `named`. `last`: it had to be the answer."""

    line: _Line
    spans: int
    named: tuple[str, ...]
    last: bool

    @property
    def ids(self) -> list[int]:
        return Segment(self.line.segment.spans[: self.spans]).ids

    @property
    def free(self) -> bool:
        """Nothing has gone on from here."""
        return len(self.line.segment.spans) == self.spans


class _Asked(Struct, frozen=True):
    """A request: all its `ids`, those before `since` from a recorded context, and the `key` of what they say.

    `told`: assistant messages stand in it. `last`: it asks for the answer. `text`: what a completion goes on from,
    "" where that is ids.
    """

    key: bytes
    tools: tuple[ToolSpec, ...]
    context: _Context | None
    ids: list[int]
    since: int
    told: bool
    last: bool
    text: str | None = None


class Dialogues:
    """The recorder of one rollout: `Dialogues(engine, chat, task=task, seed=1, budget=budget, sampling=sampling)`.

    `budget` and `sampling` are the rollout's; with `note` the policy is shown what is left of the budget. `checkpoint`
    as in `Trace`. Made under trio: its seconds begin.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        *,
        task: Task,
        seed: int,
        budget: Budget,
        sampling: Sampling,
        note: bool = False,
        agent: str = "main",
        checkpoint: str = "",
    ) -> None:
        self.task, self.budget, self.sampling, self.chat = task, budget, sampling, chat
        self._engine, self._seed, self._note = engine, seed, note
        self._agent, self._checkpoint = agent, checkpoint
        self._started = trio.current_time()
        self._lines: list[_Line] = []
        self._replies: dict[bytes, list[_Context]] = {}
        self._numbers: dict[bytes, set[int]] = {}
        self._prompts: set[bytes] = set()
        self._texts: list[tuple[str, _Context]] = []
        self._chains = Chains()
        self._spent = Ledger()
        self._counts: Counter[str] = Counter()
        self._failure, self._over, self._last, self._closed = "", "", False, False

    @property
    def left(self) -> int:
        """Critical steps that are not spent."""
        return self.budget.critical_steps - self._chains.total

    def count(self, kind: str, n: int = 1) -> None:
        """Counts an event in the ledger."""
        self._counts[kind] += n

    def ran(self, name: str, ordinary: int) -> None:
        """See `Chains`."""
        self._chains.ran(name, ordinary)

    def spawned(self, name: str, steps: int) -> None:
        """See `Chains`."""
        self._chains.spawned(name, steps)

    async def reply(
        self, messages: Sequence[Said], tools: Sequence[ToolSpec] = (), sampling: Sampling | None = None
    ) -> Reply:
        """What the policy says next. Cancelled or failed, it leaves nothing behind.

        `sampling` may ask for fewer tokens and another seed than the rollout's. Raises DialogueError for what cannot be
        asked, and after the end; EngineError when the engine fails, or its ids and log-probabilities do not match.
        """
        return await self._replied(self._asked(talk_of(messages), tuple(tools)), sampling or self.sampling)

    async def complete(self, prompt: str | Sequence[int], sampling: Sampling | None = None) -> Reply:
        """What the policy says after a text, or after ids, as they are: no layout, no note, no calls. See `reply`.

        A text that begins with an earlier one and all that was said after it goes on from there, and so do ids.
        """
        size = len(self.chat.tokenizer)
        if not isinstance(prompt, str) and (not prompt or min(prompt) < 0 or max(prompt) >= size):
            raise DialogueError(
                f"ids from {min(prompt, default=None)} to {max(prompt, default=None)}, want 0 to {size}"
            )
        return await self._replied(self._continued(prompt), sampling or self.sampling)

    def rollout(self, answer: str, table: Table = (), status: Status = "answered", error: str = "") -> Rollout:
        """The rollout as it was recorded; no request is answered after it.

        An engine that failed makes it an error. An agent whose last request got no answer, for want of steps or of
        room, did not answer nor fail: it is exhausted, or truncated where the policy was not told of its budget.
        """
        self._closed = True
        status, error = self._ended(status, error)
        stages = self._chains.stages([turn for line in self._lines for turn in line.turns])
        seconds = trio.current_time() - self._started
        ledger = structs.replace(self._spent, stages=stages, seconds=seconds, counts=dict(+self._counts))
        segments = tuple(line.segment for line in self._lines)
        trace = Trace(self._agent, segments, status, error, self._checkpoint)
        return Rollout(self.task, trace, ledger, prompt=self.task.query, answer=answer, table=table)

    async def _replied(self, asked: _Asked, sampling: Sampling) -> Reply:
        if self._closed:
            raise DialogueError("a request after the end of its rollout, want none")
        sampling, before = self._allowed(sampling), self._chains.longest
        if over := self._refusal(asked, sampling):
            self._over = over
            return Reply(Said("assistant"), Turn(""), len(asked.ids), over=over)
        numbers = self._numbers.setdefault(asked.key, set())
        number = next(n for n in range(len(numbers) + 1) if n not in numbers)
        numbers.add(number)
        seed = derive(self._seed, asked.key.hex(), number, sampling.seed)
        try:
            completion = await self._sampled(asked.ids, structs.replace(sampling, seed=seed))
        except BaseException:
            numbers.discard(number)
            raise
        return self._recorded(asked, completion, before, seed)

    def _allowed(self, sampling: Sampling) -> Sampling:
        own = self.sampling
        for name in ("temperature", "top_p", "stop"):
            if getattr(sampling, name) != getattr(own, name):
                raise DialogueError(f"{name} = {getattr(sampling, name)}, want the rollout's {getattr(own, name)}")
        if sampling.max_tokens < 1:
            raise DialogueError(f"max_tokens = {sampling.max_tokens}, want 1 or more")
        return structs.replace(sampling, max_tokens=min(sampling.max_tokens, own.max_tokens))

    def _asked(self, talk: Talk, tools: tuple[ToolSpec, ...]) -> _Asked:
        keys = talk.keys(tools)
        known = [self._known(key, r.said) for key, r in zip(keys, talk.rounds, strict=False)]
        at = max((k for k, context in enumerate(known) if context), default=-1)
        context = known[at] if at >= 0 else None
        before = context.ids if context else []
        ids, last = self._laid_out(structs.replace(talk, rounds=talk.rounds[max(at, 0) :]), tools, before)
        return _Asked(keys[-1], tools, context, ids, len(before), bool(talk.rounds), last)

    def _continued(self, prompt: str | Sequence[int]) -> _Asked:
        text = prompt if isinstance(prompt, str) else ""
        found: list[tuple[int, _Context]] = []
        for known, context in self._texts:
            ids = context.ids
            if known and text.startswith(known):
                found.append((len(known), context))
            elif not text and list(prompt[: len(ids)]) == ids:
                found.append((len(ids), context))
        length, context = max(found, key=lambda f: (f[0], f[1].free), default=(0, None))
        before = context.ids if context else []
        rest = self.chat.encode(text[length:]) if text else list(cast(Sequence[int], prompt[length:]))
        shown = prompt if isinstance(prompt, str) else list(prompt)
        return _Asked(digest(b"", shown), (), context, [*before, *rest], len(before), False, False, text)

    def _known(self, before: bytes, said: Said) -> _Context | None:
        """The recorded context that ends with this; of several one that named its calls so, and is free."""
        found = self._replies.get(said_key(before, said), [])
        named = [c for c in found if c.named == said.ids] or found
        return next((c for c in named if c.free), named[-1] if named else None)

    def _laid_out(self, talk: Talk, tools: Sequence[ToolSpec], before: list[int]) -> tuple[list[int], bool]:
        """All ids, and whether the turn after them has to be the answer, as the native loop would have it."""
        if not talk.rounds:
            ask = last_ask(self.left)
            return self._ids(talk, tools, before, ask), self._note and ask != ""
        ids = self._ids(talk, tools, before, "")
        window, turn_tokens = self.budget.tokens, self.sampling.max_tokens
        follows = move(_NEVER, used=len(ids), window=window, turn_tokens=turn_tokens, left=self.left, rewrites=0)
        if not self._note or follows != "answer":
            return ids, False
        return self._ids(talk, tools, before, "answer now"), True

    def _ids(self, talk: Talk, tools: Sequence[ToolSpec], before: list[int], ask: Ask) -> list[int]:
        """The ids of a conversation; `before` are those up to the end of its first round's turn, if they are known."""
        ids = list(before) or self.chat.prompt(talk.system, tools, self._words(talk.user, "" if talk.rounds else ask))
        for k, r in enumerate(talk.rounds):
            if k or not before:
                ids += self._spoken(r.said)
            words = self._words(r.user, ask if k == len(talk.rounds) - 1 else "")
            ids += self.chat.observe(r.results, words, closed=closed(self.chat, ids))
        return ids

    def _words(self, user: str, ask: Ask) -> str:
        return "\n".join(filter(None, (user, note(self.left, ask)))) if self._note else user

    def _spoken(self, said: Said) -> list[int]:
        try:
            return self.chat.encode_turn(said.content, said.calls)
        except ValueError as e:
            raise DialogueError(f"an assistant message that nobody here said: {e}") from None

    def _refusal(self, asked: _Asked, sampling: Sampling) -> Over:
        if self.left <= 0 or (asked.context is not None and asked.context.last):
            return "budget"
        return "context" if len(asked.ids) + sampling.max_tokens > self.budget.tokens else ""

    async def _sampled(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        try:
            completion = await self._engine.generate(ids, sampling)
            n, m = len(completion.ids), len(completion.logprobs)
            if n != m or not n:
                raise EngineError(f"the engine gave {n} ids and {m} log-probabilities, want as many, and one or more")
        except EngineError as e:
            self._failure = self._failure or str(e)
            raise
        return completion

    def _recorded(self, asked: _Asked, completion: Completion, before: Chain | None, seed: int) -> Reply:
        if self._closed:
            raise DialogueError("a request that outlived its rollout, want none")
        turn = self._read(asked, completion)
        calls = () if asked.last else turn.calls
        said = Said("assistant", turn.content, calls, tuple(f"call_{derive(seed, k):016x}" for k in range(len(calls))))
        line = self._grown(asked, completion)
        context = _Context(line, len(line.segment.spans), said.ids, asked.last)
        if asked.text is None:
            self._replies.setdefault(said_key(asked.key, said), []).append(context)
        else:
            self._texts.append((asked.text and asked.text + turn.content, context))
        self._prompts.add(asked.key)
        self._over, self._last = "", asked.last
        line.turns.append(self._chains.ended(said, asked.tools, before))
        self._count(asked, completion, turn)
        return Reply(said, turn, len(asked.ids), completion)

    def _read(self, asked: _Asked, completion: Completion) -> Turn:
        if asked.text is None:
            return self.chat.parse(completion.ids, asked.tools)
        return Turn(self.chat.decode([i for i in completion.ids if i not in self.chat.stop]))

    def _grown(self, asked: _Asked, completion: Completion) -> _Line:
        """The line with the turn at its end: that of the context if nothing has gone on from it, else a new one."""
        context = asked.context
        if context is not None and context.free and asked.since < len(asked.ids):
            line = context.line
            line.segment = line.segment.extended(Span("observed", tuple(asked.ids[asked.since :])), *completion.spans)
            return line
        opened_by = self._opened_by(asked)
        line = _Line(Segment((Span("prompt", tuple(asked.ids)), *completion.spans), opened_by))
        if self._lines:
            self._counts[f"{opened_by}s"] += 1
        self._lines.append(line)
        return line

    def _opened_by(self, asked: _Asked) -> OpenedBy:
        if not self._lines:
            return "start"
        if asked.context is not None or asked.key in self._prompts:
            return "fork"
        return "compaction" if asked.told else "start"

    def _count(self, asked: _Asked, completion: Completion, turn: Turn) -> None:
        spent = self._spent
        self._spent = Ledger(
            tokens_prompt=spent.tokens_prompt + len(asked.ids),
            tokens_cached=spent.tokens_cached + completion.cached,
            tokens_sampled=spent.tokens_sampled + len(completion.ids),
            seconds_queued=spent.seconds_queued + completion.seconds_queued,
        )
        self._counts["call_after_budget" if asked.last else "calls"] += len(turn.calls)
        self._counts["malformed_call"] += len(turn.malformed)

    def _ended(self, status: Status, error: str) -> tuple[Status, str]:
        if self._failure:
            return "error", self._failure
        if status in ("truncated", "exhausted") or (status == "error" and not self._over):
            return status, error
        if self._over == "context" or (self._over and not self._note):
            return "truncated", self._over
        return ("exhausted" if self._over or self._last else "answered"), ""
