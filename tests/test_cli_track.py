"""The tracker: never in the way of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from recipes.track import Tracker, mode_of, run_id


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_key_turns_offline_into_online() -> None:
    assert mode_of("offline", {"WANDB_API_KEY": "x"}) == "online"
    assert mode_of("offline", {}) == "offline"


def test_disabled_stays_disabled() -> None:
    assert mode_of("disabled", {"WANDB_API_KEY": "x", "WANDB_MODE": "online"}) == "disabled"


def test_the_environment_has_the_last_word() -> None:
    assert mode_of("offline", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}) == "offline"


def test_a_run_folder_keeps_its_id(tmp_path: Path) -> None:
    assert run_id(tmp_path) == run_id(tmp_path)


def test_a_disabled_tracker_leaves_nothing(tmp_path: Path, console: Console) -> None:
    with Tracker(tmp_path, "disabled", {}, console) as tracker:
        tracker.log({"a": 1.0}, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_and_the_run_goes_on(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Tracker(tmp_path / "missing", "offline", {}, console) as tracker:
        tracker.log({"a": 1.0}, 0)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("wandb is left out of this run:")
    assert text.count("\n") == 1


@pytest.mark.slow
def test_an_offline_run_is_kept_in_the_run_folder(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(tmp_path, "offline", {"seed": 3}, console) as tracker:
        tracker.log({"rollout/item_f1": 0.5, "phase": "ppo"}, 0)
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id(tmp_path)}/*.wandb"))) == 1
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
