"""What a run publishes, what is published of it by hand, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.cli import main
from recipes.compaction.run import compaction_run
from recipes.config import SHIPPED, Recipe
from recipes.overrides import to_json
from recipes.publish.by_hand import publish_run, with_start
from recipes.publish.rules import Publish, Shelf, due
from recipes.session import load_checkpoint, load_tokenizer
from recipes.wide_search import wide_search
from swarm.checkpoint import filed, load_model, save, weights_sha256
from swarm.folders import CheckpointError
from swarm.rl.adapt import AdaptConfig, adapt, merged_state_dict, trained_state
from swarm.rundir import RunDir, RunDirError, read_metrics
from swarm.states import save_state
from swarm.store import Store
from swarm.store_card import Origin
from tests.test_checkpoint import tiny
from tests.test_train import SMALL, killed_after

STORE = Path("checkpoints")


def row(score: float | None = None) -> dict[str, Any]:
    return {"rollout/item_f1": 0.9} | ({} if score is None else {"eval/item_f1": score})


# --- rules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iteration", "score", "best", "names"),
    [
        (1, None, None, ([], None)),
        (2, None, 0.5, (["step_000002", "last"], 0.5)),
        (3, 0.4, None, (["best"], 0.4)),
        (3, 0.6, 0.5, (["best"], 0.6)),
        (3, 0.5, 0.5, ([], 0.5)),
        (3, float("nan"), None, ([], None)),
        (4, 0.6, 0.5, (["step_000004", "last", "best"], 0.6)),
        (5, 0.1, 0.5, (["last"], 0.5)),
    ],
)
def test_an_iteration_is_published_as_the_rules_say(
    iteration: int, score: float | None, best: float | None, names: tuple[list[str], float | None]
) -> None:
    assert due(Publish(STORE, every=2), iteration, 5, row(score), best) == names


def test_only_what_is_asked_for_is_published() -> None:
    assert due(Publish(), 5, 5, row(0.7), None) == ([], None)
    assert due(Publish(STORE, last=False), 5, 5, row(0.7), None) == (["best"], 0.7)
    assert due(Publish(STORE, best=""), 5, 5, row(0.7), None) == (["last"], None)
    assert due(Publish(STORE, every=5, last=False, best=""), 5, 5, row(0.7), None) == (["step_000005"], None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": -1}, "every = -1, want 0"),
        ({"every": 5}, "every = 5, want 0 without publish.store"),
        ({"name": "x"}, "name = 'x', want none without publish.store"),
        ({"store": STORE, "name": "a b"}, "name 'a b', want letters, digits"),
        ({"store": STORE, "last": False, "best": ""}, "want none where every, last and best are off"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Publish(**fields)


def test_the_best_goes_by_a_metric_that_the_run_has() -> None:
    with pytest.raises(ValueError, match="best = 'eval/score', want eval/item_f1 or eval/finish_rate"):
        replace(wide_search(), publish=Publish(best="eval/score"))
    with pytest.raises(ValueError, match="best = 'eval/item_f1', want eval/score or eval/success"):
        replace(compaction_run(), publish=Publish(best="eval/item_f1"))


def shelf(run: Path, store: Path, **rules: Any) -> Shelf:
    return Shelf(Publish(store, **rules), run, {}, load_tokenizer(SHIPPED))


def test_a_run_does_not_take_the_names_of_another(tmp_path: Path) -> None:
    store = tmp_path / "checkpoints"
    Store(store).publish(["x/best"], lambda into: save(tiny(), None, into, 0), Origin("other/x"))
    with pytest.raises(CheckpointError, match="x/best is of other/x, want another publish.name than 'x' for runs/x"):
        shelf(Path("runs/x"), store).check()
    shelf(Path("other/x"), store).check()
    shelf(Path("runs/x"), store, name="y").check()
    shelf(Path("runs/x2"), store).check()


def test_a_run_whose_folder_is_no_name_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name 'my run/last', want letters"):
        shelf(tmp_path / "my run", tmp_path / "checkpoints").check()


# --- while it trains -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_while_it_published_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run, store = tmp_path / "run", Store(tmp_path / "store")
    rules = ("--publish.store", str(store.root), "--publish.every", "2", "--publish.name", "x", "--quick_every", "1")
    command = ("train", "wide_search", "--out", str(run), *SMALL, *rules)
    for moment in (store.root / "names.json", run / "checkpoints" / "step_000002", run / "policy"):
        killed_after(moment, *command)

    entries = store.entries(thorough=True)
    assert [e.fault for e in entries if e.fault] == []
    assert sorted(p.name for p in store.root.glob("objects/*")) == sorted(e.id for e in entries)
    steps = {name: e.card.origin.step for e in entries if e.card for name in e.names}
    scores = {r["step"]: r["eval/item_f1"] for r in read_metrics(run)}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert steps == {"x/step_000002": 2, "x/last": 3, "x/best": best}
    ids = {name: e.id for e in entries for name in e.names}
    assert publish_run(run, store, names=["again"]).id == ids["x/last"]
    assert publish_run(run, store, "2", names=["again"]).id == ids["x/step_000002"]


# --- by hand ---------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four iterations that is over: the states of the last two are kept, the second was the best."""
    return made(tmp_path / "runs" / "x", wide_search())


def made(path: Path, recipe: Recipe) -> Path:
    policy, _ = load_checkpoint(SHIPPED)
    adapt(policy, recipe.ppo.adapt, recipe.ppo.seed)
    with RunDir(path, to_json(recipe)) as folder:
        for step, score in enumerate((0.5, 0.7, 0.6, 0.65), 1):
            folder.log({"step": step, "rollout/reward": step, **row(score)})
    for step in (3, 4):
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.01 * p.requires_grad)
        state = {"policy": trained_state(policy), "base": base_of(recipe, policy), "updates": step}
        save_state(path / "checkpoints" / f"step_{step:06d}", {"learner": state})
    save(policy, load_tokenizer(SHIPPED), path / "policy", 4, filed(policy, merged_state_dict(policy)))
    return path


def base_of(recipe: Recipe, policy: torch.nn.Module) -> str:
    frozen = {name: p.detach() for name, p in policy.named_parameters() if not p.requires_grad}
    return weights_sha256(frozen) if recipe.ppo.adapt.kind != "all" else ""


@pytest.mark.slow
def test_the_trained_policy_is_published_with_the_recipe_and_the_scores_of_its_iteration(run: Path) -> None:
    store = Store(run.parent / "store")
    entry = publish_run(run, store)
    assert entry.names == ("x/last",)
    assert entry.card is not None
    assert entry.card.origin == Origin(str(run), 4, to_json(wide_search()), row(0.65) | {"rollout/reward": 4.0})
    assert store.get("x/last").version == 4


@pytest.mark.slow
def test_the_weights_in_a_state_are_what_the_policy_of_that_iteration_would_have_been(run: Path) -> None:
    store = Store(run.parent / "store")
    policy = publish_run(run, store, "4")
    (run / "policy" / "config.json").unlink()
    assert publish_run(run, store, "4").id == publish_run(run, store, "last").id == policy.id
    third = publish_run(run, store, "3")
    assert third.names == ("x/step_000003",)
    assert store.get("x/step_000003").version == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AdaptConfig("lora", rank=2), AdaptConfig("last_layers")])
def test_the_adapters_in_a_state_are_merged(tmp_path: Path, kind: AdaptConfig) -> None:
    recipe = replace(wide_search(), ppo=replace(wide_search().ppo, adapt=kind))
    run = made(tmp_path / "runs" / "x", recipe)
    store = Store(tmp_path / "store")
    policy = publish_run(run, store)
    (run / "policy" / "config.json").unlink()
    assert publish_run(run, store, "4", names=["y"]).id == policy.id
    assert weights_sha256(load_model(store.get("y"))) != load_checkpoint(SHIPPED)[1]


@pytest.mark.slow
def test_the_best_is_published_where_its_weights_are_kept(run: Path) -> None:
    store = Store(run.parent / "store")
    seen = "iteration 2 is the best by eval/item_f1, but its weights are not kept, want one of 3, 4"
    with pytest.raises(CheckpointError, match=seen):
        publish_run(run, store, "best")
    assert not store.root.exists()
    entry = publish_run(run, store, "best", by="rollout/reward")
    assert (entry.names, store.get("x/best").version) == (("x/best",), 4)


@pytest.mark.slow
def test_what_cannot_be_published_is_said_in_one_line(run: Path, tmp_path: Path) -> None:
    store = Store(run.parent / "store")
    with pytest.raises(CheckpointError, match="iteration 9: its weights are not kept, want one of 3, 4"):
        publish_run(run, store, "9")
    with pytest.raises(CheckpointError, match="no eval/score in its metrics, want one of eval/item_f1"):
        publish_run(run, store, "best", by="eval/score")
    with pytest.raises(RunDirError, match="no run here"):
        publish_run(tmp_path, store)
    with RunDir(tmp_path / "new", {"seed": 0}), pytest.raises(CheckpointError, match="no policy and no trainer state"):
        publish_run(tmp_path / "new", store)
    assert not store.root.exists()


def test_a_start_by_name_is_taken_as_the_folder_that_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = Store().add(SHIPPED, ["x/best"])
    assert with_start(replace(wide_search(), start=Path("x/best"))).start == entry.path
    assert with_start(wide_search()) == wide_search()
    unknown = replace(wide_search(), start=Path("x/bets"))
    assert with_start(unknown) == unknown


# --- the command -----------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "checkpoints")
    origin = Origin("runs/x", 20, {"seed": 0}, {"eval/item_f1": 0.7123})
    store.publish(["x/best", "x/last"], lambda into: save(tiny(), None, into, 5), origin)
    return store


def said(capsys: pytest.CaptureFixture[str], store: Store, *words: str, code: int = 0) -> str:
    assert main(["checkpoints", *words, "--store", str(store.root)]) == code
    out, error = capsys.readouterr()
    return error if code == 2 else out


def test_the_list_shows_names_origin_score_and_state(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    shown = said(capsys, store, "list")
    for text in ("x/best", "x/last", "runs/x", "20", "item_f1 0.712", "good"):
        assert text in shown
    (plain,) = json.loads(said(capsys, store, "list", "--json"))
    assert (plain["names"], plain["fault"], plain["card"]["origin"]["step"]) == (["x/best", "x/last"], "", 20)


def test_one_is_shown_with_its_card(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    entry = store.show("x/best")
    shown = said(capsys, store, "show", entry.id[:10])
    for text in (entry.id, "runs/x, iteration 20", "0.7123", "Qwen3ForCausalLM", "nobody"):
        assert text in shown
    assert json.loads(said(capsys, store, "show", "x/last", "--json"))["path"] == str(entry.path)


def test_verify_ends_with_1_where_something_is_damaged(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    assert "good" in said(capsys, store, "verify")
    (store.show("x/best").path / "config.json").unlink()
    assert "config.json is missing" in said(capsys, store, "verify", "x/best", code=1)
    assert json.loads(said(capsys, store, "verify", "--json", code=1))[0]["fault"] == "config.json is missing"
    assert "config.json is missing" in said(capsys, store, "list")


def test_a_pin_is_set_named_in_the_refusal_and_taken_away(capsys: pytest.CaptureFixture[str], store: Store) -> None:
    assert "pinned by runs/swap" in said(capsys, store, "pin", "x/best", "--for", "runs/swap")
    assert "x/best: gone; its checkpoint stays" in said(capsys, store, "delete", "x/best")
    refusal = said(capsys, store, "delete", "x/last", code=2)
    assert "x/last stays: pinned by runs/swap, want it unpinned first" in refusal
    assert "not pinned by 'hand'" in said(capsys, store, "unpin", "x/last", code=2)
    said(capsys, store, "unpin", "x/last", "--for", "runs/swap")
    assert "x/last: gone, and its checkpoint removed" in said(capsys, store, "delete", "x/last")
    assert "is empty" in said(capsys, store, "list")


def test_a_folder_is_added_and_given_another_name(
    capsys: pytest.CaptureFixture[str], store: Store, tmp_path: Path
) -> None:
    save(tiny(1), None, tmp_path / "model", 0)
    (tmp_path / "model" / "pytorch_model.bin").touch()
    assert "left out: pytorch_model.bin" in said(capsys, store, "add", str(tmp_path / "model"), "m")
    assert json.loads(said(capsys, store, "add", "m", "m/again", "--json"))["names"] == ["m", "m/again"]


@pytest.mark.slow
def test_a_run_is_published_by_the_command(capsys: pytest.CaptureFixture[str], store: Store, run: Path) -> None:
    assert "x/step_000003 = " in said(capsys, store, "publish", str(run), "--step", "3")
    assert "good = " in said(capsys, store, "publish", str(run), "good")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("lst",), "unknown checkpoints command 'lst', nearest: list"),
        (("show", "x/bets"), "no checkpoint 'x/bets', nearest: x/best"),
        (("show",), "required: TEXT"),
        (("add", "nowhere", "y"), "nowhere: no such folder; .*no checkpoint 'nowhere'"),
        (("add", ".", "a b"), "name 'a b', want letters"),
        (("publish", "nowhere"), "nowhere: no run here"),
        (("publish", "x", "--step", "two"), "'two', want an iteration, last or best"),
    ],
)
def test_a_mistake_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], store: Store, words: tuple[str, ...], line: str
) -> None:
    error = said(capsys, store, *words, code=2)
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(error)
