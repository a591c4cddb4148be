"""The official mode gives the published scorer's numbers, defects included."""

import json
from pathlib import Path
from typing import Any

import pytest

from rewards.widesearch.official import score_official
from rewards.widesearch.spec import MapJudge

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "widesearch_cases.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_official_mode_gives_the_published_values(case: dict[str, Any]) -> None:
    scores = score_official(case["gold_csv"], case["evaluation"], case["response"], MapJudge(case["judge_map"]))
    assert scores.as_json() == pytest.approx(case["expected"], abs=1e-6)
    assert bool(scores.zero_reason) == bool(case["zero_reason"])
