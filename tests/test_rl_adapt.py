"""What is trained of a policy: adapters and last layers, their weights merged, saved, and gone on with."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm.checkpoint import load_model, save, weights_sha256
from swarm.rl.adapt import AdaptConfig, adapt, merged_state_dict, weights_of
from swarm.rl.batch import Batch, collect
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.optim import Muon, OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.rl.signals import logprobs
from tests.model_cases import branches, made, plain
from tests.rl_cases import some_rollouts

LORA = AdaptConfig("lora", rank=4)
LAST = AdaptConfig("last_layers")
SHARED = CriticConfig(trunk="shared", layers=None, warmup_updates=0)
CONFIG = PPOConfig(lr=1e-2, critic=SHARED, minibatches=2, micro_tokens=64, adapt=LORA)
FAMILIES = pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe", "phi"])
KINDS = pytest.mark.parametrize("how", [LORA, LAST], ids=["lora", "last_layers"])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    Learner(made("qwen3"), CONFIG).update(branches())


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in state.items()}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def parameters(learner: Learner) -> dict[str, Tensor]:
    both = {**dict(learner.policy.named_parameters()), **{f"head.{n}": p for n, p in learner.critic.named_parameters()}}
    return copied(both)


def plainly(learner: Learner, family: str) -> PreTrainedModel:
    """The plain model with the learner's weights, as an engine would have it."""
    model = made(family, seed=9)
    model.load_state_dict(merged_state_dict(learner.policy), strict=True)
    return model


def sampled_by(model: PreTrainedModel, batch: Batch) -> Batch:
    return replace(batch, logp_rollout_N=plain(model, batch).detach())


# --- what is trained ----------------------------------------------------------------------


@FAMILIES
@KINDS
def test_before_the_first_step_an_adapted_policy_says_what_it_said(family: str, how: AdaptConfig) -> None:
    model, batch = made(family), branches()
    before_N = plain(model, batch).detach()
    adapt(model, how, seed=0)
    torch.testing.assert_close(logprobs(model, batch.rows, CONFIG), before_N, atol=1e-5, rtol=0)


@pytest.mark.slow
@FAMILIES
def test_updates_with_lora_move_only_adapters_and_the_value_head(family: str) -> None:
    learner = Learner(made(family), CONFIG)
    before = parameters(learner)
    for _ in range(2):  # B starts at zero: A's first gradient is zero
        metrics = learner.update(sampled_by(learner.policy, branches()))
        assert metrics.skipped == 0
    moved = changed(before, parameters(learner))
    assert moved == {n for n in before if ".lora_" in n or n.startswith("head.")}
    assert moved != set(before)


@pytest.mark.slow
@FAMILIES
def test_updates_of_the_last_layer_move_only_it_and_what_follows(family: str) -> None:
    learner = Learner(made(family), replace(CONFIG, adapt=LAST))
    before = parameters(learner)
    for _ in range(3):  # an expert that no token goes to has no gradient in an update
        learner.update(branches())
    moved = changed(before, parameters(learner))
    last = {n for n in before if n.startswith(("model.layers.1.", "model.norm.", "model.final_layernorm.", "head."))}
    assert moved == last
    assert moved != set(before)


def test_adapters_go_to_the_named_layers_or_to_all_linear_ones_but_the_head() -> None:
    some, every = made("gemma3"), made("gemma3")
    adapt(some, AdaptConfig("lora", targets=("q_proj", "down_proj")), seed=0)
    adapt(every, AdaptConfig("lora"), seed=0)

    def adapters(model: PreTrainedModel) -> set[str]:
        return {n.split(".lora_A.")[0] for n, _ in model.named_parameters() if ".lora_A." in n}

    assert {n.rsplit(".", 1)[-1] for n in adapters(some)} == {"q_proj", "down_proj"}
    assert len(adapters(some)) == 2 * 2
    assert len(adapters(every)) == 2 * 7


def test_the_first_adapters_depend_on_the_seed_alone() -> None:
    made_of: list[dict[str, Tensor]] = []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        model = made("llama")
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        adapt(model, LORA, seed)
        assert torch.equal(torch.get_rng_state(), state)
        made_of.append(dict(model.named_parameters()))
    assert not changed(made_of[0], made_of[1])
    assert changed(made_of[0], made_of[2])


@pytest.mark.slow
def test_a_critic_of_its_own_is_trained_as_a_whole() -> None:
    learner = Learner(made("gemma3"), replace(CONFIG, critic=CriticConfig(layers=1, warmup_updates=0)))
    before = copied(dict(learner.critic.named_parameters()))
    for _ in range(2):  # the head starts at zero: the trunk's first gradient is zero too
        learner.update(branches())
    assert changed(before, dict(learner.critic.named_parameters())) == set(before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_muon_moves_the_adapters(family: str) -> None:
    learner = Learner(made(family), replace(CONFIG, optimizer=OptimizerConfig("muon")))
    muon, rest = learner.policy_stepper.optimizers
    assert isinstance(muon, Muon)
    shapes = {tuple(p.shape) for p in muon.param_groups[0]["params"]}
    assert all(4 in shape for shape in shapes)
    assert {tuple(p.shape) for g in rest.param_groups for p in g["params"]} == {(1, 16), (1,)}
    before = parameters(learner)
    for _ in range(2):
        learner.update(sampled_by(learner.policy, branches()))
    assert {n for n in before if ".lora_" in n} <= changed(before, parameters(learner))


# --- invariants ---------------------------------------------------------------------------


@pytest.mark.slow
@FAMILIES
@KINDS
def test_what_the_merged_weights_sampled_has_ratio_one_before_a_step(family: str, how: AdaptConfig) -> None:
    learner = Learner(made(family), replace(CONFIG, adapt=how))
    for _ in range(2):
        learner.update(branches())
    batch = sampled_by(plainly(learner, family), branches())
    assert (batch.logp_rollout_N - plain(made(family), batch).detach()).abs().max() > 1e-3
    learner.config = replace(learner.config, minibatches=1)
    metrics = learner.update(batch)
    assert metrics.policy is not None
    assert metrics.drift_max < 1e-5
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics.policy.approx_kl) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@KINDS
def test_the_gradient_does_not_depend_on_the_micro_batches(family: str, how: AdaptConfig) -> None:
    found: list[Tensor] = []
    for micro_tokens in (1, 10**6):
        config = replace(CONFIG, adapt=how, micro_tokens=micro_tokens, minibatches=1)
        learner = Learner(made(family), replace(config, optimizer=OptimizerConfig(max_grad_norm=1e9)))
        learner.update(collect(some_rollouts(8)))
        found.append(moments(learner))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
    assert found[0].abs().max() > 1e-3


def moments(learner: Learner) -> Tensor:
    """What AdamW was given: its first moment / 0.1."""
    optimizer = learner.policy_stepper.optimizer
    return torch.cat([optimizer.state[p]["exp_avg"].flatten() / 0.1 for p in learner.policy_stepper.parameters])


def learn(rank: int, world: int, seed: int) -> Tensor:
    torch.set_num_threads(1)
    config = replace(CONFIG, minibatches=1, optimizer=OptimizerConfig(max_grad_norm=1e9), seed=seed)
    learner = Learner(made("gemma3", seed), config, Accelerator(cpu=True))
    learner.update(collect(some_rollouts(5)[rank::world]))
    return moments(learner)


def worker(rank: int, port: int, folder: str) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in local.items()})
    # Only the first process has the right weights and adapters: the others must be given them.
    torch.save(learn(rank, 2, seed=rank), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_make_the_gradient_of_one(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    one = learn(0, 1, seed=0)
    for rank in range(2):
        two = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(two, one, atol=1e-5, rtol=0)


# --- plain weights ------------------------------------------------------------------------


@pytest.mark.slow
@FAMILIES
@KINDS
def test_a_saved_policy_loads_in_plain_transformers_and_says_the_same(
    family: str, how: AdaptConfig, tmp_path: Path
) -> None:
    learner = Learner(made(family), replace(CONFIG, adapt=how))
    learner.update(branches())
    ref = save(learner.policy, None, tmp_path / "m", 1, learner.weights())
    loaded, batch = AutoModelForCausalLM.from_pretrained(tmp_path / "m"), branches()
    torch.testing.assert_close(
        plain(loaded, batch).detach(), logprobs(learner.policy, batch.rows, CONFIG), atol=1e-5, rtol=0
    )
    assert weights_sha256(load_model(ref)) == ref.sha256


def test_merging_leaves_the_policy_as_it_was() -> None:
    learner = Learner(made("gemma3"), CONFIG)
    learner.update(branches())
    before = copied(learner.policy.state_dict())
    merged = merged_state_dict(learner.policy)
    assert not changed(before, learner.policy.state_dict())
    name = "model.layers.0.self_attn.q_proj"
    a_rM, b_Fr = (before[f"{name}.lora_{x}.default.weight"] for x in "AB")
    # alpha / rank = 16 / 4
    want = before[f"{name}.base_layer.weight"] + 4.0 * b_Fr @ a_rM
    torch.testing.assert_close(merged[f"{name}.weight"], want, atol=1e-7, rtol=0)
    assert merged.keys() == made("gemma3").state_dict().keys()


def test_the_weights_of_a_policy_without_adapters_are_its_own() -> None:
    model = made("qwen3")
    named = dict(model.named_parameters())
    assert all(x is named[name] for name, x in weights_of(model).items())
    assert merged_state_dict(model).keys() == model.state_dict().keys()


def test_adapters_are_never_saved_as_they_are(tmp_path: Path) -> None:
    learner = Learner(made("llama"), CONFIG)
    with pytest.raises(ValueError, match=r"base_layer\.weight is none of the model's, want the weights"):
        save(learner.policy, None, tmp_path / "m", 1)
    assert not (tmp_path / "m").exists()


# --- trainer state ------------------------------------------------------------------------


def test_the_state_holds_adapters_head_and_moments_and_nothing_else() -> None:
    learner = Learner(made("gemma3"), CONFIG)
    learner.update(branches())
    state = learner.state_dict()
    adapters = {n for n, _ in learner.policy.named_parameters() if ".lora_" in n}
    assert set(state["policy"]) == adapters
    assert set(state["critic"]) == {"weight", "bias"}
    steppers = [set(state[f"{x}_stepper"]["moments"]) for x in ("policy", "critic")]
    assert steppers == [{f"policy.{n}" for n in adapters} | {"value.weight", "value.bias"}, set()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@KINDS
def test_two_updates_are_one_update_a_save_a_load_and_one_update_bitwise(family: str, how: AdaptConfig) -> None:
    config = replace(CONFIG, adapt=how)
    through = Learner(made(family), config)
    through.update(branches())
    saved = io.BytesIO()
    torch.save(through.state_dict(), saved)
    through.update(branches())
    resumed = Learner(made(family), config)
    resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    resumed.update(branches())
    assert not changed(parameters(through), parameters(resumed))


@pytest.mark.parametrize(
    ("family", "seed", "how", "message"),
    [
        ("llama", 1, LORA, "the state stands on frozen weights '[0-9a-f]{12}', want '[0-9a-f]{12}'"),
        ("llama", 0, AdaptConfig(), "the state stands on frozen weights '[0-9a-f]{12}', want ''"),
        ("llama", 0, AdaptConfig("lora", rank=2), r"adapt: the state has \(4, 24\) for .*down_proj.*, want \(2, 24\)"),
        ("llama", 0, AdaptConfig("lora", targets=("q_proj",)), "the state stands on|has .* for .*, want nothing"),
    ],
)
def test_the_state_of_another_policy_is_refused(family: str, seed: int, how: AdaptConfig, message: str) -> None:
    state = Learner(made("llama"), CONFIG).state_dict()
    other = Learner(made(family, seed), replace(CONFIG, adapt=how))
    before = parameters(other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert not changed(before, parameters(other))


# --- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"kind": "some"}, "kind = 'some', want 'all', 'lora' or 'last_layers'"),
        ({"kind": "lora", "rank": 0}, "rank = 0, want at least 1"),
        ({"kind": "lora", "alpha": 0.0}, "alpha = 0.0, want a finite number above 0"),
        ({"kind": "lora", "targets": ("q", "q")}, r"targets = \('q', 'q'\), want each name once"),
        ({"kind": "last_layers", "layers": 0}, "layers = 0, want at least 1"),
        ({"rank": 4}, "rank = 4, want 8 with kind = 'all'"),
        ({"kind": "lora", "layers": 2}, "layers = 2, want 1 with kind = 'lora'"),
        ({"kind": "last_layers", "targets": ("q",)}, r"targets = \('q',\), want \(\) with kind = 'last_layers'"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^adapt: {line}"):
        AdaptConfig(**fields)


def test_what_does_not_fit_the_policy_is_refused_in_one_line() -> None:
    cases = [
        ("llama", AdaptConfig("lora", targets=("c_attn",)), "targets has 'c_attn', want linear layers .* k_proj"),
        ("llama", AdaptConfig("last_layers", layers=3), "layers = 3, want at most the 2 of the policy"),
        ("gpt2", AdaptConfig("lora"), "GPT2LMHeadModel has no linear layers"),
    ]
    for family, how, message in cases:
        with pytest.raises(ValueError, match=f"^adapt: {message}"):
            adapt(made(family), how, seed=0)


def test_a_policy_is_adapted_once() -> None:
    model = made("llama")
    adapt(model, LORA, seed=0)
    with pytest.raises(ValueError, match="frozen already"):
        adapt(model, LAST, seed=0)


# --- half precision -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_adapters_of_a_bf16_policy_are_float32_and_its_plain_weights_bf16(family: str) -> None:
    learner = Learner(made(family).bfloat16(), CONFIG)
    assert {p.dtype for p in learner.policy_stepper.parameters} == {torch.float32}
    before = parameters(learner)
    metrics = learner.update(branches())
    assert (metrics.policy_steps, metrics.skipped) == (2, 0)
    assert changed(before, parameters(learner))
    assert {x.dtype for x in learner.weights().values()} == {torch.bfloat16}


@pytest.mark.slow
def test_bf16_products_of_another_family_stay_near_those_of_float32() -> None:
    model = made("gemma3")
    batch = sampled_by(model, branches())
    metrics = Learner(model, replace(CONFIG, bf16=True)).update(batch)
    assert 0.0 < metrics.drift_mean < 0.05
    assert metrics.policy_steps == 2
