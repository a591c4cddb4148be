"""Verifiers by rule, on tables whose scores are worked out by hand, and batches of rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from rewards.table import table_scores
from rewards.verifiers import (
    NOT_VERIFIED,
    RULES,
    Numeric,
    Rule,
    exact_scores,
    failures,
    number,
    number_columns,
    set_scores,
    verified,
    without_gold,
)
from swarm.types import Ledger, Rollout, Status, Table, Task, Trace
from swarm.verdicts import Verdict

GOLD: Table = (("Ohio", "Columbus", "4,023"), ("Utah", "Provo", "7"), ("Iowa", "Ames", "N/A"))
TASK = Task("t", "List the states.", "states", "state", ("state", "city", "count"), GOLD)
VALUE = replace(TASK, columns=("count",), gold=(("4,023",),))
NAMED = replace(TASK, columns=("trail", "count"), gold=(("a", "4,023"), ("b", "7")), names=("Ohio", "Utah"))


def rollout(table: Table = (), answer: str = "", task: Task = TASK, status: Status = "answered") -> Rollout:
    return Rollout(task, Trace("main", (), status), Ledger(), answer=answer, table=table)


async def scored(name: str, r: Rollout) -> float:
    return (await RULES[name](r)).scores[RULES[name].main]


# --- each verifier ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in RULES if n != "trails"])
async def test_the_gold_table_scores_one_and_no_table_nothing(name: str):
    assert RULES[name].fits(TASK) == ""
    assert await scored(name, rollout(GOLD)) == 1.0
    assert await scored(name, rollout()) == 0.0


async def test_item_f1_is_the_score_of_the_table():
    r = rollout(GOLD[:2])
    assert (await RULES["item_f1"](r)).scores == table_scores(TASK, GOLD[:2])
    assert await scored("item_f1", r) == pytest.approx(0.8)  # 6 of 6 cells, of 9 wanted


async def test_the_official_scorer_reads_the_table_that_was_handed_in():
    header: Table = (TASK.columns,)
    assert await scored("official", rollout(header + GOLD)) == 1.0
    # One cell of six wrong, three cells wanted more: precision 5/6, recall 5/9.
    wrong = (GOLD[0], ("Utah", "Provo", "8"))
    assert await scored("official", rollout(wrong)) == pytest.approx(2 / 3)
    # Two ways to write a number are the same to the strict one only.
    other = (("Ohio", "Columbus", "4023.0"), *GOLD[1:])
    assert await scored("strict", rollout(other)) == 1.0
    assert await scored("official", rollout(other)) < 1.0


@given(st.lists(st.tuples(*[st.sampled_from(["Ohio", "Utah", "Columbus", "Provo", "7", "x", ""])] * 3), max_size=5))
def test_the_strict_scorer_and_the_fast_one_agree(table: list[tuple[str, str, str]]):
    table = [row for row in table if all(row)]
    fast = table_scores(TASK, tuple(table))
    strict = RULES["strict"].score(TASK, tuple(table))
    assert strict["f1_by_item"] == pytest.approx(fast["item_f1"])


def test_exact_is_all_of_the_rows_in_any_order_and_no_other():
    assert exact_scores(TASK, GOLD[::-1]) == {"exact": 1.0}
    assert exact_scores(TASK, (TASK.columns, *GOLD, GOLD[0], (" ", "", ""))) == {"exact": 1.0}
    for wrong in (GOLD[:2], (*GOLD, ("Ohio", "Columbus", "5")), ((*GOLD[0], "more"), *GOLD[1:])):
        assert exact_scores(TASK, wrong) == {"exact": 0.0}


def test_a_set_is_scored_by_its_keys_once_each():
    found: Table = (("Ohio",), ("ohio ", "x"), ("Texas",), ("Utah", "?", "?"))
    # Ohio and Utah of {Ohio, Texas, Utah}, of three wanted.
    assert set_scores(TASK, found) == pytest.approx({"set_f1": 2 / 3, "set_precision": 2 / 3, "set_recall": 2 / 3})


def test_numbers_are_right_within_the_tolerance_and_what_is_no_number_must_be_equal():
    near = Numeric(relative=0.01)
    table: Table = (("Ohio", "?", "3990"), ("Utah", "?", "7.1"), ("Iowa", "?", "n/a"), ("Texas", "?", "1"))
    # 33 off where 40.23 are allowed; 0.1 off where 0.07 are; N/A is equal; Texas is not asked for.
    expected = {"numeric_precision": 2 / 4, "numeric_recall": 2 / 3, "numeric_f1": 4 / 7}
    assert near(TASK, table) == pytest.approx(expected)
    assert Numeric(relative=0.0, absolute=0.1).near("7.1", "7") is True
    assert Numeric(relative=0.0, absolute=0.0).near("7.1", "7") is False
    assert near.near("0", "N/A") is False


@pytest.mark.parametrize(
    ("text", "value"),
    [("4,023", 4023), (" -1.5e3 ", -1500), (".5", 0.5), ("12 %", 0.12), ("7.", 7), ("+3", 3), ("1e400", None),
     ("nan", None), ("inf", None), ("1_000", None), ("about 7", None), ("4,02", None), ("", None), (".", None)],
)  # fmt: skip
def test_a_cell_is_a_number_as_a_whole_or_none(text: str, value: float | None):
    assert number(text) == value


def test_the_columns_of_numbers_are_those_that_hold_one_beside_the_keys():
    assert number_columns(TASK) == [2]
    assert number_columns(replace(TASK, columns=("count", "x"), gold=(("7", "y"),))) == []
    assert number_columns(VALUE) == [0]


async def test_one_value_may_be_answered_in_plain_words_that_are_it():
    assert await scored("exact", rollout(answer="4023\n", task=VALUE)) == 1.0
    assert await scored("exact", rollout(answer="It is 4023", task=VALUE)) == 0.0
    assert await scored("numeric", rollout(answer="4025", task=VALUE)) == 1.0
    # A second guess costs half of the precision.
    assert await scored("numeric", rollout(answer="4025\n9", task=VALUE)) == pytest.approx(2 / 3)
    assert await scored("numeric", rollout(answer="9\n4025", task=VALUE)) == 0.0


async def test_a_list_may_be_answered_a_line_each():
    task = replace(TASK, columns=("state",), gold=(("Ohio",), ("Utah",)))
    assert await scored("set", rollout(answer="- Ohio\n\n2. Utah", task=task)) == 1.0
    assert await scored("item_f1", rollout(answer="Ohio", task=task)) == pytest.approx(2 / 3)


async def test_trails_are_scored_by_their_letters():
    assert await scored("trails", rollout((("a", "4023"), ("b", "8")), task=NAMED)) == 0.5


# --- what fits -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_nothing_can_be_scored_without_a_gold_table(name: str):
    assert RULES[name].fits(replace(TASK, gold=())) == "it has no gold table"


@pytest.mark.parametrize("name", ["item_f1", "strict", "official", "set"])
def test_rows_that_the_question_names_are_no_find(name: str):
    assert RULES[name].fits(NAMED) == "the question names its rows"


def test_trails_fit_where_the_question_names_them():
    assert RULES["trails"].fits(NAMED) == ""
    assert RULES["trails"].fits(TASK) == "it has no trails, whose letters stand in the question"


def test_numbers_fit_where_there_are_some_to_compare():
    assert RULES["numeric"].fits(VALUE) == ""
    assert "no column of numbers" in RULES["numeric"].fits(replace(TASK, gold=(("Ohio", "Columbus", "many"),)))
    assert "a list of 2" in RULES["numeric"].fits(replace(VALUE, gold=(("1",), ("2",))))


def test_what_the_published_scorer_would_misread_does_not_fit():
    assert "pipe" in RULES["official"].fits(replace(TASK, gold=(("Ohio", "a|b", "1"),)))
    assert "the same to the scorer" in RULES["official"].fits(replace(TASK, columns=("state", "A b", "ab")))


def test_a_gold_table_that_is_not_one_is_named():
    assert without_gold(replace(TASK, gold=(("Ohio",),))) == "a gold row of 1 cells, 1 of them keys, for 3 columns"
    assert "4 of them keys" in without_gold(replace(TASK, keys=4))


def test_senseless_tolerances_are_refused_with_the_value():
    with pytest.raises(ValueError, match="numeric: relative = -0.1, want 0 or more"):
        Numeric(relative=-0.1)
    with pytest.raises(ValueError, match="numeric: absolute = inf, want 0 or more"):
        Numeric(absolute=float("inf"))


# --- batches ---------------------------------------------------------------------------


class Slow:
    """Scores a rollout by its answer, the later the larger, and knows how many it had at once."""

    main = "n"

    def __init__(self) -> None:
        self.running = self.most = 0

    def fits(self, task: Task) -> str:
        return ""

    async def __call__(self, r: Rollout) -> Verdict:
        self.running += 1
        self.most = max(self.most, self.running)
        await trio.sleep(10 - int(r.answer))
        self.running -= 1
        return Verdict({"n": float(r.answer)}) if r.answer != "3" else Verdict({}, "judge_engine: down")


async def test_verdicts_come_in_the_order_of_the_rollouts_a_few_at_once(autojump_clock: trio.abc.Clock):
    slow, heard = Slow(), list[None]()
    rollouts = [rollout(answer=str(k)) for k in range(6)]
    verdicts = await verified(slow, rollouts, at_once=2, done=lambda: heard.append(None))
    assert [v.scores.get("n") for v in verdicts] == [0, 1, 2, None, 4, 5]
    assert (slow.most, len(heard)) == (2, 6)
    assert failures(verdicts) == {"judge_engine": 1}


async def test_a_rollout_that_failed_is_not_shown_to_the_verifier():
    asked = list[Task]()

    def score(task: Task, table: Table) -> dict[str, float]:
        asked.append(task)
        return {"x": 1.0}

    verdicts = await verified(Rule(score, "x", without_gold), [rollout(status="error"), rollout()])
    assert verdicts == [NOT_VERIFIED, Verdict({"x": 1.0})]
    assert len(asked) == 1
    assert failures(verdicts) == {"rollout": 1}


async def test_none_at_once_is_refused():
    with pytest.raises(ValueError, match="verified: at_once = 0, want at least 1"):
        await verified(RULES["exact"], [], at_once=0)
