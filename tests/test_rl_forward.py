"""Log-probabilities of the chosen ids without the whole distribution, against the whole distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.rl.forward import chosen, log_chosen, log_policy
from swarm.rl.losses import entropy
from tests.rl_cases import VOCAB, tiny


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    model, (h_nd, target_n) = tiny(), some(2)
    log_chosen(model, h_nd, target_n)[0].sum().backward()


def some(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 16, generator=g).requires_grad_(), torch.randint(0, VOCAB, (n,), generator=g)


def test_two_equal_logits_give_ln_2_of_each() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(-100.0)
        # h = (1, 0, …): ids 0 and 1 have the logit 0, all others −100, so p = ½, ½ and H = ln 2.
        model.model.embed_tokens.weight[:2] = 0.0
    logp_n, entropy_n = log_chosen(model, torch.eye(1, 16), torch.tensor([1]), with_entropy=True)
    torch.testing.assert_close(logp_n, torch.tensor([-math.log(2)]))
    torch.testing.assert_close(entropy_n, torch.tensor([math.log(2)]))


@settings(max_examples=12)
@given(
    n=st.integers(1, 9), chunk=st.integers(1, 10), temperature=st.sampled_from([0.5, 1.0, 1.7]), entropic=st.booleans()
)
def test_values_and_gradients_are_those_of_the_whole_distribution(
    n: int, chunk: int, temperature: float, entropic: bool
) -> None:
    model, (h_nd, target_n) = tiny(), some(n)
    head, weight_n = model.model.embed_tokens.weight, torch.linspace(-1, 2, n)
    whole_nV = log_policy(model, h_nd, temperature)
    want = (chosen(whole_nV, target_n), entropy(whole_nV) if entropic else torch.zeros(n))
    got = log_chosen(model, h_nd, target_n, temperature, entropic, chunk)
    for x_n, y_n in zip(got, want, strict=True):
        torch.testing.assert_close(x_n, y_n, atol=2e-6, rtol=1e-6)
    losses = [(x_n * weight_n - 0.3 * y_n).sum() for x_n, y_n in (got, want)]
    gradients = [torch.autograd.grad(loss, (h_nd, head)) for loss in losses]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=5e-6, rtol=1e-5)


def test_an_entropy_that_is_only_measured_leaves_the_gradient_alone() -> None:
    model, (h_nd, target_n) = tiny(), some(5)
    alone = torch.autograd.grad(log_chosen(model, h_nd, target_n)[0].sum(), h_nd)[0]
    logp_n, entropy_n = log_chosen(model, h_nd, target_n, with_entropy=True)
    beside = torch.autograd.grad((logp_n + 0 * entropy_n.detach()).sum(), h_nd)[0]
    assert torch.equal(alone, beside)


def test_two_cores_give_what_one_gives() -> None:
    model, (h_nd, target_n) = tiny(), some(200)
    found: list[tuple[torch.Tensor, ...]] = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        logp_n, entropy_n = log_chosen(model, h_nd, target_n, 0.7, with_entropy=True)
        loss = (logp_n * torch.linspace(-1, 2, 200) - 0.3 * entropy_n).sum()
        found.append((logp_n, entropy_n, *torch.autograd.grad(loss, (h_nd, model.model.embed_tokens.weight))))
    torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-5)


def test_a_loss_of_the_entropy_alone_has_its_gradient() -> None:
    model, (h_nd, target_n) = tiny(), some(5)
    got = torch.autograd.grad(log_chosen(model, h_nd, target_n, with_entropy=True)[1].sum(), h_nd)[0]
    want = torch.autograd.grad(entropy(log_policy(model, h_nd)).sum(), h_nd)[0]
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)


def test_no_tensor_for_the_backward_is_larger_than_a_chunk() -> None:
    model, (h_nd, target_n) = tiny(), some(12)
    kept: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        log_chosen(model, h_nd, target_n, with_entropy=True, chunk=4)
    # Hidden states 12 x 16, the head 40 x 16, and no logits 12 x 40.
    assert max(kept) == VOCAB * 16


def test_a_chunk_of_no_rows_is_refused() -> None:
    model, (h_nd, target_n) = tiny(), some(2)
    with pytest.raises(ValueError, match="chunk = 0, want at least 1 row"):
        log_chosen(model, h_nd, target_n, chunk=0)


def test_a_logit_that_is_not_a_number_reaches_every_log_probability() -> None:
    model, (h_nd, target_n) = tiny(), some(4)
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 0] = torch.nan
    logp_n, entropy_n = log_chosen(model, h_nd, target_n, with_entropy=True)
    assert logp_n.isnan().all()
    assert entropy_n.isnan().all()
