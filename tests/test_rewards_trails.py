"""The score of deep-search answers: rows right beside their letters."""

import pytest

from rewards.trails import trail_scores
from swarm.types import Table, Task

GOLD = (("a", "4,023"), ("b", "X1"), ("c", "N/A"), ("d", "New York"))
TASK = Task("t", "q", "s", "trails", ("trail", "value"), GOLD)


def scores(*rows: tuple[str, ...]) -> tuple[float, float]:
    result = trail_scores(TASK, rows)
    return result["score"], result["success"]


def test_all_values_right_is_a_success_in_any_order() -> None:
    assert scores(*GOLD) == (1.0, 1.0)
    assert scores(*reversed(GOLD)) == (1.0, 1.0)


def test_case_space_and_the_writing_of_numbers_do_not_count() -> None:
    assert scores(("A", " 4023.0"), ("b ", "x1"), ("c", "n/a"), ("d", "new  york")) == (1.0, 1.0)


def test_a_right_value_beside_another_letter_is_wrong() -> None:
    assert scores(("a", "X1"), ("b", "4,023"), *GOLD[2:]) == (0.5, 0.0)  # c and d of four


def test_what_is_not_answered_is_wrong() -> None:
    assert scores(*GOLD[:2]) == (0.5, 0.0)


def test_a_letter_that_no_trail_has_counts_as_wrong() -> None:
    assert scores(*GOLD, ("e", "x")) == (0.8, 0.0)  # four right of five letters


@pytest.mark.parametrize("table", [(), ((),), (("a",),)])
def test_no_answer_scores_nothing(table: Table) -> None:
    assert trail_scores(TASK, table) == {"score": 0.0, "success": 0.0}


def test_only_the_first_row_of_a_letter_counts() -> None:
    assert scores(*GOLD, ("a", "1")) == (1.0, 1.0)
    assert scores(("a", "1"), *GOLD) == (0.75, 0.0)


def test_a_row_of_many_values_is_no_answer() -> None:
    assert scores(("a", "4,023", "X1"), *GOLD[1:]) == (0.75, 0.0)


def test_absent_is_not_right_where_a_value_is_wanted() -> None:
    assert scores(*((letter, "N/A") for letter in "abcd")) == (0.25, 0.0)
