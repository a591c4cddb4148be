"""Aggregation over trials, the dataset's files and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewards.widesearch.aggregate import MissingTrialError, aggregate
from rewards.widesearch.cli import score_main
from rewards.widesearch.dataset import Instance, load_dataset
from rewards.widesearch.spec import VALUES, DatasetError, Scores
from tests.widesearch_tables import exact, markdown

SPEC = exact("k", "v")
GOLD = "K,V\na,1\nb,2\n"


def f1(value: float, score: float = 0.0) -> Scores:
    return Scores(score=score, f1_by_item=value)


def test_trials_are_averaged_within_and_then_over_instances() -> None:
    found = aggregate({"one": [f1(1.0, 1.0), f1(0.5)], "two": [f1(0.2), f1(0.0)]}, 2)
    assert (found.avg["f1_by_item"], found.max["f1_by_item"], found.min["f1_by_item"]) == pytest.approx(
        (0.425, 0.6, 0.25)
    )
    assert (found.pass_at_n, found.avg["score"], found.min["score"]) == (0.5, 0.25, 0.0)


def test_only_the_first_n_trials_count() -> None:
    assert aggregate({"one": [f1(0.5), f1(1.0)]}, 1).max["f1_by_item"] == 0.5


@pytest.mark.parametrize("trials", [[f1(1.0)], [f1(1.0), None]])
def test_a_missing_trial_is_refused(trials: list[Scores | None]) -> None:
    with pytest.raises(MissingTrialError, match="instance ws_en_003: 1 trials, want 2"):
        aggregate({"ws_en_003": trials}, 2)


def test_nothing_to_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="0 instances and n = 4, want at least 1 of each"):
        aggregate({}, 4)


def write_dataset(folder: Path, record: dict[str, Any], gold: bytes = b"\xef\xbb\xbfK,V\na,1\n") -> Path:
    (folder / "widesearch_gold").mkdir()
    (folder / "widesearch_gold" / "ws_en_001.csv").write_bytes(gold)
    (folder / "widesearch.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    return folder


RECORD = {"instance_id": "ws_en_001", "query": "Which?", "evaluation": json.dumps(SPEC), "language": "en"}


def test_the_datasets_files_are_read_without_the_byte_order_mark(tmp_path: Path) -> None:
    found = load_dataset(write_dataset(tmp_path, RECORD))
    assert found == (Instance("ws_en_001", "Which?", SPEC, "en", "K,V\na,1\n"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": None}, "jsonl:1: query is None, want a string"),
        ({"evaluation": "{"}, "jsonl:1: evaluation: .* want a JSON object"),
        ({"evaluation": "{}"}, "jsonl:1: evaluation: eval_pipeline is missing, want an object"),
        ({"instance_id": "ws_en_002"}, "ws_en_002.csv: No such file or directory, want a readable file"),
    ],
)
def test_a_broken_dataset_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message) as raised:
        load_dataset(write_dataset(tmp_path, RECORD | change))
    assert "\n" not in str(raised.value)


def test_a_folder_without_the_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="widesearch.jsonl: No such file or directory"):
        load_dataset(tmp_path)


def write_inputs(folder: Path, response: str) -> list[str]:
    texts = {"gold.csv": GOLD, "evaluation.json": json.dumps(SPEC), "response.md": response}
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [str(folder / name) for name in texts]


VARIANTS = markdown(("K", "V"), [("a", "1"), ("A", "1"), ("b", "2"), ("B", "2")])


def test_the_command_prints_the_seven_strict_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score_main(write_inputs(tmp_path, VARIANTS)) == 0
    assert json.loads(capsys.readouterr().out) == dict.fromkeys(VALUES, 1.0)


def test_the_command_prints_the_official_values_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score_main(["--official", *write_inputs(tmp_path, VARIANTS)]) == 0
    assert json.loads(capsys.readouterr().out)["f1_by_item"] == pytest.approx(4 / 3)


def test_the_command_takes_a_judge_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = write_inputs(tmp_path, markdown(("K", "V"), [("first", "1"), ("b", "2")]))
    (tmp_path / "map.json").write_text('{"first": "a"}', "utf-8")
    assert score_main(["--judge-map", str(tmp_path / "map.json"), *inputs]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 1.0


def test_the_command_says_why_a_table_is_worth_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score_main(write_inputs(tmp_path, "no table")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == dict.fromkeys(VALUES, 0.0)
    assert captured.err == "swarm-rl score: all zero: no table in the response\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gold.csv", b""),
        ("gold.csv", b"\xff\xfe"),
        ("gold.csv", b"K\na\n"),
        ("evaluation.json", b"[]"),
        ("evaluation.json", b"{"),
        ("evaluation.json", b'{"required": "k"}'),
        ("response.md", b"\xff"),
        ("response.md", None),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--official"]])
def test_a_file_that_cannot_be_used_gives_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, mode: list[str]
) -> None:
    inputs = write_inputs(tmp_path, VARIANTS)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert score_main([*mode, *inputs]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("swarm-rl score: ")
    assert captured.err.count("\n") == 1
