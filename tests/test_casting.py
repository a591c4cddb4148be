"""The roster of a run on file: the recipe's swaps, swaps by hand, and what a run that was killed goes on with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.arguments import UsageError
from recipes.cast.book import FILE, NEXT, CastBook, Played, as_played, ask, asked_of, entries_of, last_cast, shown
from recipes.cast.command import changes_of
from recipes.cast.roles import RoleSettings
from recipes.cli import main
from recipes.config import SHIPPED, Recipe
from recipes.overrides import OverrideError, apply, from_json, to_json
from subagents.roster import RosterError
from swarm.checkpoint import ref_of
from swarm.folders import CheckpointError
from swarm.store import STORE, Store

READER, SLOPPY = str(SHIPPED), str(SHIPPED.with_name("sloppy-1m"))


def book(run: Path, recipe: Recipe) -> CastBook:
    return CastBook(run, recipe.cast)


def names(cast) -> dict[str, list[str]]:
    return {role: [ref.path.name for ref, _ in mixture] for role, mixture in cast.items()}


def scheduled() -> Recipe:
    return replace(Recipe(), swaps={"3": {"": {SLOPPY: 1.0}}, "5": {"checker": {READER: 1.0, SLOPPY: 3.0}}})


def test_the_recipe_swaps_at_its_iterations(tmp_path):
    casts = book(tmp_path, scheduled())
    seen = [names(casts.at(k)) for k in range(1, 6)]
    assert seen[:2] == [{"": ["reader-1m"]}] * 2
    assert seen[2:4] == [{"": ["sloppy-1m"]}] * 2
    assert seen[4] == {"": ["sloppy-1m"], "checker": ["reader-1m", "sloppy-1m"]}
    assert [e.iteration for e in entries_of(tmp_path)] == [1, 3, 5]
    assert shown(last_cast(tmp_path)["checker"]).startswith("25% reader-1m (")


def test_a_swap_by_hand_is_made_with_the_next_iteration_and_once(tmp_path):
    casts = book(tmp_path, Recipe())
    casts.at(1)
    ask(tmp_path, {"": {SLOPPY: 1.0}})
    ask(tmp_path, {"checker": {READER: 1.0}})
    assert names(casts.at(2)) == {"": ["sloppy-1m"], "checker": ["reader-1m"]}
    assert not (tmp_path / NEXT).exists()
    assert names(casts.at(3)) == {"": ["sloppy-1m"], "checker": ["reader-1m"]}
    assert [(e.iteration, e.by) for e in entries_of(tmp_path)] == [(1, "recipe"), (2, "hand")]


def test_a_run_that_was_killed_goes_on_with_the_same_roster_by_hash(tmp_path):
    ask(tmp_path, {"": {SLOPPY: 1.0}})
    before = book(tmp_path, scheduled()).at(1)
    # Begun again from its checkpoint: the iteration that was under way has the cast that it had.
    ask(tmp_path, {"": {READER: 1.0}})
    assert book(tmp_path, scheduled()).at(1) == before == {"": ((ref_of(Path(SLOPPY)), 1.0),)}
    assert names(book(tmp_path, scheduled()).at(2)) == {"": ["reader-1m"]}


def test_a_line_that_a_kill_has_cut_is_written_anew(tmp_path):
    casts = book(tmp_path, scheduled())
    casts.at(1)
    whole = (tmp_path / FILE).read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        (tmp_path / FILE).write_bytes(whole[:cut])
        assert book(tmp_path, scheduled()).at(1) == casts.at(1)
        assert (tmp_path / FILE).read_bytes() == whole


def test_a_checkpoint_that_has_become_another_is_refused(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(READER, folder)
    recipe = replace(Recipe(), subagent=folder)
    book(tmp_path, recipe).at(1)
    shutil.rmtree(folder)
    shutil.copytree(SLOPPY, folder)
    with pytest.raises(CheckpointError, match=r"mine: sha256 [0-9a-f]{12}, want [0-9a-f]{12} as played"):
        book(tmp_path, recipe).at(1)


def test_a_folder_that_is_no_checkpoint_is_refused_when_it_is_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="none: no such folder"):
        ask(tmp_path, {"": {str(tmp_path / "none"): 1.0}})
    assert asked_of(tmp_path) == {}
    (tmp_path / NEXT).write_text("[]")
    with pytest.raises(RosterError, match=r"roster\.next\.json: Expected `object`"):
        book(tmp_path, Recipe()).at(1)


def test_one_that_ships_is_asked_for_by_name_and_found_by_a_run_from_elsewhere(tmp_path):
    ask(tmp_path, {"": {"sloppy-1m": 1.0}})
    [played] = asked_of(tmp_path)[""]
    assert (played.path, played.name) == (SLOPPY, "sloppy-1m")
    moved = Played("/elsewhere/subagents/checkpoints/sloppy-1m", played.sha256)
    assert as_played(moved).path == Path(SLOPPY)


def test_runs_without_subagents_have_no_roster(tmp_path):
    assert CastBook(tmp_path, lambda iteration: {}).at(1) == {}
    assert not (tmp_path / FILE).exists()


def test_roles_are_folders_or_settings_on_the_command_line():
    given = json.dumps({"a": READER, "b": {"checkpoints": {READER: 1, SLOPPY: 2}, "steps": 4, "system": "Check."}})
    recipe = apply(Recipe(), ["--roles", given])
    assert recipe.cast() == {"": {READER: 1.0}, "a": {READER: 1.0}, "b": {READER: 1.0, SLOPPY: 2.0}}
    assert recipe.role("b") == RoleSettings({READER: 1.0, SLOPPY: 2.0}, steps=4, system="Check.")
    assert [f.name for f in recipe.players()] == ["reader-1m", "sloppy-1m"]
    assert from_json(Recipe, to_json(recipe)) == recipe


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--roles", '{"b": {"step": 4}}'], "--roles"),
        (["--roles", '{"b": {"checkpoints": {"x": -1}}}'], "--roles"),
        (["--swaps", '{"0": {"": {"x": 1}}}'], r"swaps\['0'\] = '0', want 1 to 30"),
        (["--swaps", '{"31": {"": {"x": 1}}}'], "want 1 to 30"),
        (["--swaps", '{"2": {"": {}}}'], "want one checkpoint or more"),
    ],
)
def test_a_roster_that_cannot_be_is_refused_before_anything_is_loaded(arguments, words):
    with pytest.raises(OverrideError, match=words):
        apply(Recipe(), arguments)


def test_checkpoints_are_named_with_weights():
    assert changes_of("A,B:2.5", ["x=C", "y=/a:b"]) == {"": {"A": 1.0, "B": 2.5}, "x": {"C": 1.0}, "y": {"/a:b": 1.0}}
    with pytest.raises(UsageError, match="--roles 'x', want NAME=CHECKPOINT"):
        changes_of(None, ["x"])
    with pytest.raises(UsageError, match="want A or A,B:2"):
        changes_of(",", [])


def test_a_checkpoint_of_the_store_stays_as_long_as_the_run_needs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store(STORE)
    store.add(Path(READER), ["mine/last"])
    recipe = replace(Recipe(), subagent=Path("mine/last"))
    run = tmp_path / "run"
    run.mkdir()
    first = book(run, recipe).at(1)
    store.add(Path(SLOPPY), ["mine/last"])  # the name moves on
    assert book(run, recipe).at(1) == first
    (entry,) = entries_of(run)
    assert [(p.name, p.sha256) for p in entry.cast[""]] == [("mine/last", ref_of(Path(READER)).sha256)]


def test_what_the_run_could_not_serve_is_refused_when_it_is_asked_for(tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(json.dumps(to_json(Recipe())))
    shutil.copytree(READER, tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert main(["roster", str(tmp_path), "--subagents", str(tmp_path / "llama")]) == 2
    assert "llama: architectures = ['LlamaForCausalLM'], want" in capsys.readouterr().err
    assert asked_of(tmp_path) == {}
    assert main(["roster", str(tmp_path), "--roles", f"checker={SLOPPY}"]) == 0
    assert "the next" in capsys.readouterr().out
    assert list(asked_of(tmp_path)) == ["checker"]
    (tmp_path / "done.json").write_text("{}")
    assert main(["roster", str(tmp_path), "--subagents", SLOPPY]) == 2
    assert "the run is done, want one that has iterations left" in capsys.readouterr().err
