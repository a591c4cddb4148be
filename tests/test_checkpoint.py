"""Models and trainer states on disk: what comes back, what is refused, what a crash or a full disk leaves."""

import json
import logging
import os
import resource
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from recipes.tokenizer import build_tokenizer
from swarm.checkpoint import load_model, ref_of, save, weights_sha256
from swarm.folders import CheckpointError
from swarm.states import latest, load_state, save_state
from swarm.types import CheckpointRef


def tiny(seed: int = 0, *, tied: bool = True, vocab_size: int = 32) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.fixture
def ref(tmp_path: Path) -> CheckpointRef:
    return save(tiny(), None, tmp_path / "model", 3)


@contextmanager
def small_disk():
    """Files of more than 2 KiB cannot be written: no fixture, since the test runner's own log may be one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back_with_the_same_weights_and_logits(tmp_path: Path, tied: bool) -> None:
    model = tiny(tied=tied)
    loaded = load_model(save(model, None, tmp_path / "model", 1))
    ids_BT = torch.arange(12)[None]
    assert torch.equal(model(ids_BT).logits, loaded(ids_BT).logits)
    assert weights_sha256(loaded) == weights_sha256(model)
    assert not loaded.training


def test_a_loaded_model_can_be_trained_and_stays_tied(ref: CheckpointRef) -> None:
    model = load_model(ref)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.requires_grad for p in model.parameters())
    model(torch.arange(4)[None]).logits.sum().backward()


def test_transformers_loads_what_was_saved(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["a page"])
    model = tiny(vocab_size=len(tokenizer))
    save(model, tokenizer, tmp_path, 1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert weights_sha256(loaded) == weights_sha256(model)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a page") == tokenizer.encode("a page")


def test_a_tokenizer_is_the_same_files_however_it_was_loaded(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["a page"])
    save(tiny(vocab_size=len(tokenizer)), tokenizer, tmp_path / "first", 1)
    for offline in (False, True):
        again = AutoTokenizer.from_pretrained(tmp_path / "first", local_files_only=offline)
        save(tiny(vocab_size=len(tokenizer)), again, tmp_path / "again", 1)
        for file in (tmp_path / "first").iterdir():
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_the_dtype_of_the_file_is_kept(tmp_path: Path) -> None:
    loaded = load_model(save(tiny().bfloat16(), None, tmp_path / "model", 1))
    assert loaded.dtype == torch.bfloat16


def test_a_loaded_model_outlives_its_file(ref: CheckpointRef) -> None:
    model = load_model(ref)
    file = ref.path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert weights_sha256(model) == ref.sha256


def test_the_reference_of_a_folder_is_what_save_returned(ref: CheckpointRef) -> None:
    assert ref_of(ref.path) == ref


def test_weights_in_several_files_have_the_same_reference(ref: CheckpointRef) -> None:
    tensors = load_file(ref.path / "model.safetensors")
    names = sorted(tensors)
    (ref.path / "model.safetensors").unlink()
    save_file({n: tensors[n] for n in names[:3]}, ref.path / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[3:]}, ref.path / "model-00002-of-00002.safetensors")
    assert ref_of(ref.path) == ref
    assert weights_sha256(load_model(ref)) == ref.sha256


def test_the_weights_checksum_does_not_depend_on_the_order_of_names() -> None:
    state = tiny().state_dict()
    assert weights_sha256(dict(reversed(state.items()))) == weights_sha256(state)


@pytest.mark.parametrize("change", [lambda t: t + 1e-6, lambda t: t.double(), lambda t: t[None]])
def test_the_weights_checksum_sees_a_changed_value_type_or_shape(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    state = dict(tiny().state_dict())
    changed = {**state, "model.norm.weight": change(state["model.norm.weight"])}
    assert weights_sha256(changed) != weights_sha256(state)


def test_saving_again_replaces_the_folder(ref: CheckpointRef) -> None:
    (ref.path / "stray").touch()
    second = save(tiny(1), None, ref.path, 4)
    assert ref_of(ref.path) == second != ref
    assert sorted(os.listdir(ref.path)) == ["checkpoint.json", "config.json", "model.safetensors"]
    assert os.listdir(ref.path.parent) == ["model"]


def test_a_crash_between_the_renames_leaves_the_old_model(ref: CheckpointRef) -> None:
    ref.path.rename(ref.path.with_name(".model.old"))
    ref.path.with_name(".model.new").mkdir()
    assert ref_of(ref.path) == ref


def test_a_disk_that_is_full_leaves_the_old_model(ref: CheckpointRef) -> None:
    with small_disk(), pytest.raises(CheckpointError, match="cannot write the checkpoint: .*earlier ones are intact"):
        save(tiny(1), None, ref.path, 4)
    assert ref_of(ref.path) == ref
    assert os.listdir(ref.path.parent) == ["model"]


def remove_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def flipped(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def huge_header(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + data[8:])


def large_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 40}]}))


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (remove_all, "no such checkpoint folder"),
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: corrupt"),
    (lambda f: (f / "config.json").write_text("[]"), "want a JSON object"),
    (lambda f: edit_config(f, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM.*want Qwen3ForCausalLM"),
    (lambda f: edit_config(f, hidden_size="wide"), "no Qwen3 configuration"),
    (lambda f: edit_config(f, hidden_size=1 << 40), "has shape"),
    (lambda f: edit_config(f, num_hidden_layers=2, layer_types=["full_attention"] * 2), "weights of 1 layers"),
    (lambda f: edit_config(f, num_key_value_heads=0), "no model"),
    (lambda f: edit_config(f, vocab_size=-1), "no model"),
    (lambda f: edit_config(f, tie_word_embeddings=False), "no tensor lm_head.weight"),
    (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    (pickled, r"pickled weights \(pytorch_model.bin\)"),
    (truncated, "corrupt"),
    (flipped, "sha256"),
    (huge_header, "header of 1099511627776 bytes"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "corrupt"),
    (large_tokenizer, "tokenizer of 41 tokens, want at most the model's 32"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_bad_checkpoint_is_refused_in_one_line(
    ref: CheckpointRef, damage: Callable[[Path], object], message: str
) -> None:
    damage(ref.path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(ref)
    assert "\n" not in str(caught.value)


def test_weights_other_than_the_references_are_refused(ref: CheckpointRef) -> None:
    with pytest.raises(CheckpointError, match="want 000000000000"):
        load_model(replace(ref, sha256="0" * 64))


def test_a_folder_whose_weights_were_changed_has_no_reference(ref: CheckpointRef) -> None:
    flipped(ref.path)
    with pytest.raises(CheckpointError, match="corrupt, its weights have sha256"):
        ref_of(ref.path)


# --- trainer state ---------------------------------------------------------------------

STATE = {"policy": {"w": torch.arange(3.0)}, "step": 7, "lr": 1e-4, "betas": (0.9, 0.98), "moments": {0: [None, "x"]}}


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    save_state(tmp_path / "step_7", STATE)
    loaded = load_state(tmp_path / "step_7")
    assert torch.equal(loaded.pop("policy")["w"], torch.arange(3.0))
    assert loaded == {k: v for k, v in STATE.items() if k != "policy"}


def test_an_optimizers_state_comes_back_exactly(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_state(tmp_path / "step_1", {"optimizer": optimizer.state_dict()})
    loaded = load_state(tmp_path / "step_1")["optimizer"]
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(loaded["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    w = torch.ones(2)
    save_state(tmp_path / "step_1", {"a": w, "b": w})
    assert torch.equal(load_state(tmp_path / "step_1")["b"], w)


def test_a_value_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\.a\.0: set"):
        save_state(tmp_path / "step_1", {"a": [{1}]})


def test_a_name_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="want a name that ends in the step"):
        save_state(tmp_path / "newest", STATE)


def test_the_newest_states_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save_state(tmp_path / f"step_{step}", STATE, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_11"]
    assert latest(tmp_path) == tmp_path / "step_11"


def test_there_is_no_latest_state_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_state_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str) -> None:
    save_state(tmp_path / "step_1", STATE)
    save_state(tmp_path / "step_2", STATE)
    (tmp_path / "step_2" / file).write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == tmp_path / "step_1"
    assert "skipped a checkpoint" in caplog.text


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
def test_an_incomplete_state_is_skipped(tmp_path: Path, file: str) -> None:
    save_state(tmp_path / "step_1", STATE)
    save_state(tmp_path / "step_2", STATE)
    (tmp_path / "step_2" / file).unlink()
    assert latest(tmp_path) == tmp_path / "step_1"


def test_a_state_that_a_crash_left_under_its_old_name_is_found(tmp_path: Path) -> None:
    save_state(tmp_path / "step_1", STATE)
    (tmp_path / "step_1").rename(tmp_path / ".step_1.old")
    assert latest(tmp_path) == tmp_path / "step_1"


def test_a_half_written_state_is_not_found(tmp_path: Path) -> None:
    save_state(tmp_path / "step_1", STATE)
    (tmp_path / "step_1").rename(tmp_path / ".step_1.new")
    assert latest(tmp_path) is None


def test_a_disk_that_is_full_leaves_the_last_good_state(tmp_path: Path) -> None:
    save_state(tmp_path / "step_1", STATE, keep=1)
    with small_disk(), pytest.raises(CheckpointError, match=r"step_2: cannot write the checkpoint: "):
        save_state(tmp_path / "step_2", {"w": torch.ones(5000)}, keep=1)
    assert latest(tmp_path) == tmp_path / "step_1"
    assert os.listdir(tmp_path) == ["step_1"]
