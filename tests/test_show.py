"""What a notebook shows of a rollout."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import trio
from msgspec import structs

from recipes.notebook import run
from swarm.loop import Harness
from swarm.show import Shown, compared
from swarm.show_lanes import lanes
from swarm.show_tokens import Tokens
from swarm.show_turns import Turns
from swarm.types import Ledger, Reward, Rollout, Stage, Turn
from tests.debug_cases import rolled, swarm
from tests.swarm_cases import call, chat, harness, says

HARMFUL = "<script>alert('x')</script> & \"quotes\""
VOID = {"input", "rect", "br"}


class Balanced(HTMLParser):
    """Raises where an element is closed that is not open; `open_` has those that never are."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        if tag not in VOID:
            self.open_.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def bare(rollout: Rollout, **changes: object) -> Rollout:
    return replace(rollout, **changes)  # type: ignore[arg-type]


async def test_a_rollout_shows_itself_with_every_agent_and_no_script():
    rollout = await rolled(swarm())
    shown = Balanced(rollout._repr_html_())
    assert not shown.open_
    assert "script" not in shown.names
    assert all(agent in shown.text for agent in ("main", "2:a", "3:a"))


async def test_what_is_shown_is_escaped():
    rollout = await rolled(swarm())
    harmed = bare(
        rollout,
        task=replace(rollout.task, query=HARMFUL, columns=(HARMFUL, "code"), gold=((HARMFUL, "1"),)),
        table=((HARMFUL, "2"),),
        answer=HARMFUL,
        prompt=HARMFUL,
        trace=replace(rollout.trace, agent=HARMFUL, error=HARMFUL),
        reward=Reward({HARMFUL: 1.0}, {HARMFUL: 1.0}),
    )
    for html in (harmed._repr_html_(), Shown(harmed, lambda ids: HARMFUL)._repr_html_()):
        shown = Balanced(html)
        assert "script" not in shown.names
        assert shown.text.count(HARMFUL) >= 5


async def test_what_was_said_is_shown_where_the_language_is_known():
    rollout = await rolled(swarm())
    assert "create_subagent" not in Balanced(rollout._repr_html_()).text
    assert "create_subagent" in Balanced(Shown(rollout, chat().decode)._repr_html_()).text


async def test_a_rollout_of_one_agent_is_shown_too():
    rollout = await rolled(harness(says(Turn("| A | 1 |", (call("echo", text="look"),)), Turn("#rows"))))
    shown = Balanced(rollout._repr_html_())
    assert not shown.open_
    assert "transcriptmain answered, 2 critical steps" in shown.text


async def test_a_line_stands_for_a_rollout_where_only_text_is_shown():
    rollout = await rolled(swarm())
    assert repr(Shown(rollout)) == (
        f"airports: answered, 2 subagents, {rollout.ledger.critical_steps} critical steps of "
        f"{rollout.total_steps} in all, {len(rollout.table)} rows"
    )


async def test_a_lane_begins_when_its_agent_was_started_and_the_slowest_are_critical():
    # main: turn 0 costs 1, turn 1 costs 1 and then its slowest subagent.
    rollout = await rolled(swarm())
    main, first, second = lanes(rollout)
    assert (main.start, first.start, second.start) == (0, 2, 2)
    assert first.critical
    slower = replace(first.rollout, ledger=structs.replace(first.rollout.ledger, stages=(Stage(9),)))
    longer = bare(rollout, children=(slower, second.rollout))
    assert [lane.critical for lane in lanes(longer)] == [True, True, False]


def test_an_answer_is_compared_cell_by_cell_and_the_first_of_equal_keys_counts():
    rollout = trio.run(rolled, swarm())
    rollout = bare(
        rollout,
        task=replace(rollout.task, columns=("airport", "code"), gold=(("A", "1"), ("B", "2"), ("C", "3"))),
        table=(("airport", "code"), ("a ", "1", "more"), ("B", "9"), ("b", "2"), ("D", "4")),
    )
    assert [line.cls for line in compared(rollout)] == ["right", "wrong", "missing", "extra"]
    text = Balanced(rollout._repr_html_()).text
    assert "✗ 9, want 2" in text
    assert "1 of 3 rows right" in text


def test_cells_are_compared_in_the_form_that_is_given():
    rollout = trio.run(rolled, swarm())
    rollout = bare(rollout, task=replace(rollout.task, gold=(("A", "4,023"),)), table=(("A", "4023"),))
    assert [line.cls for line in compared(rollout)] == ["wrong"]
    assert [line.cls for line in compared(rollout, lambda cell: cell.replace(",", ""))] == ["right"]


def test_a_ledger_shows_how_its_steps_add_up():
    text = Balanced(Ledger((Stage(1), Stage(2, (5, 3))))._repr_html_()).text
    assert "max(5, 3)7" in text
    assert text.index("all38") > 0


async def test_turns_can_be_stepped_through_without_a_script():
    rollout = await rolled(swarm())
    html = Turns(rollout, chat().decode, at=1)._repr_html_()
    shown = Balanced(html)
    assert not shown.open_
    assert "script" not in shown.names
    assert html.count("<section") == html.count("<label") == len(rollout.ledger.stages) == 4
    assert re.findall(r"<input( checked)?", html) == ["", " checked", "", ""]


async def test_each_turn_says_what_it_cost():
    rollout = await rolled(swarm())
    second = Turns(rollout, chat().decode)._repr_html_().split("<section>")[2]
    steps = [c.ledger.critical_steps for c in rollout.children]
    assert f"1 critical steps before it; it costs 1 + max({steps[0]}, {steps[1]}) = {1 + max(steps)}" in second


def test_a_token_is_coloured_by_its_number():
    html = Tokens(["a", "b", "c", "<"], [2.0, -1.0, 0.0, float("nan")], "advantage")._repr_html_()
    assert '<i class="a9" title="+2.0000">a</i>' in html
    assert re.search(r'<i class="b[45]" title="-1.0000">b</i>', html)
    assert '<i title="+0.0000">c</i>' in html
    assert '<i class="none" title="+nan">&lt;</i>' in html


def test_as_many_numbers_as_tokens_are_wanted():
    with pytest.raises(ValueError, match="tokens: 1 numbers for 2 pieces, want one each"):
        Tokens(["a", "b"], [1.0], "value")


async def _answered(h: Harness, seed: int) -> str:
    return (await rolled(h, seed)).trace.status


def test_an_async_function_runs_where_no_loop_runs_and_where_asyncio_does():
    async def in_a_kernel() -> str:
        return run(_answered, swarm(), 1)

    assert run(_answered, swarm(), 1) == asyncio.run(in_a_kernel()) == "answered"


def test_what_an_async_function_raises_reaches_its_caller():
    async def fails() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        run(fails)
