"""Every metric has a row in docs/metrics.md, which is made from the table here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from recipes.metric_names import GROUPS, page, unknown
from swarm.pool import PoolStats
from swarm.rl.ppo import Metrics, PolicyMetrics


def test_the_page_is_that_of_the_table():
    assert Path("docs/metrics.md").read_text() == page()


def test_what_an_update_measures_has_a_row():
    update = [f"train/{f.name}" for f in fields(Metrics) if f.name not in ("policy", "left_out", "alarms")]
    policy = [f"train/policy_{f.name}" for f in fields(PolicyMetrics)]
    workers = [f"workers/{f.name}" for f in fields(PoolStats)]
    assert unknown([*update, *policy, *workers]) == []
    assert unknown(["train/policy_losses", "reward"]) == ["reward", "train/policy_losses"]


def test_a_name_has_one_row():
    names = [row.name for _, rows in GROUPS for row in rows]
    assert len(set(names)) == len(names)
