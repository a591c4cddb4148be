"""The small gold tables and responses that the WideSearch tests are about. Not a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADER = ("Country", "Capital", "Population", "Founded", "Site")
ROWS = (
    ("Alpha", "Aville", "1000", "1900-01-15", "https://alpha.org/"),
    ("Beta", "Bville", "2000", "1910-02-01", "https://beta.org/"),
    ("Gamma", "Cville", "3000", "1920-03-01", "https://gamma.org/"),
    ("Delta", "Dville", "4000", "1930-04-01", "https://delta.org/"),
)


def csv_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in (header, *rows))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], fence: str = "```markdown") -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([fence, *lines, "```" if fence else ""])


def column(metric: str | list[str], preprocess: str | None = "norm_str", criterion: Any = None) -> dict[str, Any]:
    metrics = [metric] if isinstance(metric, str) else metric
    return {"preprocess": [preprocess] if preprocess else [], "metric": metrics, "criterion": criterion}


def evaluation(pipeline: dict[str, Any], keys: int = 1) -> dict[str, Any]:
    names = list(pipeline)
    return {"required": names, "unique_columns": names[:keys], "eval_pipeline": pipeline}


def exact(*names: str, keys: int = 1) -> dict[str, Any]:
    return evaluation({name: column("exact_match") for name in names}, keys)


COUNTRIES = csv_text(HEADER, ROWS)
COUNTRIES_EVALUATION = evaluation(
    {
        "country": column("exact_match"),
        "capital": column("exact_match"),
        "population": column("number_near", "extract_number", 0.05),
        "founded": column("date_near", "norm_date"),
        "site": column("url_match"),
    }
)


def with_cell(row: int, name: str, value: str) -> list[tuple[str, ...]]:
    """The countries with one cell replaced."""
    changed = [list(cells) for cells in ROWS]
    changed[row][HEADER.index(name)] = value
    return [tuple(cells) for cells in changed]
