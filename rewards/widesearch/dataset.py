"""Reads the original dataset's files, for a user who has them: `widesearch.jsonl` and `widesearch_gold/<id>.csv`.

Not here: the data itself, which its licence does not let anybody ship, or any download of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rewards.widesearch.spec import DatasetError, read_evaluation

TASKS_FILE = "widesearch.jsonl"
GOLD_FOLDER = "widesearch_gold"


@dataclass(frozen=True, slots=True)
class Instance:
    """One task of the benchmark; `gold_csv` and `evaluation` are what the scorers take."""

    id: str
    query: str
    evaluation: Mapping[str, Any]
    language: str
    gold_csv: str


def load_dataset(folder: Path) -> tuple[Instance, ...]:
    """All instances in the file's order. Raises DatasetError: one line with what was seen and what is wanted."""
    path = folder / TASKS_FILE
    lines = read_text(path).split("\n")
    found = [_instance(folder, f"{path}:{k}", line) for k, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DatasetError(f"{path}: no instances, want one JSON object a line")
    return tuple(found)


def read_text(path: Path) -> str:
    """A UTF-8 file without its byte order mark. Raises DatasetError."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: byte {error.start} is not UTF-8, want a UTF-8 text file") from error
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}, want a readable file") from error


def read_json(text: str, where: str) -> Mapping[str, Any]:
    """A JSON object. Raises DatasetError that begins with `where`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: {error}, want a JSON object") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: {value!r:.60}, want a JSON object")
    return cast(Mapping[str, Any], value)


def read_judge_map(path: Path) -> Mapping[str, str]:
    """A JSON object, response key or column → gold key or column. Raises DatasetError."""
    found = read_json(read_text(path), str(path))
    for name, value in found.items():
        if not isinstance(value, str):
            raise DatasetError(f"{path}: {name!r} is mapped to {value!r:.60}, want a string")
    return found


def _instance(folder: Path, where: str, line: str) -> Instance:
    record = read_json(line, where)
    fields = {name: _string(record, name, where) for name in ("instance_id", "query", "language")}
    evaluation = record.get("evaluation")
    if isinstance(evaluation, str):
        evaluation = read_json(evaluation, f"{where}: evaluation")
    try:
        read_evaluation(evaluation)
    except DatasetError as error:
        raise DatasetError(f"{where}: {error}") from error
    gold = read_text(folder / GOLD_FOLDER / f"{fields['instance_id']}.csv")
    checked = cast(Mapping[str, Any], evaluation)
    return Instance(fields["instance_id"], fields["query"], checked, fields["language"], gold)


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise DatasetError(f"{where}: {name} is {value!r:.60}, want a string")
    return value
