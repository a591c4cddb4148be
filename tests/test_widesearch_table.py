"""The fast verifier: worked examples, and what holds of every table."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.table import canonical, table_scores
from rewards.widesearch.strict import score_strict
from swarm.types import Table, Task
from tests.widesearch_tables import csv_text, exact, markdown

GOLD: Table = (("Ohio", "Columbus", "4,023"), ("Utah", "Provo", "7"))


def task(gold: Table = GOLD, keys: int = 1) -> Task:
    return Task("t", "?", "s", "d", tuple("StateCityCount"[5 * k : 5 * k + 5] for k in range(len(gold[0]))), gold, keys)


def item_precision_recall(table: Table) -> tuple[float, float]:
    scores = table_scores(task(), table)
    return scores["item_precision"], scores["item_recall"]


def test_the_gold_table_scores_one_everywhere() -> None:
    assert set(table_scores(task(), GOLD).values()) == {1.0}


def test_an_empty_table_scores_nothing() -> None:
    assert set(table_scores(task(), ()).values()) == {0.0}


def test_case_space_and_the_writing_of_numbers_do_not_count() -> None:
    assert table_scores(task(), ((" OHIO", "columbus ", "4023.0"), ("Utah", "Provo", "+07")))["success"] == 1.0


def test_a_wrong_cell_costs_one_of_six() -> None:
    scores = table_scores(task(), (GOLD[0], ("Utah", "Provo", "8")))
    assert scores == {"item_f1": 5 / 6, "item_precision": 5 / 6, "item_recall": 5 / 6, "row_f1": 0.5, "success": 0.0}


def test_keys_alone_are_worth_their_cells() -> None:
    assert item_precision_recall((("Ohio",), ("Utah",))) == (2 / 6, 2 / 6)


def test_a_cell_too_many_is_cut() -> None:
    assert item_precision_recall((("Ohio", "Columbus", "4023", "more"),)) == (1.0, 0.5)


def test_a_cell_that_was_not_written_equals_no_gold_cell_not_even_a_blank() -> None:
    gold: Table = (("Ohio", ""),)
    assert table_scores(task(gold), (("Ohio",),))["item_f1"] == 0.5
    assert table_scores(task(gold), (("Ohio", " "),))["item_f1"] == 1.0


def test_a_row_shorter_than_its_key_matches_nothing() -> None:
    assert table_scores(task((("a", "", "1"),), keys=2), (("a",),))["item_f1"] == 0.0


def test_the_header_and_blank_rows_are_not_counted() -> None:
    assert item_precision_recall((task().columns, (), ("", " "), *GOLD)) == (1.0, 1.0)


def test_a_second_row_of_a_key_neither_gains_nor_costs() -> None:
    assert item_precision_recall((("Ohio", "x", "1"), ("ohio ", "Columbus", "4023"))) == (1 / 3, 1 / 6)


def test_numbers_have_one_canonical_form() -> None:
    forms = ["4,023", "04023", "+4023", "4023.", "4023.00"]
    assert {canonical(form) for form in forms} == {"4023"}
    assert [canonical(text) for text in ("-0.0", "1,00", "0.50", "St. 5", "²")] == ["0", "1,00", "0.5", "st. 5", "²"]


CELLS = st.sampled_from(["x", "y", "Z", "x y", "1", "2", "10", "1,000", "1000", "2.5"])
TABLES = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6).map(tuple)
ARBITRARY = st.lists(st.lists(st.text(max_size=3) | CELLS, max_size=5).map(tuple), max_size=6).map(tuple)
quick = settings(max_examples=25, deadline=None)


@quick
@given(TABLES, ARBITRARY, st.integers(1, 3))
def test_no_table_scores_more_than_one_or_less_than_nothing(gold: Table, table: Table, keys: int) -> None:
    assert all(0.0 <= value <= 1.0 for value in table_scores(task(gold, keys), table).values())


@quick
@given(TABLES, st.data())
def test_the_order_of_rows_with_different_keys_does_not_count(gold: Table, data: st.DataObject) -> None:
    table = tuple({canonical(row[0]): row for row in data.draw(TABLES)}.values())
    shuffled = tuple(data.draw(st.permutations(table)))
    assert table_scores(task(gold), table) == table_scores(task(gold), shuffled)


@quick
@given(TABLES, st.integers(1, 3))
def test_a_perfect_table_scores_one(gold: Table, keys: int) -> None:
    assert set(table_scores(task(gold, keys), gold).values()) == {1.0}


@quick
@given(TABLES, TABLES, st.integers(1, 3))
def test_the_fast_verifier_agrees_with_the_strict_mode(gold: Table, table: Table, keys: int) -> None:
    names = ("a", "b", "c")
    quoted = [[f'"{cell}"' for cell in row] for row in gold]
    spec = exact(*names, keys=keys)
    for pipeline in spec["eval_pipeline"].values():
        pipeline["preprocess"] = []
    slow = score_strict(csv_text(names, quoted), spec, markdown(names, table))
    fast = table_scores(task(gold, keys), table)
    assert (slow.f1_by_item, slow.precision_by_item, slow.recall_by_item, slow.f1_by_row, slow.score) == tuple(
        fast[name] for name in ("item_f1", "item_precision", "item_recall", "row_f1", "success")
    )
