"""Official mode: the numbers that the published WideSearch scorer gives, its defects included.

    response ─ table text ─ read_csv ─ columns mapped ─ dedupe on raw keys ─ keys mapped ─ preprocess ─ join ─ metrics

What is kept on purpose, because published numbers contain it: duplicates that only differ before
normalisation each score (F1 up to 2), one blank floats an integer column, dates read the wall clock,
and a stray pipe or quote zeroes the table. `strict` has none of these. Not here: a language-model judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

import dateparser
import pandas as pd

from rewards.widesearch.metrics import JUDGED, compare, preprocessed
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

_FENCED = re.compile(r"```markdown(.*?)```", re.DOTALL)
_RUN = re.compile(r"(?:\|[^\n]*\n?)+")
_MIN_PIPES = 4
_RULE = set("|- :")
# The published scorer gives a table 0 when anything at all goes wrong with it; these are the ways it can.
_ZEROING = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)

Columns = dict[str, list[str]]


def score_official(gold_csv: str, evaluation: Mapping[str, Any], response: str, judge: Judge | None = None) -> Scores:
    """Scores a response as WideSearch 0e664c3 does (with pandas 2.3 and dateparser 1.2).

    `gold_csv` is the text of a gold file, `evaluation` the parsed JSON of the instance's evaluation.
    Raises DatasetError when one of these two cannot be used; whatever is wrong with the response scores 0.
    """
    spec = read_evaluation(evaluation)
    gold = _gold(gold_csv, spec)
    try:
        return _score(gold, spec, response, judge or MapJudge())
    except _ZEROING as error:
        return Scores(zero_reason=f"{type(error).__name__}: {error}")


def table_text(response: str) -> str | None:
    """The first ```` ```markdown ```` block, or else, from 4 pipes on, the first run of lines that begin with one."""
    if fenced := _FENCED.search(response):
        return fenced[1].strip()
    run = _RUN.search(response) if response.count("|") >= _MIN_PIPES else None
    return run[0].strip() if run else None


def table_lines(text: str) -> list[str]:
    """The table's lines, rules and lines without a pipe left out."""
    return [line for line in (raw.strip() for raw in text.split("\n")) if "|" in line and not set(line) <= _RULE]


def _gold(gold_csv: str, spec: Evaluation) -> Columns:
    try:
        frame = pd.read_csv(StringIO(gold_csv.removeprefix("\ufeff")))
    except ValueError as error:
        raise DatasetError(f"gold table: {str(error).strip()}, want a CSV table with a header") from error
    names = [column_name(str(name)) for name in frame.columns]
    if missing := [name for name in spec.required if name not in names]:
        raise DatasetError(f"gold table has columns {names}, want also {missing}")
    return {name: _cells(frame, names.index(name)) for name in spec.required}


def _cells(frame: pd.DataFrame, column: int) -> list[str]:
    """The text of inferred values: 1 → "1", 1.0 → "1.0", a blank → "nan"."""
    return [str(value) for value in frame.iloc[:, column].tolist()]


def _response(text: str) -> tuple[list[str], list[list[str]]]:
    """Names and columns; a list because names may repeat until they are checked."""
    head, newline, tail = text.partition("\n")
    lines = table_lines(head.replace(" ", "").lower() + newline + tail)
    trimmed = "\n".join("|".join(cell.strip() for cell in line.split("|")) for line in lines)
    frame = pd.read_csv(StringIO(trimmed), sep="|")
    kept = [k for k, name in enumerate(frame.columns) if not str(name).startswith("Unnamed")]
    return [column_name(str(frame.columns[k])) for k in kept], [_cells(frame, k) for k in kept]


def _score(gold: Columns, spec: Evaluation, response: str, judge: Judge) -> Scores:
    text = table_text(response)
    if text is None:
        return Scores(zero_reason="no table in the response")
    names, columns = _response(text)
    if set(names) != set(spec.required):
        mapped = judge.align(names, spec.required)
        names = [mapped.get(name, name) for name in names]
    if set(names) != set(spec.required) or len(set(names)) != len(names):
        return Scores(zero_reason=f"columns {names}, want {list(spec.required)}")
    gold = _deduplicated(gold, spec)
    table = _deduplicated(dict(zip(names, columns, strict=True)), spec)
    # Asked of all keys before any is replaced or normalised.
    table |= {c: _mapped(table[c], gold[c], judge) for c in spec.unique_columns if _judged(spec, c)}
    gold, table = _normalised(gold, spec), _normalised(table, spec)
    return _joined_scores(gold, table, spec, judge)


def _judged(spec: Evaluation, column: str) -> bool:
    return spec.pipelines.get(column, Pipeline()).judged_as_key


def _deduplicated(table: Columns, spec: Evaluation) -> Columns:
    """The first row of each key, keys compared as raw text."""
    first: dict[tuple[str, ...], int] = {}
    for index, key in enumerate(_keys(table, spec)):
        first.setdefault(key, index)
    return {name: [cells[index] for index in first.values()] for name, cells in table.items()}


def _keys(table: Columns, spec: Evaluation) -> list[tuple[str, ...]]:
    return list(zip(*(table[name] for name in spec.unique_columns), strict=True))


def _mapped(cells: Sequence[str], gold: Sequence[str], judge: Judge) -> list[str]:
    mapped = judge.align(cells, gold)
    return [mapped.get(cell, cell) for cell in cells]


def _normalised(table: Columns, spec: Evaluation) -> Columns:
    done = {
        name: [preprocessed(pipeline, cell, parse_date) for cell in table[name]]
        for name, pipeline in spec.pipelines.items()
        if pipeline.preprocess
    }
    return table | done


def _joined_scores(gold: Columns, table: Columns, spec: Evaluation, judge: Judge) -> Scores:
    """The inner join on keys (every pair of equal keys), a score column a metric, a row worth its least cell."""
    gold_keys, table_keys = _keys(gold, spec), _keys(table, spec)
    where: dict[tuple[str, ...], list[int]] = {}
    for index, key in enumerate(table_keys):
        where.setdefault(key, []).append(index)
    pairs = [(g, t) for g, key in enumerate(gold_keys) for t in where.get(key, [])]
    scores: list[Sequence[float]] = [[1.0] * len(pairs) for name in spec.required if name in spec.unique_columns]
    for name in (name for name in spec.required if name not in spec.unique_columns):
        cells = [(table[name][t], gold[name][g]) for g, t in pairs]
        pipeline = spec.pipelines[name]
        # A metric listed twice fills one score column.
        scores += [_metric_scores(metric, cells, pipeline, judge) for metric in dict.fromkeys(pipeline.metric)]
    tp_rows = sum(min(row) for row in zip(*scores, strict=True))
    tp_items = sum(sum(column) for column in scores)
    equal = _equal_frames(gold, table, spec)
    return scores_from_counts(tp_rows, tp_items, len(table_keys), len(gold_keys), len(spec.required), equal)


def _metric_scores(metric: str, cells: list[tuple[str, str]], pipeline: Pipeline, judge: Judge) -> Sequence[float]:
    if metric == JUDGED:
        return judge.grade([r for r, _ in cells], [g for _, g in cells], str(pipeline.criterion))
    if not cells:
        raise ValueError("no key of the response is among the gold keys")
    return [compare(metric, r, g, pipeline.criterion, parse_date) for r, g in cells]


def _equal_frames(gold: Columns, table: Columns, spec: Evaluation) -> bool:
    """The published shortcut to success: equal rows in any order, equal column order, and no key was mapped."""
    if any(_judged(spec, name) for name in spec.unique_columns) or list(gold) != list(table):
        return False
    return sorted(zip(*gold.values(), strict=True)) == sorted(zip(*table.values(), strict=True))


def parse_date(text: str) -> datetime | None:
    """Any date that dateparser can make out, completed from today's date where parts are missing."""
    return dateparser.parse(text, settings={"PREFER_DAY_OF_MONTH": "first"})
