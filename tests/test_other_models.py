"""Any causal model in the learner: its log-probabilities, gradients and checkpoints against transformers' own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from swarm.checkpoint import filed, load_model, ref_of, save, weights_sha256
from swarm.engine.qwen3 import dense
from swarm.folders import CheckpointError
from swarm.rl.batch import Batch
from swarm.rl.critic import Critic, CriticConfig
from swarm.rl.distill import DistillConfig, Teacher
from swarm.rl.forward import hidden_states, log_chosen, log_policy, packs
from swarm.rl.head import check_head
from swarm.rl.learner import Learner
from swarm.rl.losses import KLConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.rows import micro_batches
from swarm.rl.signals import Frozen, logprobs
from tests.model_cases import FAMILIES, branches, made, plain

CONFIG = PPOConfig(critic=CriticConfig(warmup_updates=0, layers=1), minibatches=2, micro_tokens=64)
CASES = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    Learner(made("qwen3"), CONFIG).update(branches())


def ours(
    model: PreTrainedModel, batch: Batch, temperature: float = 1.0, chunk: int | None = None, share: bool = True
) -> Tensor:
    """log π [N] from packed micro-batches in which rows share their beginning."""
    out_N = torch.zeros(len(batch))
    micros = micro_batches(batch.rows, torch.arange(len(batch.rows)), 64, share)
    assert any(g >= 0 for m in micros for g in m.after) is share
    for m in micros:
        logp_n, _ = log_chosen(model, hidden_states(model, m), m.target_n, temperature, chunk=chunk)
        out_N = out_N.index_put((m.index_n,), logp_n)
    return out_N


@CASES
@pytest.mark.parametrize("share", [True, False])
def test_log_probabilities_are_those_of_the_plain_unpacked_model(family: str, share: bool) -> None:
    model, batch = made(family), branches()
    assert not packs(model)
    with torch.no_grad():
        torch.testing.assert_close(ours(model, batch, share=share), plain(model, batch), atol=1e-5, rtol=0)
        got_N = ours(model, batch, 0.7, chunk=3, share=share)
        torch.testing.assert_close(got_N, plain(model, batch, 0.7), atol=1e-5, rtol=0)


@CASES
def test_gradients_are_those_of_the_plain_unpacked_model(family: str) -> None:
    model, batch = made(family), branches()
    weight_N = torch.linspace(-1, 2, len(batch))
    found: list[dict[str, Tensor]] = []
    for logp_N in (ours(model, batch, 0.7, chunk=3), plain(model, batch, 0.7)):
        model.zero_grad()
        (logp_N * weight_N).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@CASES
def test_the_entropy_is_that_of_the_whole_distribution(family: str) -> None:
    model, batch = made(family), branches()
    (micro,) = micro_batches(batch.rows, torch.arange(1), 64)
    h_nd = hidden_states(model, micro).detach().requires_grad_()
    logp_nV = log_policy(model, h_nd, 0.7)
    want_n = -(logp_nV.exp() * logp_nV).sum(-1)
    got_n = log_chosen(model, h_nd, micro.target_n, 0.7, with_entropy=True)[1]
    torch.testing.assert_close(got_n, want_n, atol=1e-5, rtol=0)
    a, b = (torch.autograd.grad(x.sum(), h_nd)[0] for x in (got_n, want_n))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_later_token_changes_nothing_before_it() -> None:
    model = made("gemma3")
    batch = branches()
    changed = replace(batch, rows=replace(batch.rows, ids_L=batch.rows.ids_L.clone()))
    last = int(batch.rows.start_S[0] + batch.rows.length_S[0]) - 1
    changed.rows.ids_L[last] = 39
    with torch.no_grad():
        a_N, b_N = ours(model, batch), ours(model, changed)
    assert torch.equal(a_N, b_N)


class Louder(LlamaForCausalLM):
    """Says its logits louder, as no field of its configuration tells."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = out.logits * 1.5
        return out


def test_a_model_whose_logits_are_made_otherwise_is_refused_in_one_line() -> None:
    model = made("llama")
    model.__class__ = Louder
    with pytest.raises(ValueError, match="^Louder: its logits are up to .* off those of a matrix") as caught:
        Learner(model, CONFIG)
    assert "\n" not in str(caught.value)


@CASES
def test_the_head_of_every_family_is_understood(family: str) -> None:
    check_head(made(family))


@CASES
def test_a_first_update_begins_with_ratio_one_and_learns(family: str) -> None:
    model = made(family)
    batch = branches()
    batch = replace(batch, logp_rollout_N=plain(model, batch).detach())
    learner = Learner(model, replace(CONFIG, minibatches=1))
    metrics = learner.update(batch)
    assert metrics.policy is not None
    assert metrics.drift_max < 1e-5
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics.policy.approx_kl) < 1e-5
    assert (metrics.policy_steps, metrics.critic_steps, metrics.skipped) == (1, 1, 0)
    assert (logprobs(learner.policy, batch.rows, learner.config) - batch.logp_rollout_N).abs().max() > 1e-3


@CASES
def test_a_critic_takes_over_the_first_layers(family: str) -> None:
    model = made(family)
    critic = Critic(model, layers=1)
    torch.nn.init.normal_(critic.head.weight)
    (micro,) = micro_batches(branches().rows, torch.arange(1), 64)
    whole, part = Critic(model), critic
    whole.head.load_state_dict(part.head.state_dict())
    assert not torch.allclose(whole.values(micro), part.values(micro), atol=1e-3)
    assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in whole.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "advantage"])
def test_a_reference_and_a_teacher_may_be_of_another_family_than_the_policy(form: Any) -> None:
    config = replace(
        CONFIG, minibatches=1, kl=KLConfig(0.1, estimator="k3"), distill=DistillConfig((Teacher(Path("t")),), form)
    )
    policy, teacher, batch = made("qwen3"), made("gemma3", 1), branches()
    metrics = Learner(policy, config, frozen=Frozen(made("llama", 2), (teacher,))).update(
        replace(batch, logp_rollout_N=plain(policy, batch).detach())
    )
    assert metrics.policy is not None
    assert metrics.policy.kl_reference > 0.01
    if form == "full":
        assert metrics.policy.kl_teacher == pytest.approx(float(mean_kl(made("qwen3"), teacher, batch)), abs=1e-4)


@torch.no_grad()
def mean_kl(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> Tensor:
    """KL(student ‖ teacher) over the action tokens, from whole distributions."""
    (micro,) = micro_batches(batch.rows, torch.arange(len(batch.rows)), 999, share=False)
    s_nV, t_nV = (log_policy(m, hidden_states(m, micro)) for m in (student, teacher))
    return (s_nV.exp() * (s_nV - t_nV)).sum(-1).mean()


# --- on disk ------------------------------------------------------------------------------


@pytest.mark.slow
@CASES
def test_a_saved_model_comes_back_here_and_in_plain_transformers(family: str, tmp_path: Path) -> None:
    model = made(family)
    ref = save(model, None, tmp_path / "m", 2)
    ids_BT = torch.arange(3, 15)[None]
    with torch.no_grad():
        want = model(input_ids=ids_BT).logits
        assert torch.equal(load_model(ref)(input_ids=ids_BT).logits, want)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "m")(input_ids=ids_BT).logits, want)
    assert ref_of(tmp_path / "m") == ref
    assert weights_sha256(load_model(ref)) == weights_sha256(model) == ref.sha256


@CASES
def test_the_dtype_of_the_file_is_kept(family: str, tmp_path: Path) -> None:
    assert load_model(save(made(family).bfloat16(), None, tmp_path / "m", 0)).dtype == torch.bfloat16


def test_a_mixture_of_experts_is_filed_expert_by_expert_as_others_read_it(tmp_path: Path) -> None:
    save(made("qwen3_moe"), None, tmp_path / "m", 0)
    raw = (tmp_path / "m" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["model.layers.1.mlp.experts.3.down_proj.weight"]["shape"] == [16, 8]


def edit(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "nonesuch"}, "model_type 'nonesuch', want one that transformers has a causal model of"),
        ({"model_type": None}, "model_type None, want one"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "model_type 'vit', want one"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.* of 'gemma3_text', want Gemma3ForCausalLM"),
        ({"hidden_size": "wide"}, "no Gemma3Text configuration"),
        ({"hidden_size": 1 << 40}, "has shape"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "weights of 2 layers, config.json says 3"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "want a model of text alone"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    ref = save(made("gemma3"), None, tmp_path / "m", 0)
    edit(ref.path, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(ref)
    assert "\n" not in str(caught.value)


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    ref = save(made("gemma3"), None, tmp_path / "m", 0)
    (ref.path / "modeling_evil.py").write_text("raise SystemExit('run')\n")
    edit(ref.path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"})
    assert type(load_model(ref)).__name__ == "Gemma3ForCausalLM"


def test_weights_of_several_float_types_are_refused(tmp_path: Path) -> None:
    model = made("gemma3")
    mixed = {n: t.bfloat16() if "mlp" in n else t for n, t in model.state_dict().items()}
    ref = save(model, None, tmp_path / "m", 0, filed(model, mixed))
    with pytest.raises(CheckpointError, match="weights of bfloat16, float32, want one float type"):
        load_model(ref)


def test_a_special_token_without_a_row_is_let_through_and_another_is_not(tmp_path: Path) -> None:
    ref = save(made("gemma3"), None, tmp_path / "m", 0)
    image = {"id": 40, "content": "<image>", "special": True}
    (ref.path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [image]}))
    load_model(ref)
    image["special"] = False
    (ref.path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [image]}))
    with pytest.raises(CheckpointError, match="tokenizer of 41 tokens, want at most the model's 40"):
        load_model(ref)


def test_the_embedded_engine_says_that_it_runs_no_other_family() -> None:
    with pytest.raises(ValueError, match="^model = Gemma3ForCausalLM, want Qwen3ForCausalLM"):
        dense(made("gemma3"))
