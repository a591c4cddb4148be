"""The store of checkpoints: what is kept, what goes, what is refused, and what a kill at any moment leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tokenizer import build_tokenizer
from swarm.checkpoint import load_model, ref_of, save, weights_sha256
from swarm.folders import CheckpointError
from swarm.store import Store, Stored, resolve
from swarm.store_card import Origin
from swarm.store_intake import left_out
from swarm.types import CheckpointRef
from tests.test_checkpoint import DAMAGE, small_disk, tiny

ORIGIN = Origin("runs/x", 20, {"seed": 0}, {"eval/item_f1": 0.71})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


model = cache(tiny)


def writes(seed: int) -> Callable[[Path], CheckpointRef]:
    return lambda into: save(model(seed), None, into, 0)


def published(store: Store, *names: str, seed: int = 0) -> Stored:
    return store.publish(names, writes(seed), ORIGIN)


def held(store: Store) -> dict[str, tuple[str, ...]]:
    """Weights → names, of all that is listed; all of it good."""
    entries = store.entries()
    assert not [e.fault for e in entries if e.fault]
    return {e.card.weights_sha256: e.names for e in entries if e.card}


def folders(store: Store, of: str = "objects") -> list[str]:
    return sorted(p.name for p in store.root.glob(f"{of}/*"))


# --- publish, get ----------------------------------------------------------------------


def test_what_is_published_comes_back_by_each_of_its_names(store: Store) -> None:
    found = published(store, "x/best", "x/last", seed=3)
    for name in ("x/best", "x/last"):
        ref = store.get(name)
        assert ref == CheckpointRef(found.path, weights_sha256(model(3)), 0)
        assert weights_sha256(load_model(ref)) == ref.sha256


def test_a_published_folder_is_one_that_transformers_loads_and_has_a_reference_of_its_own(store: Store) -> None:
    tokenizer = build_tokenizer(["a page"])
    mine = tiny(vocab_size=len(tokenizer))
    found = store.publish(["x"], lambda into: save(mine, tokenizer, into, 4), ORIGIN)
    assert weights_sha256(AutoModelForCausalLM.from_pretrained(found.path)) == weights_sha256(mine)
    assert AutoTokenizer.from_pretrained(found.path).encode("a page") == tokenizer.encode("a page")
    assert ref_of(found.path) == store.get("x") == CheckpointRef(found.path, weights_sha256(mine), 4)


def test_the_card_says_where_it_came_from_to_people_and_to_programs(store: Store) -> None:
    found = published(store, "x")
    raw = json.loads((found.path / "card.json").read_text())
    assert raw["origin"] == {"source": "runs/x", "step": 20, "recipe": {"seed": 0}, "scores": {"eval/item_f1": 0.71}}
    assert (raw["architecture"], raw["parameters"]) == ("Qwen3ForCausalLM", sum(p.numel() for p in tiny().parameters()))
    assert sorted(raw["files"]) == ["checkpoint.json", "config.json", "model.safetensors"]
    words = (found.path / "README.md").read_text()
    assert "From `runs/x`, iteration 20." in words
    assert "| eval/item_f1 | 0.71 |" in words


def test_equal_folders_are_kept_once_and_the_first_card_stays(store: Store) -> None:
    first = published(store, "a")
    second = store.publish(["b"], writes(0), Origin("runs/y"))
    assert (second.id, second.card) == (first.id, first.card)
    assert second.names == ("a", "b")
    assert folders(store) == [first.id]


def test_the_same_weights_with_another_template_are_another_checkpoint(store: Store) -> None:
    a, b = build_tokenizer(["a page"]), build_tokenizer(["a page"])
    b.chat_template = "{{ messages }}"
    mine = tiny(vocab_size=len(a))
    for name, tokenizer in (("a", a), ("b", b)):
        store.publish([name], lambda into, t=tokenizer: save(mine, t, into, 0), ORIGIN)
    assert store.get("a").sha256 == store.get("b").sha256
    assert len(folders(store)) == 2
    with pytest.raises(CheckpointError, match=r"2 checkpoints begin with .*, want one: [0-9a-f]{64}, [0-9a-f]{64}"):
        store.get(weights_sha256(mine)[:12])


def test_a_checkpoint_is_found_by_the_beginning_of_its_hash_or_of_its_weights(store: Store) -> None:
    found = published(store, "x")
    published(store, "y", seed=1)
    assert store.get(found.id[:8]).path == found.path
    assert store.get(weights_sha256(model())[:8]).path == found.path
    with pytest.raises(CheckpointError, match="no checkpoint begins with 00000000"):
        store.get("00000000")


def test_a_name_that_is_not_there_is_answered_with_the_nearest(store: Store) -> None:
    published(store, "wide_search/best")
    with pytest.raises(CheckpointError, match="no checkpoint 'wide_serch/best', nearest: wide_search/best"):
        store.get("wide_serch/best")
    with pytest.raises(CheckpointError, match="no checkpoint 'x', it has none"):
        Store(store.root / "other").get("x")


@pytest.mark.parametrize("name", ["", "/x", "x/", "a//b", "../x", "a/.b", "a b", "ä", "deadbeef", "x\n"])
def test_a_name_that_is_none_is_refused_before_anything_is_written(store: Store, name: str) -> None:
    with pytest.raises(CheckpointError, match="want letters, digits"):
        published(store, "good", name)
    assert not store.root.exists()


def test_looking_at_a_store_that_is_not_there_makes_nothing(store: Store) -> None:
    assert store.entries() == []
    assert not store.root.exists()


def test_a_path_is_taken_for_a_folder_and_anything_else_for_a_name(store: Store, tmp_path: Path) -> None:
    found = published(store, "x/best")
    assert resolve(str(tmp_path), store.root) == tmp_path
    assert resolve("x/best", store.root) == found.path
    with pytest.raises(CheckpointError, match="x/bset: no such folder; .*nearest: x/best"):
        resolve("x/bset", store.root)


# --- what goes, and what stays ---------------------------------------------------------


def test_a_name_that_moves_leaves_nothing_behind(store: Store) -> None:
    published(store, "x/last", seed=0)
    second = published(store, "x/last", seed=1)
    assert folders(store) == [second.id]


def test_a_folder_goes_with_its_last_name(store: Store) -> None:
    published(store, "a", "b")
    assert store.delete("a")
    assert held(store) == {weights_sha256(model()): ("b",)}
    assert not store.delete("b")
    assert folders(store) == []


def test_deleting_by_hash_takes_all_names(store: Store) -> None:
    found = published(store, "a", "b")
    assert not store.delete(found.id[:12])
    assert store.entries() == []


def test_what_is_pinned_is_not_deleted_and_the_refusal_names_who_pins_it(store: Store) -> None:
    found = published(store, "a", "b")
    store.pin("a", "runs/swap")
    store.pin("b", "notebook")
    assert store.delete("a")
    for text in ("b", found.id[:12]):
        with pytest.raises(CheckpointError, match="stays: pinned by notebook, runs/swap, want it unpinned first"):
            store.delete(text)
    assert held(store) == {weights_sha256(model()): ("b",)}


def test_a_pinned_checkpoint_stays_when_its_name_moves_and_goes_with_the_last_pin(store: Store) -> None:
    ref = published(store, "x/last", seed=0)
    assert store.get("x/last", pin="runs/a").path == ref.path
    store.pin("x/last", "runs/b")
    published(store, "x/last", seed=1)
    assert store.get(ref.id).path == ref.path
    assert store.unpin(ref.id, "runs/a")
    with pytest.raises(CheckpointError, match="not pinned by 'runs/a', pinned by runs/b"):
        store.unpin(ref.id, "runs/a")
    assert not store.unpin(ref.id, "runs/b")
    assert held(store) == {weights_sha256(model(1)): ("x/last",)}


# --- a folder from elsewhere -----------------------------------------------------------


def test_an_added_folder_is_copied_without_pickles_code_and_hidden_files(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "model"
    save(tiny(), None, source, 3)
    for name in ("pytorch_model.bin", "modeling.py", ".gitattributes", "LICENSE"):
        (source / name).write_text(name)
    (source / "README.md").write_text("about it")
    assert left_out(source) == ["modeling.py", "pytorch_model.bin"]
    found = store.add(source, ["x"])
    plain = ["LICENSE", "README.source.md", "checkpoint.json", "config.json", "model.safetensors"]
    assert found.card is not None
    assert sorted(found.card.files) == plain
    assert (found.path / "README.source.md").read_text() == "about it"
    assert (found.card.origin, store.get("x").version) == (Origin(str(source)), 3)


def test_a_folder_of_links_is_copied_as_files(store: Store, tmp_path: Path) -> None:
    save(tiny(), None, tmp_path / "blobs", 0)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    found = store.add(tmp_path / "snapshot", ["x"])
    shutil.rmtree(tmp_path / "blobs")
    assert weights_sha256(load_file(found.path / "model.safetensors")) == weights_sha256(model())


def test_a_folder_that_another_store_published_keeps_its_card_and_its_hash(store: Store, tmp_path: Path) -> None:
    first = published(Store(tmp_path / "elsewhere"), "x")
    second = store.add(first.path, ["y"])
    assert second.card is not None
    assert (second.id, second.card.origin) == (first.id, ORIGIN)
    assert left_out(first.path) == []


def test_adding_a_checkpoint_of_the_store_gives_it_another_name(store: Store, tmp_path: Path) -> None:
    save(tiny(), None, tmp_path / "model", 0)
    (tmp_path / "model" / "README.md").write_text("about it")
    first = store.add(tmp_path / "model", ["a"])
    assert store.add(first.path, ["b"]).names == ("a", "b")
    assert folders(store) == [first.id]


def test_a_published_folder_that_was_changed_is_not_added(store: Store, tmp_path: Path) -> None:
    found = published(Store(tmp_path / "elsewhere"), "x")
    (found.path / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json has 2 bytes, want"):
        store.add(found.path, ["y"])


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_bad_folder_is_not_added_and_leaves_nothing(
    store: Store, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    save(tiny(), None, tmp_path / "model", 0)
    damage(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        store.add(tmp_path / "model", ["x"])
    assert store.entries() == []
    assert folders(store) == folders(store, "incoming") == []


# --- damage ----------------------------------------------------------------------------


def overwrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda f: overwrite(f / "model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        "model.safetensors is damaged",
    ),
    (lambda f: overwrite(f / "model.safetensors", lambda b: b[:-1]), "model.safetensors has .* bytes, want"),
    (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    (lambda f: (f / "pytorch_model.bin").touch(), "pytorch_model.bin is not on its card"),
    (lambda f: (f / "card.json").unlink(), "card.json: missing"),
    (lambda f: overwrite(f / "card.json", lambda b: b[:40]), "card.json: corrupt"),
    (lambda f: overwrite(f / "card.json", lambda b: b.replace(b"0.71", b"0.91")), "card.json: damaged"),
    (lambda f: overwrite(f / "card.json", lambda b: b.replace(b'"format": 1', b'"format": 2')), "format 2, want 1"),
    (shutil.rmtree, "its folder is missing"),
]


@pytest.mark.parametrize(("damage", "fault"), FAULTS)
def test_a_damaged_checkpoint_is_listed_as_damaged_not_given_out_and_healed_by_publishing_it_again(
    store: Store, damage: Callable[[Path], object], fault: str
) -> None:
    found = published(store, "x")
    damage(found.path)
    (entry,) = store.entries()
    assert (entry.id, entry.names) == (found.id, ("x",))
    with pytest.raises(CheckpointError, match=f"x: .*{fault}"):
        store.get("x")
    published(store, "x")
    assert held(store) == {weights_sha256(model()): ("x",)}
    assert store.get("x").path == found.path


def test_damage_that_keeps_size_and_time_is_found_when_files_are_hashed(store: Store) -> None:
    found = published(store, "x")
    file = found.path / "model.safetensors"
    before = file.stat()
    overwrite(file, flipped)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "damaged" in store.entries(thorough=True)[0].fault
    assert "damaged" in store.show("x", thorough=True).fault
    with pytest.raises(CheckpointError, match="damaged"):
        store.get("x")


def test_a_store_that_was_copied_without_its_times_is_still_good(store: Store) -> None:
    found = published(store, "x")
    for path in found.path.iterdir():
        os.utime(path)
    assert held(store) == {weights_sha256(model()): ("x",)}


def test_a_damaged_checkpoint_can_be_deleted(store: Store) -> None:
    found = published(store, "x")
    (found.path / "card.json").unlink()
    assert not store.delete("x")
    assert folders(store) == []


def test_a_folder_with_files_of_somebody_else_is_no_store(store: Store) -> None:
    store.root.mkdir()
    (store.root / "step_000001").mkdir()
    for use in (store.entries, lambda: published(store, "x")):
        with pytest.raises(CheckpointError, match="not a store, it has step_000001"):
            use()
    assert os.listdir(store.root) == ["step_000001"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "names.json is missing; the folders in objects/ are untouched"),
        (lambda path: path.write_text("{"), "names.json: corrupt: .*untouched"),
        (lambda path: path.write_text('{"format": 2}'), "names.json: format 2, want 1"),
    ],
)
def test_without_its_names_a_store_sweeps_nothing_away(
    store: Store, damage: Callable[[Path], object], message: str
) -> None:
    found = published(store, "x")
    damage(store.root / "names.json")
    for use in (store.entries, lambda: published(store, "y", seed=1)):
        with pytest.raises(CheckpointError, match=message):
            use()
    assert folders(store) == [found.id]


def test_a_disk_that_is_full_leaves_the_store_as_it_was(store: Store) -> None:
    published(store, "x")
    before = held(store)
    with small_disk(), pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        published(store, "x", seed=1)
    assert held(store) == before
    assert folders(store, "incoming") == []


# --- kills, and several at once --------------------------------------------------------


def killed_at(event: int, use: Callable[[], object]) -> bool:
    """Runs `use` in a copy of this process that dies, hard, before its n-th change of the disk; False if it ends."""

    def count(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal event
        changes = name.startswith(("os.", "shutil."))
        if changes or (name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            event -= 1
            if event == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a copy of a process with threads: it starts none
        child = os.fork()
    if child == 0:
        sys.addaudithook(count)
        use()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def every_kill(make: Callable[[], Store], use: Callable[[Store], object]) -> list[dict[str, tuple[str, ...]]]:
    """What is listed after each possible kill; a later command leaves nothing but what is referred to."""
    seen: list[dict[str, tuple[str, ...]]] = []
    for event in range(1000):
        store = make()
        more = killed_at(event, partial(use, store))
        seen.append(held(store))
        published(store, "later", seed=9)
        assert len(folders(store)) == len(store.entries())
        assert folders(store, "incoming") == []
        shutil.rmtree(store.root)
        if not more:
            return seen
    raise AssertionError("it never ended")


@pytest.mark.slow
def test_a_kill_at_any_moment_of_the_first_publication_leaves_none_or_all_of_it(store: Store) -> None:
    whole = {weights_sha256(model(1)): ("a", "b")}
    seen = every_kill(lambda: store, lambda s: published(s, "a", "b", seed=1))
    assert [s for s in seen if s not in ({}, whole)] == []
    assert (seen[0], seen[-1]) == ({}, whole)
    assert len(seen) > 20


@pytest.mark.slow
def test_a_kill_at_any_moment_while_a_name_moves_leaves_it_on_one_of_the_two(store: Store, tmp_path: Path) -> None:
    first = Store(tmp_path / "first")
    published(first, "x", seed=0)

    def copied() -> Store:
        shutil.copytree(first.root, store.root)
        return store

    old, new = {weights_sha256(model(0)): ("x",)}, {weights_sha256(model(1)): ("x",)}
    seen = every_kill(copied, lambda s: published(s, "x", seed=1))
    assert [s for s in seen if s not in (old, new)] == []
    assert (seen[0], seen[-1]) == (old, new)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_deletion_leaves_a_good_checkpoint_or_none(store: Store, tmp_path: Path) -> None:
    first = Store(tmp_path / "first")
    published(first, "x", seed=0)

    def copied() -> Store:
        shutil.copytree(first.root, store.root)
        return store

    seen = every_kill(copied, lambda s: s.delete("x"))
    assert [s for s in seen if s not in ({}, {weights_sha256(model(0)): ("x",)})] == []
    assert seen[-1] == {}


def test_what_another_process_is_writing_is_not_swept_away(store: Store) -> None:
    def write(into: Path) -> CheckpointRef:
        published(store, "other", seed=1)  # sweeps the store while this one is being written
        return writes(0)(into)

    store.publish(["x"], write, ORIGIN)
    assert held(store) == {weights_sha256(model(0)): ("x",), weights_sha256(model(1)): ("other",)}


@pytest.mark.slow
def test_several_that_publish_at_once_lose_nothing(store: Store) -> None:
    def publish(k: int) -> None:
        for _ in range(3):
            published(store, f"run{k}/last", "shared", seed=k)

    for k in range(4):
        model(k)  # made here: the generator is everybody's
    threads = [threading.Thread(target=publish, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    names = sorted(n for names in held(store).values() for n in names)
    assert names == ["run0/last", "run1/last", "run2/last", "run3/last", "shared"]
    assert len(folders(store)) == 4
