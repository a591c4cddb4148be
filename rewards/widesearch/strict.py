"""Strict mode: the WideSearch score without the published scorer's four defects. F1 never exceeds 1.

 1. Rows are deduplicated after their keys were mapped and normalised, and matched one to one; a column
    with several metrics is worth its least.
 2. Cells are text, never inferred columns: a blank is a blank, matches only a blank and changes no other cell.
 3. Dates never read the clock: a date without a year is no date, missing parts are the first ones.
 4. A pipe that is escaped or in a quoted or backticked cell belongs to the cell, a stray quote is a character,
    and a row that has too many cells spoils itself only.
Exact matches compare numbers by value ("4,023" = "4023"). Everything else is as in `official`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

import dateparser

from rewards.table import canonical
from rewards.widesearch.metrics import DATE_ERRORS, JUDGED, METRICS, PREPROCESS, compare, preprocessed
from rewards.widesearch.official import table_lines, table_text
from rewards.widesearch.spec import (
    DatasetError,
    Evaluation,
    Judge,
    MapJudge,
    Pipeline,
    Scores,
    column_name,
    read_evaluation,
    scores_from_counts,
)

# One cell and the pipe or the line's end after it: whole-cell quotes, whole-cell backticks, or plain with escapes.
_CELL = re.compile(r'(\s*"(?:[^"]|"")*"\s*(?=\||$)|\s*`[^`]*`\s*(?=\||$)|(?:\\\||[^|])*)(\||$)')
# "NA" is not among them: it is Namibia's code.
_BLANK = {"", "nan", "n/a", "#n/a", "<na>", "null", "none"}
_NO_CLOCK = {
    "PREFER_DAY_OF_MONTH": "first",
    "PREFER_MONTH_OF_YEAR": "first",
    "RELATIVE_BASE": datetime(2000, 1, 1),
    "PARSERS": ["absolute-time"],
    "REQUIRE_PARTS": ["year"],
    "RETURN_AS_TIMEZONE_AWARE": False,
}

Row = Mapping[str, str]
Key = tuple[str, ...]


def score_strict(gold_csv: str, evaluation: Mapping[str, Any], response: str, judge: Judge | None = None) -> Scores:
    """Scores a response; arguments as for `score_official`.

    Raises DatasetError when the gold table or the evaluation cannot be used, also where it names a metric that
    does not exist or leaves a column unscored.
    """
    spec = _checked(read_evaluation(evaluation))
    gold = _gold(gold_csv, spec)
    judge = judge or MapJudge()
    text = table_text(response)
    lines = [split_row(line) for line in table_lines(text)] if text else []
    if not lines:
        return Scores(zero_reason="no table in the response")
    names = _aligned([column_name(name) for name in lines[0]], spec, judge)
    if sorted(names) != sorted(spec.required):
        return Scores(zero_reason=f"columns {names}, want {list(spec.required)}")
    rows: list[Row] = [dict(zip(names, cells + [""] * len(names), strict=False)) for cells in lines[1:]]
    return _scores(_by_key(gold, spec), _by_key(_keys_mapped(rows, gold, spec, judge), spec), spec, judge)


def split_row(line: str) -> list[str]:
    r"""The cells of a markdown table row: `| a \| b | "c|d" |` → ["a | b", "c|d"]."""
    inner = re.sub(r"(?<!\\)\|$", "", line.strip().removeprefix("|"))
    cells: list[str] = []
    at, more = 0, True
    while more and (m := _CELL.match(inner, at)):
        cells.append(_bare(m[1].strip()))
        at, more = m.end(), m[2] == "|"
    return cells


def _bare(cell: str) -> str:
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        cell = cell[1:-1].replace('""', '"')
    elif len(cell) > 1 and cell[0] == cell[-1] == "`":
        cell = cell[1:-1]
    return cell.replace("\\|", "|").strip()


def _checked(spec: Evaluation) -> Evaluation:
    if not spec.unique_columns or not set(spec.unique_columns) <= set(spec.required):
        raise DatasetError(f"evaluation: unique_columns {list(spec.unique_columns)}, want some of {spec.required}")
    for name in spec.required:
        pipeline = spec.pipelines.get(name)
        if name not in spec.unique_columns and not (pipeline and pipeline.metric):
            raise DatasetError(f"evaluation: column {name!r} has no metric, want at least one")
        _check_names(name, pipeline or Pipeline())
    return spec


def _check_names(column: str, pipeline: Pipeline) -> None:
    for seen, known in ((pipeline.preprocess, PREPROCESS), (pipeline.metric, (*METRICS, JUDGED))):
        if unknown := set(seen) - set(known):
            raise DatasetError(f"evaluation: column {column!r} names {sorted(unknown)}, want some of {list(known)}")
    if "number_near" in pipeline.metric and not isinstance(pipeline.criterion, int | float):
        raise DatasetError(f"evaluation: column {column!r} has criterion {pipeline.criterion!r}, want a number")


def _gold(gold_csv: str, spec: Evaluation) -> list[Row]:
    try:
        rows = [row for row in csv.reader(StringIO(gold_csv.removeprefix("\ufeff")), strict=True) if row]
    except csv.Error as error:
        raise DatasetError(f"gold table: {error}, want a CSV table with a header") from error
    names = [column_name(name) for row in rows[:1] for name in row]
    if missing := [name for name in spec.required if name not in names]:
        raise DatasetError(f"gold table has columns {names}, want also {missing}")
    for k, row in enumerate(rows[1:], 1):
        if len(row) > len(names):
            raise DatasetError(f"gold table: row {k} has {len(row)} cells, want {len(names)}")
    return [dict(zip(names, row + [""] * len(names), strict=False)) for row in rows[1:]]


def _aligned(names: list[str], spec: Evaluation, judge: Judge) -> list[str]:
    if sorted(names) == sorted(spec.required):
        return names
    mapped = judge.align(names, spec.required)
    return [mapped.get(name, name) for name in names]


def _keys_mapped(rows: list[Row], gold: list[Row], spec: Evaluation, judge: Judge) -> list[Row]:
    for name in spec.unique_columns:
        if spec.pipelines.get(name, Pipeline()).judged_as_key:
            mapped = judge.align([row[name] for row in rows], [row[name] for row in gold])
            rows = [{**row, name: mapped.get(row[name], row[name])} for row in rows]
    return rows


def _by_key(rows: Sequence[Row], spec: Evaluation) -> dict[Key, Row]:
    """The first row of each normalised key."""
    kept: dict[Key, Row] = {}
    for row in rows:
        done = {name: _normalised(row[name], spec.pipelines.get(name, Pipeline())) for name in spec.required}
        kept.setdefault(tuple(canonical(done[name]) for name in spec.unique_columns), done)
    return kept


def _normalised(cell: str, pipeline: Pipeline) -> str:
    """The cell after its pipeline; every way to write a blank is ""."""
    return "" if cell.strip().casefold() in _BLANK else preprocessed(pipeline, cell, parse_date)


def _scores(gold: Mapping[Key, Row], table: Mapping[Key, Row], spec: Evaluation, judge: Judge) -> Scores:
    pairs = [(row, gold[key]) for key, row in table.items() if key in gold]
    columns = [
        [1.0] * len(pairs) if name in spec.unique_columns else _column(name, pairs, spec.pipelines[name], judge)
        for name in spec.required
    ]
    tp_rows = sum(min(row) for row in zip(*columns, strict=True))
    tp_items = sum(sum(column) for column in columns)
    return scores_from_counts(tp_rows, tp_items, len(table), len(gold), len(spec.required))


def _column(name: str, pairs: list[tuple[Row, Row]], pipeline: Pipeline, judge: Judge) -> list[float]:
    cells = [(response[name], gold[name]) for response, gold in pairs]
    scores = [_metric(metric, cells, pipeline, judge) for metric in pipeline.metric]
    return [min(of_cell) for of_cell in zip(*scores, strict=True)]


def _metric(metric: str, cells: list[tuple[str, str]], pipeline: Pipeline, judge: Judge) -> Sequence[float]:
    if metric == JUDGED:
        return judge.grade([r for r, _ in cells], [g for _, g in cells], str(pipeline.criterion))
    return [_cell(metric, r, g, pipeline) for r, g in cells]


def _cell(metric: str, response: str, gold: str, pipeline: Pipeline) -> float:
    if not response or not gold:
        return float(response == gold)
    if metric == "exact_match":
        return float(canonical(response) == canonical(gold))
    try:
        return compare(metric, response, gold, pipeline.criterion, parse_date)
    except ValueError:  # an address that cannot be read, such as "http://[x"
        return 0.0


def parse_date(text: str) -> datetime | None:
    """A date that says its year, without a time zone; the same today and tomorrow."""
    try:
        return dateparser.parse(text, settings=_NO_CLOCK)
    except DATE_ERRORS:
        return None
