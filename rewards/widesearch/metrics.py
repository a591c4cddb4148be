"""How single cells are normalised and compared, by the names that evaluation files use.

Not here: `llm_judge`, which grades a whole column at once, and how a date is parsed: the official
mode reads the wall clock, the strict one does not, so each passes its own parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import urlparse

from rewards.widesearch.spec import Pipeline

ParseDate = Callable[[str], datetime | None]

PREPROCESS = ("norm_str", "extract_number", "norm_date")
METRICS = ("exact_match", "number_near", "date_near", "url_match", "in_match")
JUDGED = "llm_judge"
NEAR_DAYS = 31

_NUMBER = re.compile(r"[-+]?\d*\.\d+%?|[-+]?\d+\.?\d*%?")
_URL = re.compile(r"https?://[!$-_a-z]+")
# What a date parser is known to raise on text that is not a date.
DATE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)


def preprocessed(pipeline: Pipeline, cell: str, parse_date: ParseDate) -> str:
    """The cell after the pipeline's functions, in their order. Raises ValueError for an unknown name."""
    for name in pipeline.preprocess:
        cell = preprocess(name, cell, parse_date)
    return cell


def preprocess(name: str, cell: str, parse_date: ParseDate) -> str:
    """`norm_str`: "**A Ville**" → "aville"; `extract_number`: "$1,200 m" → "1200"; `norm_date`: → ISO date."""
    match name:
        case "norm_str":
            return cell.lower().strip().replace(" ", "").replace("*", "")
        case "extract_number":
            found = _NUMBER.search(cell.replace(",", ""))
            return found[0] if found else "NULL"
        case "norm_date":
            date = parse_date(cell)
            return date.strftime("%Y-%m-%d") if date else cell
        case _:
            raise ValueError(f"preprocess function {name!r}, want one of {', '.join(PREPROCESS)}")


def compare(name: str, response: str, gold: str, criterion: Any, parse_date: ParseDate) -> float:
    """The score, 0 or 1, of one cell by one metric. Raises ValueError for an unknown name."""
    match name:
        case "exact_match":
            return float(response.lower() == gold.lower())
        case "number_near":
            return number_near(response, gold, criterion)
        case "date_near":
            return date_near(response, gold, parse_date)
        case "url_match":
            return float(_hosts(response) == _hosts(gold))
        case "in_match":
            return float(response in gold)
        case _:
            raise ValueError(f"metric {name!r}, want one of {', '.join((*METRICS, JUDGED))}")


def number_near(response: str, gold: str, criterion: Any) -> float:
    """|r − g| ≤ |g|·criterion, with `%` read as hundredths; two texts that are no numbers must be equal.

    Raises TypeError when `criterion` is not a number.
    """
    r, g = _number(response), _number(gold)
    if r is None or g is None:
        return float(r is None and g is None and response == gold)
    return float(abs(r - g) <= abs(g) * criterion)


def date_near(response: str, gold: str, parse_date: ParseDate) -> float:
    """At most 31 whole days apart (a part of a day before counts as a day); two texts that are no dates match."""
    r, g = _date(response, parse_date), _date(gold, parse_date)
    if r is None or g is None:
        return float(r is None and g is None)
    return float(abs((r - g).days) <= NEAR_DAYS)


def _number(text: str) -> float | None:
    try:
        return float(text.replace("%", "")) / 100.0 if "%" in text else float(text)
    except ValueError:
        return None


def _date(text: str, parse_date: ParseDate) -> datetime | None:
    try:
        return parse_date(text)
    except DATE_ERRORS:
        return None


def _hosts(text: str) -> set[str]:
    return {urlparse(url).netloc for url in _URL.findall(text)}
