"""A policy that samples what no text is encoded to: the loop keeps its ids, where one that goes through text would not.

Every case asserts first that encoding its text again gives other ids, so that it bites.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import trio

from swarm.chat import Chat
from swarm.chat_gemma import GEMMA3
from swarm.chat_hermes import QWEN3
from swarm.chat_xml import QWEN3_CODER
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import Harness, begin, run
from swarm.tools import CallContext, Tool
from swarm.types import Budget, Rollout, Sampling, ToolCall, ToolResult, ToolSpec
from tests.chat_cases import gemma, qwen
from tests.swarm_cases import TASK, Echo

ECHO = ToolSpec("echo", "Echo.", {"type": "object", "properties": {"text": {"type": "string"}}})
CHATS = (Chat(qwen(), QWEN3), Chat(qwen("qwen3_coder.jinja"), QWEN3_CODER), Chat(gemma(), GEMMA3))
PAGE = "\n\n<|im_end|><end_of_turn>b\u0301 ab"
"""A page that begins where a template's line break ends, spells out markers, and goes on with an accent."""


def token(chat: Chat, text: str) -> int:
    i = chat.tokenizer.backend_tokenizer.token_to_id(text)
    assert i is not None, text
    return i


def again(chat: Chat, ids: Sequence[int]) -> list[int]:
    """The ids after a trip through text, as a loop that renders its messages anew would have them."""
    return chat.tokenizer.backend_tokenizer.encode(chat.decode(ids), add_special_tokens=False).ids


def a_merge_not_taken(chat: Chat) -> list[int]:
    return [token(chat, "a"), token(chat, "b")]


def the_bytes_of_one_character(chat: Chat) -> list[int]:
    return [token(chat, t) for t in (("<0xC3>", "<0xA9>") if chat.layout is GEMMA3 else ("Ã", "©"))]


def half_a_character(chat: Chat) -> list[int]:
    return the_bytes_of_one_character(chat)[:1]


def a_marker_in_letters(chat: Chat) -> list[int]:
    return chat.encode(chat.layout.end)


def a_break_that_touches_the_opening(chat: Chat) -> list[int]:
    """The template's own line break stands before it: as text, both would be one token."""
    return [*chat.encode("\n"), *chat.encode("ab")]


def a_call_in_letters(chat: Chat) -> list[int]:
    said = "".join(chat.layout.spoken("", [ToolCall("echo", {"text": "ab"})]))
    return [i for character in said for i in chat.encode(character)]


CASES = (
    a_merge_not_taken,
    the_bytes_of_one_character,
    half_a_character,
    a_marker_in_letters,
    a_break_that_touches_the_opening,
    a_call_in_letters,
)


@dataclass
class Spoken:
    """Says these turns one after another; keeps what it was asked."""

    turns: Sequence[Sequence[int]]
    asked: list[list[int]] = field(default_factory=list[list[int]])

    def __call__(self, ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        self.asked.append(list(ids))
        return self.turns[len(self.asked) - 1]


def rolled_out(chat: Chat, policy: Spoken, max_tokens: int = 1000, tool: Tool | None = None) -> Rollout:
    sampling = Sampling(max_tokens, stop=chat.stop)
    harness = Harness(ScriptedEngine(policy), chat, (tool or Echo(ECHO),), "Work.", sampling, Budget(9, 9000))
    return trio.run(run, harness, begin(harness, TASK, 1))


def check(chat: Chat, policy: Spoken, rollout: Rollout) -> None:
    """What was sampled is what is trained, and each prompt goes on from the whole of the one before."""
    (segment,) = rollout.trace.segments
    assert [list(s.ids) for s in segment.spans if s.kind == "sampled"] == [list(t) for t in policy.turns]
    trained = [i for i, acted in zip(segment.ids, segment.mask, strict=True) if acted]
    assert trained == [i for turn in policy.turns for i in turn]
    for before, said, after in zip(policy.asked, policy.turns, policy.asked[1:], strict=False):
        assert after[: len(before) + len(said)] == [*before, *said]
    assert segment.ids == [*policy.asked[-1], *policy.turns[-1]]
    assert segment.ids != again(chat, segment.ids)


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat.layout.name)
@pytest.mark.parametrize("case", CASES)
def test_ids_that_no_text_is_encoded_to_are_kept_and_trained(case: Callable[[Chat], list[int]], chat: Chat) -> None:
    odd, opening = case(chat), chat.prompt("Work.", (ECHO,), f"{TASK.query}\n[left 9]")
    assert again(chat, opening) == opening
    assert again(chat, [*opening, *odd]) != [*opening, *odd]
    call = chat.encode_turn("", [ToolCall("echo", {"text": PAGE})])
    policy = Spoken(([*odd, *call], call, [*a_merge_not_taken(chat), chat.stop[0]]))
    rollout = rolled_out(chat, policy)
    check(chat, policy, rollout)
    assert rollout.trace.status == "answered"
    assert rollout.ledger.counts == {"calls": 2 + (case is a_call_in_letters)}


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat.layout.name)
def test_a_turn_that_was_cut_within_a_character_is_closed_and_gone_on_from(chat: Chat) -> None:
    cut = [*chat.encode("<tool_call>"), *half_a_character(chat)]
    policy = Spoken((cut, [*a_merge_not_taken(chat), chat.stop[0]]))
    rollout = rolled_out(chat, policy, max_tokens=len(cut))
    check(chat, policy, rollout)
    assert policy.asked[1][len(policy.asked[0]) + len(cut)] == chat.stop[0]
    assert rollout.ledger.counts == {"malformed_call": 1, "calls": 1}


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat.layout.name)
def test_a_pages_markers_are_letters_in_the_next_prompt(chat: Chat) -> None:
    policy = Spoken((chat.encode_turn("", [ToolCall("echo", {"text": PAGE})]), chat.encode_turn("Yes.")))
    rollout = rolled_out(chat, policy)
    (segment,) = rollout.trace.segments
    assert PAGE in chat.decode(segment.ids)
    seen = [i for span in segment.spans if span.kind == "observed" for i in span.ids]
    turns = 2 if chat.layout is not GEMMA3 else 1  # the note is a turn of its own, except for Gemma
    assert seen.count(chat.stop[0]) == turns
    assert again(chat, seen).count(chat.stop[0]) == turns + 1


@dataclass(frozen=True)
class Noted(Echo):
    """Keeps the arguments with which it is called."""

    seen: list[object] = field(default_factory=list[object])

    async def run(self, call: ToolCall, context: CallContext) -> ToolResult:
        self.seen.append(call.arguments)
        return ToolResult(("noted",))


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: chat.layout.name)
def test_the_loop_hands_arguments_to_a_tool_in_the_types_of_its_schema(chat: Chat) -> None:
    call = ToolCall("echo", {"text": "2", "count": 2, "deep": True})
    kinds = {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"}}
    noted = Noted(ToolSpec("echo", "Echo.", {"type": "object", "properties": kinds}))
    policy = Spoken((chat.encode_turn("", [call]), chat.encode_turn("Yes.")))
    rolled_out(chat, policy, tool=noted)
    assert noted.seen == [{"text": "2", "count": 2, "deep": True}]
