"""The strict mode: each difference from the official one, stated by what both give."""

from __future__ import annotations

from datetime import datetime

import pytest

from rewards.widesearch import official
from rewards.widesearch.official import score_official
from rewards.widesearch.spec import DatasetError, MapJudge, Scores
from rewards.widesearch.strict import parse_date, score_strict, split_row
from tests.widesearch_tables import (
    COUNTRIES,
    COUNTRIES_EVALUATION,
    HEADER,
    ROWS,
    column,
    evaluation,
    exact,
    markdown,
    with_cell,
)

VARIANTS = [(key, *row[1:]) for row in ROWS for key in (row[0], row[0].upper(), f"{row[0]} *")]


@pytest.fixture(scope="module", autouse=True)
def _locales_loaded() -> None:
    """The first text that is no date in any language loads all languages: once, not in a test's time."""
    official.parse_date("unknown")
    parse_date("unknown")
    parse_date("10:30")


def both(response: str) -> tuple[Scores, Scores]:
    """Official and strict scores of a response about the countries."""
    return (
        score_official(COUNTRIES, COUNTRIES_EVALUATION, response),
        score_strict(COUNTRIES, COUNTRIES_EVALUATION, response),
    )


def values(scores: Scores) -> tuple[float, ...]:
    return tuple(scores.as_json().values())


def test_a_perfect_table_is_perfect_in_both_modes() -> None:
    assert [values(s) for s in both(markdown(HEADER, ROWS))] == [(1.0,) * 7] * 2


def test_spellings_of_one_key_are_one_row() -> None:
    old, new = both(markdown(HEADER, VARIANTS))
    assert (old.f1_by_item, old.f1_by_row, old.recall_by_item) == (1.5, 1.5, 3.0)
    assert values(new) == (1.0,) * 7


def test_aliases_that_the_judge_maps_to_one_key_are_one_row() -> None:
    response = markdown(HEADER, [*ROWS, ("Alphaland", *ROWS[0][1:])])
    judge = MapJudge({"Alphaland": "Alpha"})
    assert score_official(COUNTRIES, COUNTRIES_EVALUATION, response, judge).recall_by_item == 1.25
    assert values(score_strict(COUNTRIES, COUNTRIES_EVALUATION, response, judge)) == (1.0,) * 7


def test_a_second_answer_for_a_key_gains_nothing() -> None:
    wrong_first = [("ALPHA", "Z", *ROWS[0][2:]), *ROWS]
    new = both(markdown(HEADER, wrong_first))[1]
    assert (new.precision_by_item, new.recall_by_item) == (0.95, 0.95)


def test_two_metrics_on_a_column_are_worth_one_cell() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column(["exact_match", "in_match"])})
    response = markdown(("K", "V"), [("a", "red")])
    assert score_official("K,V\na,red\n", spec, response).f1_by_item == 1.5
    assert values(score_strict("K,V\na,red\n", spec, response)) == (1.0,) * 7


def test_a_blank_among_integers_costs_its_own_cell_only() -> None:
    gold, spec = "K,V\na,1\nb,2\nc,3\n", exact("k", "v")
    response = markdown(("K", "V"), [("a", "1"), ("b", ""), ("c", "3")])
    assert score_official(gold, spec, response).f1_by_item == 0.5
    assert score_strict(gold, spec, response).f1_by_item == pytest.approx(5 / 6)


def test_a_gold_blank_among_integers_leaves_the_others_integers() -> None:
    gold, spec = "K,V\na,\nb,2\nc,3\n", exact("k", "v")
    response = markdown(("K", "V"), [("a", "unknown"), ("b", "2"), ("c", "3")])
    assert score_official(gold, spec, response).f1_by_item == 0.5
    assert score_strict(gold, spec, response).f1_by_item == pytest.approx(5 / 6)


def test_a_blank_is_not_a_word() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("in_match")})
    response = markdown(("K", "V"), [("a", "")])
    assert score_official("K,V\na,banana\n", spec, response).f1_by_item == 1.0
    assert score_strict("K,V\na,banana\n", spec, response).f1_by_item == 0.5


def test_a_blank_is_not_a_date() -> None:
    assert official.parse_date("nan") is not None
    assert parse_date("nan") is None


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("2020", datetime(2020, 1, 1)),
        ("May 2001", datetime(2001, 5, 1)),
        ("Jan 5, 1999", datetime(1999, 1, 5)),
        ("2020-01-01T00:00:00Z", datetime(2020, 1, 1)),
        ("May", None),
        ("today", None),
        ("2 days ago", None),
        ("10:30", None),
    ],
)
def test_a_date_never_depends_on_today(text: str, date: datetime | None) -> None:
    assert parse_date(text) == date


def test_a_relative_date_equals_today_in_official_mode_only() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("date_near", "norm_date")})
    gold = f"K,V\na,{datetime.now():%Y-%m-%d}\n"
    response = markdown(("K", "V"), [("a", "today")])
    assert score_official(gold, spec, response).f1_by_item == 1.0
    assert score_strict(gold, spec, response).f1_by_item == 0.5


@pytest.mark.parametrize("cell", [r"Avi\|lle", "`Avi|lle`"])
def test_a_pipe_that_belongs_to_a_cell_does_not_zero_the_table(cell: str) -> None:
    gold = COUNTRIES.replace("Aville", "Avi|lle")
    response = markdown(HEADER, with_cell(0, "Capital", cell))
    assert score_official(gold, COUNTRIES_EVALUATION, response).f1_by_item == 0.0
    assert values(score_strict(gold, COUNTRIES_EVALUATION, response)) == (1.0,) * 7


def test_a_bare_pipe_spoils_its_own_row_only() -> None:
    old, new = both(markdown(HEADER, with_cell(0, "Capital", "Avi|lle")))
    assert old.f1_by_row == 0.0
    assert new.f1_by_row == 0.75


def test_a_stray_quote_is_a_character_of_its_cell() -> None:
    old, new = both(markdown(HEADER, with_cell(0, "Capital", '"Aville')))
    assert old.f1_by_item == 0.0
    assert new.f1_by_item == pytest.approx(0.95)


def test_an_address_that_cannot_be_read_costs_its_own_cell_only() -> None:
    old, new = both(markdown(HEADER, with_cell(0, "Site", "http://[x")))
    assert old.f1_by_item == 0.0
    assert new.f1_by_item == pytest.approx(0.95)


def test_numbers_match_by_value_where_exact_match_is_asked() -> None:
    gold, spec = "K,V\na,1000\nb,2\n", exact("k", "v")
    response = markdown(("K", "V"), [("a", "1,000"), ("b", "2.0")])
    assert score_official(gold, spec, response).f1_by_item == 0.5
    assert score_strict(gold, spec, response).f1_by_item == 1.0


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        (r"| a \| b | c |", ["a | b", "c"]),
        ('| "a | b" | say ""hi"" |', ["a | b", 'say ""hi""']),
        ('| "x | y |', ['"x', "y"]),
        ("a | | c", ["a", "", "c"]),
        ("| a | |", ["a", ""]),
        (r"| a \|", ["a |"]),
    ],
)
def test_a_row_splits_at_pipes_that_are_no_part_of_a_cell(line: str, cells: list[str]) -> None:
    assert split_row(line) == cells


@pytest.mark.parametrize("response", ["", "prose | only", "```markdown\n```", "```markdown\n| K |\n```"])
def test_a_response_without_the_table_scores_nothing(response: str) -> None:
    scores = score_strict("K,V\na,1\n", exact("k", "v"), response)
    assert values(scores) == (0.0,) * 7
    assert scores.zero_reason


def test_an_unknown_metric_is_refused() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("equal")})
    with pytest.raises(DatasetError, match=r"column 'v' names \['equal'\], want some of \['exact_match'"):
        score_strict("K,V\na,1\n", spec, "")


def test_a_column_that_nothing_scores_is_refused() -> None:
    with pytest.raises(DatasetError, match="column 'v' has no metric"):
        score_strict("K,V\na,1\n", evaluation({"k": column("exact_match"), "v": column([])}), "")


def test_a_gold_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(DatasetError, match="gold table: row 1 has 3 cells, want 2"):
        score_strict("K,V\na,1,2\n", exact("k", "v"), "")
