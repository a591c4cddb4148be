"""What both scorers share: the evaluation file's shape, the judge, and the seven values.

Not here: reading a table or comparing cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

F1_EPSILON = 1e-9
VALUES = (
    "score",
    "precision_by_row",
    "recall_by_row",
    "f1_by_row",
    "precision_by_item",
    "recall_by_item",
    "f1_by_item",
)


class DatasetError(ValueError):
    """A gold table, evaluation or judge map that cannot be used: what was seen and what is wanted, in one line."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The seven values of one response; `zero_reason` says why a table was worth nothing as a whole.

    `Scores(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)` is a perfect table. The official values may exceed 1.
    """

    score: float = 0.0
    precision_by_row: float = 0.0
    recall_by_row: float = 0.0
    f1_by_row: float = 0.0
    precision_by_item: float = 0.0
    recall_by_item: float = 0.0
    f1_by_item: float = 0.0
    zero_reason: str = ""

    def as_json(self) -> dict[str, float]:
        """The seven values by name, ready for `json.dumps`."""
        return {name: value for name, value in asdict(self).items() if name in VALUES}


def scores_from_counts(
    tp_rows: float, tp_items: float, response_rows: int, gold_rows: int, columns: int, equal: bool = False
) -> Scores:
    """Precision, recall and F1 by row and by cell; `equal` grants the success score whatever they are.

    `tp_rows` and `tp_items` are sums of row and cell scores; rows are counted after deduplication.
    F1 = 2PR/(P+R), 0 where P+R ≤ 1e-9 (WideSearch, arXiv 2508.07999, section 4).
    """
    row = _precision_recall_f1(tp_rows, response_rows, gold_rows)
    item = _precision_recall_f1(tp_items, response_rows * columns, gold_rows * columns)
    perfect = all(value == 1.0 for value in (*row, *item))
    return Scores(1.0 if perfect or equal else 0.0, *row, *item)


def _precision_recall_f1(tp: float, response: int, gold: int) -> tuple[float, float, float]:
    precision = tp / response if response else 0.0
    recall = tp / gold if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall > F1_EPSILON else 0.0
    return precision, recall, f1


class Judge(Protocol):
    """What the benchmark asks a language model: which names mean the same, and which cells are right."""

    def align(self, response: Sequence[str], gold: Sequence[str]) -> Mapping[str, str]:
        """Response names → gold names, for keys and for columns; a name left out stays as it is."""
        ...

    def grade(self, response: Sequence[str], gold: Sequence[str], criterion: str) -> Sequence[float]:
        """A score from 0 to 1 for each pair of cells of one column."""
        ...


@dataclass(frozen=True, slots=True)
class MapJudge:
    """Plain equality, plus a fixed map: `MapJudge({"Republic of Alpha": "Alpha"})`."""

    judge_map: Mapping[str, str] = field(default_factory=dict)

    def align(self, response: Sequence[str], gold: Sequence[str]) -> Mapping[str, str]:
        return {name: self.judge_map[name] for name in response if name in self.judge_map}

    def grade(self, response: Sequence[str], gold: Sequence[str], criterion: str) -> Sequence[float]:
        return [float(r == g) for r, g in zip(response, gold, strict=True)]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How one column is scored: `Pipeline(("extract_number",), ("number_near",), 0.05)`."""

    preprocess: tuple[str, ...] = ()
    metric: tuple[str, ...] = ()
    criterion: Any = None

    @property
    def judged_as_key(self) -> bool:
        return "exact_match" in self.metric or "llm_judge" in self.metric


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One instance's `evaluation`: the wanted columns, those that identify a row, and how each is scored."""

    required: tuple[str, ...]
    unique_columns: tuple[str, ...]
    pipelines: Mapping[str, Pipeline]


def read_evaluation(value: object) -> Evaluation:
    """The parsed JSON of an `evaluation`, checked for shape. Raises DatasetError."""
    record = _mapping(value, "evaluation")
    pipelines = _mapping(record.get("eval_pipeline"), "evaluation: eval_pipeline")
    return Evaluation(
        _names(record.get("required"), "evaluation: required"),
        _names(record.get("unique_columns"), "evaluation: unique_columns"),
        {column: _pipeline(column, entry) for column, entry in pipelines.items()},
    )


def _pipeline(column: str, value: object) -> Pipeline:
    what = f"evaluation: eval_pipeline[{column!r}]"
    entry = _mapping(value, what)
    preprocess = _names(entry.get("preprocess", []), f"{what}: preprocess")
    return Pipeline(preprocess, _names(entry.get("metric", []), f"{what}: metric"), entry.get("criterion"))


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DatasetError(f"{what} is {_shown(value)}, want an object")
    return cast(Mapping[str, Any], value)


def _names(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in cast(Sequence[object], value)):
        raise DatasetError(f"{what} is {_shown(value)}, want a list of strings")
    return tuple(cast(Sequence[str], value))


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60}"


def column_name(name: str) -> str:
    """A column's name as it is compared: lower case, without spaces."""
    return name.strip().lower().replace(" ", "")
