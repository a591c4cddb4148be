"""When an agent's context is rewritten, and what it holds then.

                                              a context of `threshold` tokens or more
    compaction   … observation [left 9] summarize │ (sampled) summary ─▶ system, task, summary, last steps
    truncation   … observation [left 9] ──────────────────────────────▶ system, task, last steps

A rewritten context opens a new segment, all of it prompt: what the policy sampled before is copied id for id
and never made again from text, and was trained where it was sampled. The layout is always the same:

    system, tools │ task ⏎ [left 8] │ summary │ [left 8] │ turn │ results ⏎ [left 8] │ turn │ results ⏎ [left 8]

every message to the policy ends with one note, and every note says what is left now.
Not here: the loop, and how a model samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Struct

from swarm.checks import want
from swarm.terms import ContextPolicy, ToolSpec
from swarm.types import ChatFormat

_want = partial(want, "context")

Ask = Literal["", "summarize", "answer now"]
"""What the note asks for beside an ordinary turn."""

Move = Literal["go on", "summarize", "truncate", "answer", "cut"]
"""What follows an observation. answer: the next turn is the last; cut: the agent ends here, truncated."""

CONTEXT_RESERVE = 256
"""Tokens kept free for one more observation, so that an agent whose context is never rewritten can answer."""


class Step(Struct, frozen=True, gc=False):
    """A turn as it was sampled, and the results that came back as text. A summary is a step without results."""

    ids: tuple[int, ...]
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """What every context of an agent begins with."""

    system: str
    tools: tuple[ToolSpec, ...]
    prompt: str


def check_room(policy: ContextPolicy, window: int, turn_tokens: int) -> None:
    """Raises ValueError if a context below the threshold leaves no room for a turn, or for a summary."""
    turn = max(turn_tokens, policy.summary_tokens if policy.kind == "compaction" else 0)
    fits = policy.kind == "none" or policy.threshold + turn <= window
    wanted = f"at most {window - turn}, so that a turn of {turn} tokens fits into {window} (budget: tokens)"
    _want("threshold", policy.threshold, fits, wanted)


def note(left: int, ask: Ask = "") -> str:
    """The remaining budget as the policy reads it, and what is asked of it: `[left 9] summarize`."""
    return f"[left {left}] {ask}".rstrip()


def move(policy: ContextPolicy, *, used: int, window: int, turn_tokens: int, left: int, rewrites: int) -> Move:
    """What follows an observation.

    `used`: tokens of the context with it, the request for a summary included if one may come; `window`: the most
    a context may hold with the turn of at most `turn_tokens` that follows; `left`: critical steps;
    `rewrites`: how often the context was rewritten before.
    """
    if policy.kind == "none":
        room = window - used - 2 * turn_tokens - CONTEXT_RESERVE
        return "answer" if left <= 1 or room < 0 else "go on"
    full = used >= policy.threshold or used + turn_tokens > window
    if left <= 1 and (not full or policy.kind == "compaction"):
        return "answer"
    if not full:
        return "go on"
    if rewrites >= policy.limit:
        return "answer" if left <= 1 else policy.at_limit
    if policy.kind == "truncation":
        return "truncate"
    return "summarize" if used + policy.summary_tokens <= window else policy.at_limit


def render(chat: ChatFormat, opening: Opening, steps: Sequence[Step], left: int, ask: Ask = "") -> list[int]:
    """The ids of a whole context. Turns are copied; every message ends with its note, the last with what is asked."""
    notes = [note(left)] * len(steps) + [note(left, ask)]
    ids = chat.prompt(opening.system, opening.tools, f"{opening.prompt}\n{notes[0]}")
    for step, shown in zip(steps, notes[1:], strict=True):
        ids += [*step.ids, *chat.observe(step.results, shown, closed=closed(chat, step.ids))]
    return ids


def closed(chat: ChatFormat, ids: Sequence[int]) -> bool:
    """Whether a sampled turn ends with the end-of-turn token, and was not cut by its length."""
    return bool(ids) and ids[-1] in chat.stop


def fitting(
    policy: ContextPolicy, chat: ChatFormat, opening: Opening, summary: Sequence[Step], steps: Sequence[Step], left: int
) -> int:
    """How many of the last steps fit below the threshold, after the summary if there is one; -1: not even none."""
    for kept in range(min(policy.keep, len(steps)), -1, -1):
        shown = (*summary, *steps[len(steps) - kept :])
        if len(render(chat, opening, shown, left, last_ask(left))) < policy.threshold:
            return kept
    return -1


def last_ask(left: int) -> Ask:
    """With one step left the policy answers."""
    return "answer now" if left <= 1 else ""
