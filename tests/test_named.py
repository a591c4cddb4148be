"""What people may write where a checkpoint is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.config import SHIPPED
from recipes.named import resolve
from swarm.checkpoint import save
from swarm.folders import CheckpointError
from swarm.store import Store
from swarm.store_card import Origin
from tests.test_checkpoint import tiny


def test_one_that_ships_goes_by_its_name(tmp_path: Path) -> None:
    assert resolve("sloppy-1m", tmp_path) == SHIPPED.with_name("sloppy-1m")
    assert resolve(str(SHIPPED), tmp_path) == SHIPPED


def test_a_run_that_comes_from_elsewhere_finds_what_ships_here(tmp_path: Path) -> None:
    assert resolve("/elsewhere/subagents/checkpoints/reader-1m", tmp_path) == SHIPPED
    with pytest.raises(CheckpointError, match="/elsewhere/models/reader-1m: no such folder"):
        resolve("/elsewhere/models/reader-1m", tmp_path)


def test_a_folder_and_a_name_in_the_store_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    stored = store.publish(["reader-1m"], lambda into: save(tiny(), None, into, 0), Origin("x"))
    assert resolve("reader-1m", store.root) == stored.path
    (tmp_path / "reader-1m").mkdir()
    assert resolve("reader-1m", store.root) == Path("reader-1m")


@pytest.mark.parametrize("text", ["", "..", "reader-1", "."])
def test_what_is_none_of_them_is_refused_or_a_folder(text: str, tmp_path: Path) -> None:
    if Path(text).is_dir():
        assert resolve(text, tmp_path) == Path(text)
        return
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(text, tmp_path)
