"""Somebody else's agent, told in messages: recorded token for token, whatever its client does with the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.dialogue import DialogueError, Dialogues, Reply, Said
from swarm.engine.scripted import ScriptedEngine
from swarm.loop import begin, run
from swarm.types import (
    Budget,
    CheckpointRef,
    Completion,
    Engine,
    EngineError,
    Rollout,
    Sampling,
    ToolCall,
    ToolSpec,
    Turn,
)
from tests.swarm_cases import ECHO, TASK, call, chat, engine, harness, says

USER = Said("user", TASK.query)
SYSTEM = Said("system", "Work.")
BUDGET = Budget(20, 4096, seconds=100.0)


def dialogues(engine: Engine, *, note: bool = False, budget: Budget = BUDGET, tokens: int = 100) -> Dialogues:
    sampling = Sampling(tokens, stop=chat().stop)
    return Dialogues(engine, chat(), task=TASK, seed=1, budget=budget, sampling=sampling, note=note)


def result(reply: Reply, *texts: str) -> tuple[Said, ...]:
    return tuple(Said("tool", text, ids=(name,)) for text, name in zip(texts, reply.said.ids, strict=True))


def sampled(r: Rollout) -> list[tuple[int, ...]]:
    return [s.ids for segment in r.trace.segments for s in segment.spans if s.kind == "sampled"]


def opened(r: Rollout) -> list[str]:
    return [segment.opened_by for segment in r.trace.segments]


def kinds(r: Rollout) -> list[list[str]]:
    return [[span.kind for span in segment.spans] for segment in r.trace.segments]


class Noise:
    """An engine that says random ids, two of which read alike: nothing that text would be encoded to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], tuple[int, ...]]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        await trio.lowlevel.checkpoint()
        k = len(self.asked)
        said = (*chat().encode("y" * (k % 2)), *((sampling.seed >> s) % 200 for s in (0, 8)), chat().stop[0])
        self.asked.append((list(ids), said))
        return Completion(said, tuple(-0.5 - k for _ in said), 3, "stop", cached=1, seconds_queued=0.5)

    async def load(self, ref: CheckpointRef) -> None:
        raise NotImplementedError


# --- as the native loop ------------------------------------------------------------------


async def conversed(d: Dialogues, tools: Sequence[ToolSpec], *results: str) -> Rollout:
    """An agent that calls as it is told, with these results, up to the answer."""
    messages: tuple[Said, ...] = (SYSTEM, USER)
    for text in (*results, ""):
        reply = await d.reply(messages, tools)
        if not reply.said.calls:
            break
        messages = (*messages, reply.said, *result(reply, *[text] * len(reply.said.calls)))
    return d.rollout(reply.said.content)


@pytest.mark.parametrize("steps", [10, 2])
async def test_an_agent_in_messages_is_the_native_loop_token_for_token(steps: int) -> None:
    policy = says(*[Turn("", (call("echo", text="x"),)) for _ in range(3)], Turn("done"))
    h = harness(policy, steps=steps)
    native = await run(h, begin(h, TASK, 1))
    d = dialogues(h.engine, note=True, budget=replace(BUDGET, critical_steps=steps), tokens=512)
    told = await conversed(d, [ECHO], "x", "x", "x")
    assert told.trace.segments == native.trace.segments
    assert told.trace.status == native.trace.status
    assert told.ledger.stages == native.ledger.stages
    assert told.ledger.counts == native.ledger.counts
    assert told.ledger.tokens_prompt == native.ledger.tokens_prompt


async def test_a_turn_of_several_calls_costs_as_many_steps_and_the_results_stand_in_their_order() -> None:
    many = Turn("", (call("echo", text="x"), call("echo", text="y")))
    d = dialogues(engine(says(many, Turn("done"))), tokens=512)
    reply = await d.reply([USER], [ECHO])
    one, other = result(reply, "first", "second")
    await d.reply([USER, reply.said, other, one], [ECHO])
    r = d.rollout("done")
    assert [s.main for s in r.ledger.stages] == [2, 1]
    observed = chat().decode(r.trace.segments[0].spans[2].ids)
    assert observed.index("first") < observed.index("second")


# --- one history, however it goes on -------------------------------------------------------


async def test_what_goes_on_from_a_reply_has_its_ids_as_they_were_sampled() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.reply([USER])
    two = await d.reply([USER, one.said, Said("user", "And?")])
    r = d.rollout(two.said.content)
    (prompt, said), (longer, more) = noise.asked
    assert longer[: len(prompt) + len(said)] == [*prompt, *said]
    assert sampled(r) == [said, more]
    assert kinds(r) == [["prompt", "sampled", "observed", "sampled"]]
    assert r.trace.segments[0].logprobs[len(prompt) : len(prompt) + len(said)] == [-0.5] * len(said)
    assert r.trace.segments[0].ids == [*longer, *more]
    assert r.ledger.tokens_prompt == len(prompt) + len(longer)
    assert (r.ledger.tokens_cached, r.ledger.seconds_queued) == (2, 1.0)


async def test_a_second_way_on_from_the_same_reply_is_a_fork_whose_beginning_is_prompt() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.reply([USER])
    for words in ("And?", "Or?", "And?"):
        await d.reply([USER, one.said, Said("user", words)])
    r = d.rollout("")
    assert opened(r) == ["start", "fork", "fork"]
    assert kinds(r)[1:] == [["prompt", "sampled"]] * 2
    assert sampled(r) == [said for _, said in noise.asked]
    assert r.trace.segments[1].spans[0].ids == tuple(noise.asked[2][0])
    assert noise.asked[2][0][: len(noise.asked[1][0])] != noise.asked[1][0]
    assert r.ledger.counts == {"forks": 2}


async def test_a_fork_goes_on_by_itself() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.reply([USER])
    await d.reply([USER, one.said, Said("user", "And?")])
    other = await d.reply([USER, one.said, Said("user", "Or?")])
    await d.reply([USER, one.said, Said("user", "Or?"), other.said, Said("user", "So?")])
    assert kinds(d.rollout("")) == [
        ["prompt", "sampled", "observed", "sampled"],
        ["prompt", "sampled", "observed", "sampled"],
    ]


async def test_a_history_that_the_client_edited_is_all_prompt() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.reply([USER])
    edited = replace_content(one.said, "What I would rather have said.")
    await d.reply([USER, edited, Said("user", "And?")])
    r = d.rollout("")
    assert opened(r) == ["start", "compaction"]
    assert kinds(r)[1] == ["prompt", "sampled"]
    assert "rather have said" in chat().decode(noise.asked[1][0])


def replace_content(said: Said, content: str) -> Said:
    return Said(said.role, content, said.calls, said.ids)


async def test_other_tools_are_another_conversation() -> None:
    d = dialogues(Noise())
    one = await d.reply([USER], [ECHO])
    await d.reply([USER, one.said, Said("user", "And?")], [])
    assert opened(d.rollout("")) == ["start", "compaction"]


async def test_the_same_request_again_is_sampled_anew() -> None:
    noise = Noise()
    d = dialogues(noise)
    for _ in range(2):
        await d.reply([USER])
    assert noise.asked[0][0] == noise.asked[1][0]
    assert noise.asked[0][1] != noise.asked[1][1]
    assert opened(d.rollout("")) == ["start", "fork"]


async def test_of_replies_that_read_alike_the_one_whose_calls_have_these_names_goes_on() -> None:
    turn = Turn("", (call("echo", text="x"),))
    spaced = [*chat().encode_turn("", turn.calls)]

    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        return [*chat().encode(" " * len(heard)), *spaced]

    heard: list[Reply] = []
    d = dialogues(ScriptedEngine(speak))
    while len(heard) < 3:
        heard += [await d.reply([USER], [ECHO])]
    for k in (1, 0):
        assert heard[k].said.calls == heard[2].said.calls
        await d.reply([USER, heard[k].said, *result(heard[k], "x")], [ECHO])
    r = d.rollout("")
    assert [len(s.spans) for s in r.trace.segments] == [4, 4, 2]
    assert opened(r) == ["start", "fork", "fork"]


async def test_equal_arguments_are_equal_however_they_are_written() -> None:
    d = dialogues(engine(says(Turn("", (call("echo", text="x", at=1),)), Turn("done"))))
    one = await d.reply([USER], [ECHO])
    turned = Said("assistant", "", (ToolCall("echo", {"at": 1, "text": "x"}),), one.said.ids)
    await d.reply([USER, turned, *result(one, "x")], [ECHO])
    assert len(d.rollout("").trace.segments) == 1


async def test_a_turn_that_was_cut_is_ended_before_what_follows() -> None:
    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        return chat().encode("x" * 30)

    d = dialogues(ScriptedEngine(speak), tokens=3)
    one = await d.reply([USER])
    await d.reply([USER, one.said, Said("user", "Go on.")])
    assert d.rollout("").trace.segments[0].spans[2].ids[0] == chat().stop[0]


# --- what is refused -----------------------------------------------------------------------

ASKED = Said("assistant", "", (call("echo", text="x"),), ("c1",))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "none by a user"),
        ([SYSTEM], "none by a user"),
        ([USER, Said("assistant", "It")], "message 1: the assistant's own is the last"),
        ([USER, SYSTEM], "message 1: the system speaks, want the system at the beginning"),
        ([USER, Said("tool", "x", ids=("c1",))], "message 1: a result of call 'c1', want it right after its call"),
        ([USER, ASKED, Said("tool", "x", ids=("c2",))], "message 2: a result of call 'c2'"),
        ([USER, ASKED, USER], "message 1: no result of call 'c1'"),
        ([USER, ASKED, *[Said("tool", "x", ids=("c1",))] * 2], "message 3: a result of call 'c1'"),
        ([USER, Said("assistant", "", ASKED.calls, ()), USER], r"calls named \[\], want 1 names"),
        ([USER, Said("user", "", ASKED.calls, ())], "a call by the user"),
        ([Said("user", "\ud800")], "half of a surrogate pair"),
    ],
)
async def test_what_no_layout_can_say_is_refused(messages: list[Said], words: str) -> None:
    d = dialogues(Noise())
    with pytest.raises(DialogueError, match=words):
        await d.reply(messages)
    assert d.rollout("").trace.segments == ()


@pytest.mark.parametrize("sampling", [Sampling(9, temperature=0.5, stop=(1,)), Sampling(0), Sampling(9, top_p=0.5)])
async def test_sampling_that_the_trainer_could_not_follow_is_refused(sampling: Sampling) -> None:
    with pytest.raises(DialogueError, match=r"want (the rollout's|1 or more)"):
        await dialogues(Noise()).reply([USER], sampling=replace_stop(sampling))


def replace_stop(sampling: Sampling) -> Sampling:
    stop = sampling.stop if sampling.temperature != 1.0 else chat().stop
    return Sampling(sampling.max_tokens, sampling.temperature, sampling.top_p, stop)


async def test_fewer_tokens_and_a_seed_may_be_asked_for() -> None:
    asked: list[Sampling] = []

    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        asked.append(sampling)
        return [chat().stop[0]]

    for seed, most in ((0, 7), (5, 1000), (0, 7)):
        d = dialogues(ScriptedEngine(speak))
        await d.reply([USER], sampling=Sampling(most, stop=chat().stop, seed=seed))
    assert [s.max_tokens for s in asked] == [7, 100, 7]
    assert asked[0].seed == asked[2].seed != asked[1].seed


async def test_nothing_is_said_after_the_end() -> None:
    d = dialogues(Noise())
    d.rollout("")
    with pytest.raises(DialogueError, match="after the end"):
        await d.reply([USER])


class Miscounting(Noise):
    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        return Completion((5, 6, 7), (-1.0, -1.0), 0, "stop")


async def test_ids_without_log_probabilities_are_an_engines_failure_and_nothing_is_kept() -> None:
    d = dialogues(Miscounting())
    with pytest.raises(EngineError, match="3 ids and 2 log-probabilities"):
        await d.reply([USER])
    r = d.rollout("It is done.")
    assert r.trace.status == "error"
    assert "3 ids and 2" in r.trace.error
    assert r.trace.segments == ()


# --- budget --------------------------------------------------------------------------------


async def test_without_steps_nothing_is_sampled_and_the_rollout_is_truncated() -> None:
    noise = Noise()
    d = dialogues(noise, budget=Budget(1, 4096))
    one = await d.reply([USER])
    two = await d.reply([USER, one.said, Said("user", "And?")])
    assert (two.over, two.completion, len(noise.asked)) == ("budget", None, 1)
    assert d.rollout("").trace.status == "truncated"


async def test_the_turn_that_was_told_to_answer_calls_nothing_and_exhausts() -> None:
    d = dialogues(engine(says(Turn("so far", (call("echo", text="x"),)))), note=True, budget=Budget(1, 4096))
    one = await d.reply([USER], [ECHO])
    assert one.said == Said("assistant", "so far")
    assert len(one.turn.calls) == 1
    r = d.rollout(one.said.content)
    assert (r.trace.status, r.ledger.counts) == ("exhausted", {"call_after_budget": 1})


async def test_a_context_without_room_is_cut() -> None:
    d = dialogues(Noise(), budget=Budget(9, 120))
    assert (await d.reply([Said("user", "word " * 50)])).over == "context"
    assert d.rollout("").trace.status == "truncated"


async def test_a_client_that_shortens_its_history_goes_on() -> None:
    d = dialogues(Noise(), budget=Budget(9, 120))
    await d.reply([Said("user", "word " * 50)])
    await d.reply([Said("user", "a")])
    assert d.rollout("").trace.status == "answered"


# --- at once -------------------------------------------------------------------------------


async def test_requests_that_overlap_cost_their_longest_chain(autojump_clock: trio.testing.MockClock) -> None:
    d = dialogues(engine(says(Turn("done")), delay=1.0))
    replies: list[Reply] = []

    async def ask(words: str, turns: int) -> None:
        messages = (Said("user", words),)
        for _ in range(turns):
            reply = await d.reply(messages)
            replies.append(reply)
            messages = (*messages, reply.said, Said("user", "And?"))

    async with trio.open_nursery() as nursery:
        for turns in (1, 3, 2):
            nursery.start_soon(ask, f"w{turns}", turns)
    r = d.rollout("")
    assert d.left == BUDGET.critical_steps - 3
    assert r.ledger.critical_steps == 3
    assert sorted(stage.main for stage in r.ledger.stages) == [0, 0, 0, 1, 1, 1]
    assert r.ledger.seconds == 3.0


async def test_of_two_ways_on_at_once_one_grows_the_segment_and_one_forks() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.reply([USER])
    async with trio.open_nursery() as nursery:
        for words in ("And?", "Or?"):
            nursery.start_soon(d.reply, [USER, one.said, Said("user", words)])
    r = d.rollout("")
    assert opened(r) == ["start", "fork"]
    assert sorted(sampled(r)) == sorted(said for _, said in noise.asked)


async def test_a_cancelled_reply_leaves_nothing_behind(autojump_clock: trio.testing.MockClock) -> None:
    seeds: list[int] = []

    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        seeds.append(sampling.seed)
        return chat().encode_turn("done")

    slow, quick = (dialogues(ScriptedEngine(speak, delay=delay)) for delay in (5.0, 0.0))
    with trio.move_on_after(1):
        await slow.reply([USER])
    cut = slow.rollout("")
    assert (cut.trace.segments, cut.ledger.stages, cut.ledger.tokens_prompt) == ((), (), 0)
    again = dialogues(ScriptedEngine(speak, delay=5.0))
    with trio.move_on_after(1):
        await again.reply([USER])
    await again.reply([USER])
    await quick.reply([USER])
    assert seeds[0] == seeds[1]
    assert opened(again.rollout("")) == ["start"]


# --- whatever the client does ----------------------------------------------------------------

WORDS = ("And?", "Or?", "")
DEEDS = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(["go on", "again", "edit", "anew", "insert", "cancel"]),
        st.sampled_from(WORDS),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(DEEDS, st.booleans(), st.booleans())
def test_whatever_a_client_does_each_sampled_id_is_trained_once_after_the_ids_that_the_engine_had(
    deeds: list[tuple[int, str, str]], at_once: bool, note: bool
) -> None:
    """Against brute force: what was said is kept whole, and a request goes on from the longest beginning of it."""
    noise, brute = Noise(), Brute()

    async def play() -> Rollout:
        d = dialogues(noise, note=note, budget=Budget(50, 8192))
        pasts: list[tuple[Said, ...]] = [(SYSTEM, USER)]

        async def ask(messages: tuple[Said, ...]) -> None:
            reply = await d.reply(messages)
            assert reply.completion is not None
            ids, said = noise.asked[int(-0.5 - reply.completion.logprobs[0])]
            brute.heard(messages, reply.said, ids, said)
            pasts.append((*messages, reply.said))

        async with trio.open_nursery() as nursery:
            for k, deed, words in deeds:
                messages = deed_of(pasts[k % len(pasts)], deed, words)
                if deed == "cancel":
                    with trio.CancelScope() as scope:
                        scope.cancel()
                        await d.reply(messages)
                elif at_once:
                    nursery.start_soon(ask, messages)
                else:
                    await ask(messages)
        return d.rollout("")

    r = trio.run(play)
    assert sorted(sampled(r)) == sorted(said for _, said in noise.asked)
    asked = {said: ids for ids, said in noise.asked}
    for segment in r.trace.segments:
        before: list[int] = []
        for span in segment.spans:
            if span.kind == "sampled":
                assert before == asked[span.ids]
            before += span.ids
    assert len(r.ledger.stages) == len(noise.asked)
    assert len(r.trace.segments) == brute.segments


class Brute:
    """All that was said so far, and the ids up to each reply; which of them were gone on from."""

    def __init__(self) -> None:
        self.said: list[tuple[tuple[Said, ...], list[int]]] = []
        self.gone_on: set[int] = set()
        self.segments = 0

    def heard(self, messages: tuple[Said, ...], reply: Said, ids: list[int], said: tuple[int, ...]) -> None:
        lengths = [len(past) for past, _ in self.said if messages[: len(past)] == past]
        longest = [k for k, (past, _) in enumerate(self.said) if past == messages[: max(lengths, default=0)]]
        went_on = [k for k in longest if ids[: len(self.said[k][1])] == self.said[k][1]]
        assert bool(went_on) == bool(longest)
        free = [k for k in went_on if k not in self.gone_on]
        self.gone_on |= set(free[:1])
        self.segments += not free
        self.said.append(((*messages, reply), [*ids, *said]))


def deed_of(past: tuple[Said, ...], deed: str, words: str) -> tuple[Said, ...]:
    user = (Said("user", words),)
    match deed:
        case "again" if past[-1].role == "assistant":
            return past[:-1]
        case "edit" if past[-1].role == "assistant":
            return (*past[:-1], Said("assistant", "Edited."), *user)
        case "insert":
            return (*past, *user, Said("assistant", "Inserted."), *user)
        case "anew":
            return (SYSTEM, Said("user", f"Anew. {words}"))
        case _:
            return (*past, *user)


# --- plain completions -----------------------------------------------------------------------


async def test_a_text_that_begins_with_an_earlier_one_and_its_completion_goes_on_with_the_ids() -> None:
    noise = Noise()
    d = dialogues(noise)
    one = await d.complete("Once upon")
    await d.complete(f"Once upon{one.turn.content} and then")
    await d.complete("Twice upon")
    (prompt, said), (longer, _), _ = noise.asked
    assert longer == [*prompt, *said, *chat().encode(" and then")]
    assert opened(d.rollout("")) == ["start", "start"]


async def test_ids_go_on_from_exactly_those_ids() -> None:
    noise = Noise()
    d = dialogues(noise)
    await d.complete([5, 6])
    (prompt, said) = noise.asked[0]
    await d.complete([*prompt, *said, 7])
    await d.complete([*prompt, *said, 8])
    await d.complete([5, 6])
    r = d.rollout("")
    assert kinds(r) == [["prompt", "sampled", "observed", "sampled"], ["prompt", "sampled"], ["prompt", "sampled"]]
    assert opened(r) == ["start", "fork", "fork"]


async def test_what_is_asked_to_go_on_at_once_is_a_turn_of_its_own() -> None:
    noise = Noise()
    d = dialogues(noise)
    await d.complete([5, 6])
    await d.complete([5, 6, *noise.asked[0][1]])
    r = d.rollout("")
    assert opened(r) == ["start", "fork"]
    assert len(r.ledger.stages) == 2


@pytest.mark.parametrize("ids", [[], [-1], [1 << 20]])
async def test_ids_that_no_tokenizer_has_are_refused(ids: list[int]) -> None:
    with pytest.raises(DialogueError, match="want 0 to"):
        await dialogues(Noise()).complete(ids)
