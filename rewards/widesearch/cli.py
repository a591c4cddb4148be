"""`swarm-rl score`: scores one response file against one gold table. Not here: scoring many, or running anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rewards.widesearch.dataset import read_json, read_judge_map, read_text
from rewards.widesearch.official import score_official
from rewards.widesearch.spec import DatasetError, MapJudge, Scores
from rewards.widesearch.strict import score_strict


def score_main(argv: Sequence[str]) -> int:
    """Prints the seven values as JSON and returns 0; for unusable files, one line on stderr and 2."""
    options = _parser().parse_args(argv)
    try:
        scores = _score(options)
    except DatasetError as error:
        print(f"swarm-rl score: {error}", file=sys.stderr)
        return 2
    if scores.zero_reason:
        print(f"swarm-rl score: all zero: {_line(scores.zero_reason)}", file=sys.stderr)
    print(json.dumps(scores.as_json(), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarm-rl score",
        description="Score a markdown table against a gold table, the WideSearch way. Prints seven values as JSON.",
    )
    parser.add_argument("gold", metavar="GOLD.csv", type=Path, help="the gold table, with a header")
    parser.add_argument(
        "evaluation",
        metavar="EVALUATION.json",
        type=Path,
        help="required, unique_columns and eval_pipeline, as in the dataset's `evaluation`",
    )
    parser.add_argument("response", metavar="RESPONSE.md", type=Path, help="an answer that contains the table")
    parser.add_argument(
        "--official",
        action="store_true",
        help="give the published scorer's numbers, defects included (the default is the strict mode)",
    )
    parser.add_argument(
        "--judge-map",
        metavar="MAP.json",
        type=Path,
        help="a JSON object: key or column name in the response → the gold one that it means",
    )
    return parser


def _score(options: argparse.Namespace) -> Scores:
    gold, response = read_text(options.gold), read_text(options.response)
    evaluation = read_json(read_text(options.evaluation), str(options.evaluation))
    judge = MapJudge(read_judge_map(options.judge_map) if options.judge_map else {})
    score = score_official if options.official else score_strict
    return score(gold, evaluation, response, judge)


def _line(text: str) -> str:
    return " ".join(text.split())
