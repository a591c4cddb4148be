"""Distillation from several teachers: who counts where, both forms, and which teachers are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.folders import CheckpointError
from swarm.rl.batch import collect
from swarm.rl.distill import (
    DistillConfig,
    Teacher,
    TeacherStates,
    check_tokenizer,
    reverse_kl,
    routed_kl,
    sampled,
    teacher_states,
    weights_KR,
)
from swarm.rl.forward import hidden_states, log_policy
from swarm.rl.head import Head, head_of
from swarm.rl.rows import micro_batches
from tests.rl_cases import VOCAB, some_rollouts, tiny

P = Path("p")
HALVES = torch.tensor([[0.5], [0.5]])


def logs(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def distributions(*shape: int, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.log_softmax(-1)


# --- routing ------------------------------------------------------------------------------


def test_weights_are_shared_out_among_the_teachers_of_a_domain() -> None:
    teachers = [Teacher(P, 1.0, ("a", "b")), Teacher(P, 3.0, ("b",)), Teacher(P, 1.0, ("c",))]
    # b: 1 and 3 of 4; d: nobody.
    assert weights_KR(teachers, ["a", "b", "c", "d"]).tolist() == [
        [1.0, 0.25, 0.0, 0.0],
        [0.0, 0.75, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0],
    ]


def test_a_teacher_without_domains_is_for_all() -> None:
    assert weights_KR([Teacher(P), Teacher(P, 1.0, ("b",))], ["a", "b"]).tolist() == [[1.0, 0.5], [0.0, 0.5]]


def test_without_teachers_or_rollouts_there_are_no_weights() -> None:
    assert weights_KR([], ["a", "b"]).shape == (0, 2)
    assert weights_KR([Teacher(P)], []).shape == (1, 0)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.sets(st.sampled_from("abc"))), max_size=5),
    st.lists(st.sampled_from("abcd"), max_size=6),
)
def test_weights_sum_to_one_where_there_is_a_teacher_and_to_zero_elsewhere(
    given_: list[tuple[float, set[str]]], domains: list[str]
) -> None:
    teachers = [Teacher(P, w, tuple(sorted(d))) for w, d in given_]
    has = [float(any(not t.domains or d in t.domains for t in teachers)) for d in domains]
    assert weights_KR(teachers, domains).sum(0).tolist() == pytest.approx(has, abs=1e-6)


# --- the sampled token --------------------------------------------------------------------


def test_the_advantage_term_is_the_weighted_difference_of_log_probabilities() -> None:
    # ¼·(log ½ − log ¼) + ¾·(log ⅛ − log ¼) = ¼·log 2 − ¾·log 2 = −½·log 2
    teachers = logs((0.5,), (0.125,))
    term = sampled(teachers, logs((0.25,))[0], torch.tensor([[0.25], [0.75]]))
    assert term.tolist() == pytest.approx([-0.5 * math.log(2)])


def test_the_advantage_term_has_no_gradient() -> None:
    student = logs((0.25,))[0].requires_grad_()
    assert not sampled(logs((0.5,)), student, torch.ones(1, 1)).requires_grad


def test_a_teacher_that_says_the_same_teaches_nothing() -> None:
    logp = distributions(3, 7, seed=0)
    assert sampled(logp[None, :, 0], logp[:, 0], torch.ones(1, 3)).tolist() == [0.0] * 3
    assert reverse_kl(logp, logp[None], torch.ones(1, 3)).tolist() == pytest.approx([0.0] * 3, abs=1e-12)


def test_what_a_teacher_of_weight_zero_says_is_not_read() -> None:
    weight = torch.tensor([[1.0], [0.0]])
    said = torch.stack([distributions(4, seed=1), torch.full((4,), math.nan)])
    student = distributions(1, 4, seed=2).requires_grad_()
    assert sampled(said[:, :1], student[:, 0], weight).isfinite().all()
    loss = reverse_kl(student, said[:, None], weight)
    loss.sum().backward()
    assert student.grad is not None
    assert loss.isfinite().all()
    assert student.grad.isfinite().all()


def test_without_a_teacher_the_term_and_the_loss_are_zero() -> None:
    none = torch.zeros(2, 3)
    assert sampled(torch.zeros(2, 3), torch.full((3,), -1.0), none).tolist() == [0.0] * 3
    assert reverse_kl(distributions(3, 5, seed=0), distributions(2, 3, 5, seed=1), none).tolist() == [0.0] * 3


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(2, 9), st.integers(0, 99))
def test_the_expected_gradient_of_the_sampled_form_is_that_of_the_full_kl(teachers: int, vocab: int, seed: int) -> None:
    weight_K = torch.softmax(distributions(teachers, seed=seed), 0)
    said_KV = distributions(teachers, vocab, seed=seed + 1)
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    (full,) = torch.autograd.grad(reverse_kl(logp_V[None], said_KV[:, None], weight_K[:, None]).sum(), logits_V)
    # Every token once, as likely as the student has it: −Σ_a p(a)·term(a)·∇log p(a).
    logp_V = logits_V.log_softmax(-1)
    term_V = sampled(said_KV, logp_V, weight_K[:, None].expand(-1, vocab))
    (expected,) = torch.autograd.grad(-(logp_V.exp().detach() * term_V * logp_V).sum(), logits_V)
    torch.testing.assert_close(expected, full)


# --- the whole vocabulary -----------------------------------------------------------------


def test_the_loss_is_the_reverse_kl() -> None:
    # ½·log(½/¼) + ½·log(½/¾) = ½·log 2 + ½·log ⅔ = ½·log 4/3
    loss = reverse_kl(logs((0.5, 0.5)), logs((0.25, 0.75))[:, None], torch.ones(1, 1))
    assert loss.tolist() == pytest.approx([0.5 * math.log(4 / 3)])


def test_losses_are_mixed_and_not_probabilities() -> None:
    # Teachers (¼, ¾) and (¾, ¼): each is ½·log 4/3 away from (½, ½), whereas their mean is not away at all.
    loss = reverse_kl(logs((0.5, 0.5)), logs((0.25, 0.75), (0.75, 0.25))[:, None], HALVES)
    assert loss.tolist() == pytest.approx([0.5 * math.log(4 / 3)])


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(0, 99))
def test_the_loss_of_several_is_the_weighted_sum_of_the_loss_of_each(teachers: int, seed: int) -> None:
    student, said = distributions(3, 6, seed=seed), distributions(teachers, 3, 6, seed=seed + 1)
    weight = torch.rand(teachers, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kl_Kn = (student.exp() * (student - said)).sum(-1)
    torch.testing.assert_close(reverse_kl(student, said, weight), (weight * kl_Kn).sum(0))
    assert (kl_Kn >= 0).all()


# --- from hidden states -------------------------------------------------------------------


def two_teachers(budget: int) -> tuple[Any, list[TeacherStates], Tensor]:
    """A batch, two teachers for different rollouts of it (the second one for none of the last), and their weights."""
    batch = collect(some_rollouts(3))
    weight_KR = torch.tensor([[1.0, 0.25, 0.0], [0.0, 0.75, 0.0]])
    states = [
        teacher_states(tiny(seed), batch.rows, (w_R[batch.rollout_S] > 0).nonzero()[:, 0], budget)
        for seed, w_R in enumerate(weight_KR, start=1)
    ]
    return batch, states, weight_KR[:, batch.rollout_N]


def plainly(student: Any, micro: Any, weight_Kn: Tensor, temperature: float) -> Tensor:
    with torch.no_grad():
        said = torch.stack([log_policy(t, hidden_states(t, micro), temperature) for t in (tiny(1), tiny(2))])
    return reverse_kl(log_policy(student, hidden_states(student, micro), temperature), said, weight_Kn)


@pytest.mark.parametrize(("budget", "chunk", "temperature"), [(1, 3, 1.0), (999, 2, 0.7), (40, 999, 1.0)])
def test_the_loss_from_kept_hidden_states_is_that_of_whole_distributions(
    budget: int, chunk: int, temperature: float
) -> None:
    batch, states, weight_KN = two_teachers(budget)
    a, b = tiny(), tiny()
    (micro,) = micro_batches(batch.rows, torch.arange(len(batch.rows)), 9999)
    weight_Kn = weight_KN[:, micro.index_n]
    h_nd = hidden_states(a, micro)
    got = routed_kl(h_nd, head_of(a), states, weight_Kn, micro.index_n, temperature, chunk)
    want = plainly(b, micro, weight_Kn, temperature)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (got[batch.rollout_N[micro.index_n] == 2] == 0).all()
    got.sum().backward()
    want.sum().backward()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-4, rtol=1e-4)


def test_a_teacher_keeps_hidden_states_of_its_own_rollouts_alone() -> None:
    batch, (first, second), weight_KN = two_teachers(64)
    for states, weight_N in zip((first, second), weight_KN, strict=True):
        assert torch.equal(states.slot_N >= 0, weight_N > 0)
        assert sorted(states.slot_N[states.slot_N >= 0].tolist()) == list(range(len(states.hidden_Md)))
    assert len(second.hidden_Md) < len(first.hidden_Md) < len(batch)
    assert not first.hidden_Md.requires_grad


def test_the_policy_as_its_own_teacher_has_no_loss_and_no_gradient() -> None:
    batch, policy = collect(some_rollouts(2)), tiny()
    (micro,) = micro_batches(batch.rows, torch.arange(len(batch.rows)), 9999)
    states = teacher_states(policy, batch.rows, torch.arange(len(batch.rows)), 9999)
    h_nd = hidden_states(policy, micro)
    ones = torch.ones(1, len(micro.index_n))
    loss_n = routed_kl(h_nd, head_of(policy), [states], ones, micro.index_n)
    assert loss_n.abs().max() < 1e-5
    (grad,) = torch.autograd.grad(loss_n.sum(), h_nd)
    assert grad.abs().max() < 1e-5


def test_without_teachers_nothing_is_computed() -> None:
    none = routed_kl(torch.ones(3, 2), Head(torch.ones(VOCAB, 2)), [], torch.zeros(0, 3), torch.arange(3))
    assert none.tolist() == [0.0] * 3


# --- refusals -----------------------------------------------------------------------------


def folder(path: Path, *, size: int = 4, vocab: object = None, **added: int) -> Path:
    path.mkdir()
    tokens = {"a": 0, "b": 1, "c": 2} if vocab is None else vocab
    extra = [{"content": name, "id": k} for name, k in (added or {"end": 3}).items()]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": extra}))
    (path / "config.json").write_text(json.dumps({"vocab_size": size}))
    return path


def test_a_teacher_with_the_same_tokenizer_is_taken(tmp_path: Path) -> None:
    check_tokenizer(folder(tmp_path / "p"), folder(tmp_path / "t"))
    listed = folder(tmp_path / "listed", vocab=[["a", -1.0], ["b", -2.0], ["c", -3.0]])
    check_tokenizer(tmp_path / "p", listed)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vocab": {"a": 0, "b": 2, "c": 1}}, 'has 2 for token "b", want 1 as the policy'),
        ({"vocab": {"a": 0, "b": 1}}, 'has no id for token "c", want 2'),
        ({"vocab": {"a": 0, "b": 1, "c": 2, "d": 9}}, 'has 9 for token "d", want no id'),
        ({"stop": 3}, 'has no id for token "end", want 3'),
        ({"size": 8}, "has vocab_size = 8, want the policy's 4"),
        ({"vocab": 7}, "tokenizer.json: no vocabulary found, want model.vocab"),
    ],
)
def test_a_teacher_with_another_tokenizer_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError, match=line) as e:
        check_tokenizer(folder(tmp_path / "p"), folder(tmp_path / "t", **changes))
    assert "\n" not in str(e.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        check_tokenizer(folder(tmp_path / "p"), tmp_path / "t")


def test_the_shipped_checkpoints_have_one_tokenizer() -> None:
    root = Path(__file__).parents[1] / "subagents" / "checkpoints"
    check_tokenizer(root / "reader-1m", root / "sloppy-1m")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Teacher(P, 0.0), "weight = 0.0, want a finite number above 0"),
        (lambda: Teacher(P, math.nan), "weight = nan, want a finite number above 0"),
        (lambda: Teacher(P, 1.0, ("a", "a")), r"domains = \('a', 'a'\), want each domain once"),
        (lambda: DistillConfig(form="top"), "form = 'top', want 'advantage' or 'full'"),  # type: ignore[arg-type]
        (lambda: DistillConfig(coef=-1.0), "coef = -1.0, want a finite number above 0"),
    ],
)
def test_a_bad_setting_is_refused_with_its_field_and_value(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=f"^distill: {line}"):
        make()
