"""The official mode gives the published scorer's numbers, defects included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewards.widesearch.official import parse_date, score_official
from rewards.widesearch.spec import DatasetError, MapJudge, Scores
from tests.widesearch_tables import (
    COUNTRIES,
    COUNTRIES_EVALUATION,
    HEADER,
    ROWS,
    column,
    csv_text,
    evaluation,
    exact,
    markdown,
    with_cell,
)

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "widesearch_cases.json").read_text("utf-8"))
HALVES = (2 / 3, 2 / 3, 2 / 3)


@pytest.fixture(scope="module", autouse=True)
def _locales_loaded() -> None:
    """The first text that is no date in any language loads all languages: once, not in a test's time."""
    parse_date("unknown")


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_official_mode_gives_the_published_values(case: dict[str, Any]) -> None:
    scores = score_official(case["gold_csv"], case["evaluation"], case["response"], MapJudge(case["judge_map"]))
    assert scores.as_json() == pytest.approx(case["expected"], abs=1e-6)
    assert bool(scores.zero_reason) == bool(case["zero_reason"])


def values(scores: Scores) -> tuple[float, ...]:
    return tuple(scores.as_json().values())


def countries(response: str, judge_map: dict[str, str] | None = None) -> tuple[float, ...]:
    return values(score_official(COUNTRIES, COUNTRIES_EVALUATION, response, MapJudge(judge_map or {})))


PERFECT = (1.0,) * 7
ZERO = (0.0,) * 7
ONE_CELL_WRONG = (0.0, *[0.75] * 3, *[0.95] * 3)
FOUR_OF_FIVE = (0.0, 0.8, 1.0, 8 / 9, 0.8, 1.0, 8 / 9)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("Population", "1051", ONE_CELL_WRONG),
        ("Population", "5-7", ONE_CELL_WRONG),
        ("Site", "https://www.alpha.org/", ONE_CELL_WRONG),
        ("Capital", "Aville.", ONE_CELL_WRONG),
        ("Founded", "Jan 15, 1900", PERFECT),
        ("Site", "see https://alpha.org/", PERFECT),
        ("Country", "Alfa", (0.0, *[0.75] * 6)),
        ("Country", "**ALPHA**", PERFECT),
        ("Capital", '"Aville"', PERFECT),
    ],
)
def test_one_changed_cell_scores_as_published(name: str, value: str, expected: tuple[float, ...]) -> None:
    assert countries(markdown(HEADER, with_cell(0, name, value))) == pytest.approx(expected)


def test_an_unlabelled_or_otherwise_labelled_fence_is_read_by_its_pipes() -> None:
    assert countries(markdown(HEADER, ROWS, "```md")) == PERFECT


def test_column_order_does_not_count() -> None:
    assert countries(markdown(HEADER[::-1], [row[::-1] for row in ROWS])) == PERFECT


def test_one_wrong_row_more_costs_precision() -> None:
    wrong = ("Omega", "Oville", "1", "1800-01-01", "https://omega.org/")
    assert countries(markdown(HEADER, [*ROWS, wrong])) == pytest.approx(FOUR_OF_FIVE)


def test_of_rows_with_equal_keys_the_first_counts() -> None:
    wrong = ("Alpha", "Z", *ROWS[0][2:])
    assert countries(markdown(HEADER, [wrong, *ROWS])) == pytest.approx(ONE_CELL_WRONG)


def test_two_spellings_of_one_key_both_score() -> None:
    variant = ("ALPHA", *ROWS[0][1:])
    assert countries(markdown(HEADER, [*ROWS, variant])) == pytest.approx((0.0, *[1.0, 1.25, 10 / 9] * 2))


def test_three_spellings_of_every_key_reach_an_f1_of_one_and_a_half() -> None:
    spelt = [(key, *row[1:]) for row in ROWS for key in (row[0], row[0].upper(), f"{row[0]} *")]
    assert countries(markdown(HEADER, spelt)) == pytest.approx((0.0, *[1.0, 3.0, 1.5] * 2))


def test_a_column_that_the_judge_maps_is_read() -> None:
    header = ("Country", "Capital", "Inhabitants", "Founded", "Site")
    assert countries(markdown(header, ROWS), {"inhabitants": "population"}) == PERFECT


def test_an_extra_column_that_maps_onto_another_zeroes_the_table() -> None:
    rows = [(*row, "x") for row in ROWS]
    assert countries(markdown((*HEADER, "Notes"), rows), {"notes": "capital"}) == ZERO


def test_a_first_row_of_two_cells_loses_its_other_three() -> None:
    expected = (0.0, *[0.75] * 3, *[0.85] * 3)
    assert countries(markdown(HEADER, [ROWS[0][:2], *ROWS[1:]])) == pytest.approx(expected)


def test_a_table_cut_in_its_last_row_loses_the_cells_after_the_cut() -> None:
    response = "```markdown\n" + markdown(HEADER, ROWS, "").strip().removesuffix(" | 1930-04-01 | https://delta.org/ |")
    half_key = response.replace("| Delta | Dville | 4000", "| Delta")
    assert countries(half_key) == pytest.approx((0.0, *[0.75] * 3, *[0.8] * 3))


def small(gold: str, spec: dict[str, Any], header: tuple[str, ...], *rows: tuple[str, ...]) -> tuple[float, ...]:
    return values(score_official(gold, spec, markdown(header, rows)))


def test_one_blank_turns_a_column_of_integers_into_floats() -> None:
    rows = (("a", "1"), ("b", ""), ("c", "3"))
    assert small("K,V\na,1\nb,2\nc,3\n", exact("k", "v"), ("K", "V"), *rows) == (0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5)


def test_a_blank_gold_cell_is_matched_by_any_of_the_ways_pandas_reads_a_blank() -> None:
    rows = (("a", "N/A"), ("b", "2"), ("c", "3"))
    assert small("K,V\na,\nb,2\nc,3\n", exact("k", "v"), ("K", "V"), *rows) == PERFECT


def test_half_a_key_is_no_key() -> None:
    rows = (("a", "x", "1"), ("a", "y", "2"), ("b", "z", "3"))
    found = small("K,K2,V\na,x,1\na,y,2\nb,x,3\n", exact("k", "k2", "v", keys=2), ("K", "K2", "V"), *rows)
    assert found == pytest.approx((0.0, *HALVES, *HALVES))


def test_a_blank_is_the_word_nan_and_so_is_in_banana() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("in_match")})
    assert small("K,V\na,banana\n", spec, ("K", "V"), ("a", "")) == PERFECT


def test_a_required_column_without_a_pipeline_zeroes_the_table() -> None:
    spec = exact("k", "v")
    del spec["eval_pipeline"]["v"]
    assert small("K,V\na,1\n", spec, ("K", "V"), ("a", "1")) == ZERO


def test_a_metric_that_is_listed_twice_counts_once() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column(["exact_match", "exact_match"])})
    assert small("K,V\na,1\n", spec, ("K", "V"), ("a", "1")) == PERFECT


def test_equal_tables_succeed_whatever_their_cells_score_when_no_key_was_mapped() -> None:
    spec = evaluation({"k": column("in_match"), "v": column(["exact_match", "in_match"])})
    assert small("K,V\na,1\n", spec, ("K", "V"), ("a", "1")) == (1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 1.5)


def test_a_column_for_the_judge_is_graded_by_equality_by_default() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("llm_judge", criterion="same thing")})
    rows = (("a", "Red"), ("b", "blue"))
    assert small("K,V\na,red\nb,green\n", spec, ("K", "V"), *rows) == (0.0, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75)


def test_a_tolerance_that_is_no_number_zeroes_the_table() -> None:
    spec = evaluation({"k": column("exact_match"), "v": column("number_near", "extract_number", "near")})
    assert small("K,V\na,1\n", spec, ("K", "V"), ("a", "1")) == ZERO


def test_a_gold_table_without_a_required_column_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"gold table has columns \['k'\], want also \['v'\]"):
        score_official("K\na\n", exact("k", "v"), "")


def test_an_evaluation_without_required_columns_is_refused() -> None:
    with pytest.raises(DatasetError, match="evaluation: required is missing, want a list of strings"):
        score_official(csv_text(("K",), []), {"eval_pipeline": {}, "unique_columns": []}, "")
