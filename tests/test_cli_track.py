"""The tracker: never in the way of a run, and no more than the run folder has."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from threading import Event

import pytest
import trio
import wandb
from rich.console import Console

from recipes import track
from recipes.track import Tracker, mode_of, run_id, tracking
from swarm.types import CheckpointRef, Ledger, Reward, Rollout, Stage, Trace
from tests.swarm_cases import TASK


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Dashboard:
    """A run of wandb that keeps what it is told; `stuck` waits in every call, `dies` raises in the second."""

    offline = True

    def __init__(self, stuck: Event | None = None, dies: bool = False) -> None:
        self.told: list[object] = []
        self.stuck, self.dies = stuck, dies

    def log(self, numbers: object, step: int | None = None) -> None:
        if self.stuck is not None:
            self.stuck.wait()
        if self.dies and self.told:
            raise OSError("the service is gone")
        self.told.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.told.append(("finished", exit_code))


def test_a_key_turns_offline_into_online() -> None:
    assert mode_of("offline", {"WANDB_API_KEY": "x"}) == "online"
    assert mode_of("offline", {}) == "offline"


def test_disabled_stays_disabled() -> None:
    assert mode_of("disabled", {"WANDB_API_KEY": "x", "WANDB_MODE": "online"}) == "disabled"


def test_the_environment_has_the_last_word() -> None:
    assert mode_of("offline", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}) == "offline"


def test_a_run_folder_keeps_its_id(tmp_path: Path) -> None:
    assert run_id(tmp_path) == run_id(tmp_path)


async def test_a_disabled_tracker_leaves_nothing(tmp_path: Path, console: Console) -> None:
    async with tracking(tmp_path, "disabled", {}, console) as tracker:
        tracker.log({"a": 1.0}, 0)
    assert list(tmp_path.iterdir()) == []


async def driven(tracker: Tracker, dashboard: Dashboard, *steps: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tracker.drive, lambda: dashboard)
        for step in steps:
            tracker.log({"a": step, "phase": "ppo"}, step)
        await tracker.close(0)


async def test_all_that_was_told_is_passed_on_in_order(tmp_path: Path, console: Console) -> None:
    dashboard = Dashboard()
    await driven(Tracker(tmp_path, "offline", console), dashboard, 0, 1, 2)
    assert dashboard.told == [(0, {"a": 0}), (1, {"a": 1}), (2, {"a": 2}), ("finished", 0)]
    assert said(console) == ""


async def test_a_tracker_that_dies_is_one_line(tmp_path: Path, console: Console) -> None:
    dashboard = Dashboard(dies=True)
    await driven(Tracker(tmp_path, "offline", console), dashboard, 0, 1, 2)
    assert dashboard.told == [(0, {"a": 0})]
    assert said(console) == "wandb is left out of this run: the service is gone\n"


async def test_a_stuck_tracker_holds_nobody_up(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "_CALL_SECONDS", 0.05)
    stuck = Event()
    tracker = Tracker(tmp_path, "offline", console)
    began = time.perf_counter()
    for step in range(100):
        tracker.log({"a": step}, step)
    assert time.perf_counter() - began < 1.0
    try:
        await driven(tracker, Dashboard(stuck))
    finally:
        stuck.set()
    assert "wandb was slow: 36 entries are only in the run folder\n" in said(console)
    assert said(console).endswith("wandb is left out of this run: no answer within 0.05 s\n")


async def test_what_a_run_raises_comes_out_as_it_is(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    dashboard = Dashboard()
    monkeypatch.setattr(track, "_begin", lambda *_: dashboard)
    with pytest.raises(KeyError, match="mine"):
        async with tracking(tmp_path, "offline", {}, console):
            raise KeyError("mine")
    assert dashboard.told == [("finished", 1)]


@pytest.mark.slow
async def test_an_offline_run_is_kept_in_the_run_folder(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    ledger = Ledger((Stage(1, (3, 2)),), tokens_sampled=7)
    rollout = Rollout(TASK, Trace("main", (), "answered"), ledger, reward=Reward({"performance": 0.5}, {}))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    made_from = {"start": CheckpointRef(tmp_path / "policy", "c" * 64)}
    async with tracking(tmp_path, "offline", {"seed": 3}, console) as tracker:
        tracker.log({"rollout/item_f1": 0.5, "phase": "ppo"}, 0)
        tracker.rollouts(tmp_path / "iteration_0001.rollouts", [rollout], 0)
        tracker.model("policy", tmp_path / "policy", "d" * 64, made_from)
    wandb.teardown()  # its service writes behind our backs; as at the end of a program, it is done when this returns
    assert said(console) == ""
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    kept = record.read_bytes()
    for words in (b"rollout/item_f1", b"rollouts", os.fsencode(tmp_path / "policy"), b"c" * 64, b"d" * 64):
        assert words in kept
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/*.table.json")
    assert "/#/rollout/iteration_0001:0" in table.read_text()
