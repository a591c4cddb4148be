"""The score of deep-search answers: cells right in their place."""

import pytest

from rewards.trails import trail_scores
from swarm.types import Table, Task

TASK = Task("t", "q", "s", "trails", ("a", "b", "c", "d"), (("4,023", "X1", "N/A", "New York"),), keys=0)


def scores(*rows: tuple[str, ...]) -> tuple[float, float]:
    result = trail_scores(TASK, rows)
    return result["score"], result["success"]


def test_all_cells_right_is_a_success() -> None:
    assert scores(("4,023", "X1", "N/A", "New York")) == (1.0, 1.0)


def test_case_space_and_the_writing_of_numbers_do_not_count() -> None:
    assert scores((" 4023.0", "x1", "n/a", "new  york")) == (1.0, 1.0)


def test_a_right_value_in_another_place_is_wrong() -> None:
    assert scores(("X1", "4,023", "N/A", "New York")) == (0.5, 0.0)  # c and d of four


def test_a_short_row_lacks_its_last_cells() -> None:
    assert scores(("4,023", "X1")) == (0.5, 0.0)


def test_cells_too_many_count_as_wrong() -> None:
    assert scores(("4,023", "X1", "N/A", "New York", "x")) == (0.8, 0.0)  # four right of five cells


@pytest.mark.parametrize("table", [(), ((),)])
def test_no_answer_scores_nothing(table: Table) -> None:
    assert trail_scores(TASK, table) == {"score": 0.0, "success": 0.0}


def test_only_the_first_row_counts() -> None:
    right, wrong = ("4,023", "X1", "N/A", "New York"), ("1", "2", "3", "4")
    assert scores(right, wrong) == (1.0, 1.0)
    assert scores(wrong, right) == (0.0, 0.0)


def test_a_cell_that_is_absent_is_not_right_where_a_value_is_wanted() -> None:
    assert scores(("N/A", "N/A", "N/A", "N/A")) == (0.25, 0.0)
