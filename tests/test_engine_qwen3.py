"""The training forward and the engine's incremental forward against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from swarm.engine.qwen3 import Shape, hidden, logits, shape_of, weights_of
from swarm.engine.ragged import Stepper, empty_cache, fuse, rows_of
from tests.engine_cases import VOCAB, compile_kernels, tiny


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_kernels()


def forward(model: Qwen3ForCausalLM, documents: list[list[int]]) -> list[torch.Tensor]:
    w, lengths = weights_of(model), [len(d) for d in documents]
    h = hidden(w, shape_of(model.config), torch.tensor([i for d in documents for i in d]), lengths)
    return list(logits(w, h).split(lengths))


def reference(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def document(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_packed_documents_have_the_logits_of_transformers(tied: bool):
    model = tiny(tied=tied)
    documents = [document(0, 5), document(1, 17), document(2, 17), document(3, 40)]
    for got, ids in zip(forward(model, documents), documents, strict=True):
        torch.testing.assert_close(got, reference(model, ids), atol=1e-5, rtol=0)


def test_a_document_does_not_see_its_neighbours():
    model, a, b = tiny(), document(0, 9), document(1, 12)
    other = [(i + 1) % VOCAB for i in a]
    assert torch.equal(forward(model, [a, b])[1], forward(model, [other, b])[1])


def test_gradients_arrive_at_the_modules_own_parameters_as_transformers_would_have_them():
    model, ids = tiny(), document(0, 20)
    forward(model, [ids])[0].square().mean().backward()
    got = {k: p.grad for k, p in model.named_parameters()}
    model.zero_grad()
    model(torch.tensor([ids])).logits[0].square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-5, rtol=1e-4)


def test_lengths_that_do_not_add_up_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="lengths add up to 3, want 4"):
        hidden(weights_of(model), shape_of(model.config), torch.zeros(4, dtype=torch.long), [1, 2])


def test_a_variant_that_is_not_built_is_refused():
    config = tiny().config
    config.attention_bias = True
    with pytest.raises(ValueError, match="attention_bias = True, want False"):
        shape_of(config)


@pytest.mark.parametrize(("heads", "head_dim", "tied"), [(4, 16, True), (2, 32, False), (6, 48, True)])
def test_prefill_in_chunks_and_decode_have_the_logits_of_transformers(heads: int, head_dim: int, tied: bool):
    model = tiny(heads=heads, head_dim=head_dim, tied=tied)
    shape, ids = shape_of(model.config), document(0, 75)
    want = reference(model, ids).numpy()
    weights, cache, step = fuse(weights_of(model), shape, 128), empty_cache(shape, 8), Stepper(shape, 64)
    start = 0
    with torch.inference_mode():
        for size in (31, 1, 1, 30, 1, 1, 10):
            got = step.logits(weights, cache, rows_of([ids[start : start + size]], [start], [[5, 2, 7]]))
            start += size
            np.testing.assert_allclose(got[0], want[start - 1], atol=1e-5, rtol=0)


def test_a_batch_of_prefills_and_decodes_has_the_logits_of_each_alone():
    model = tiny()
    shape, a, b = shape_of(model.config), document(0, 40), document(1, 33)
    weights, cache, step = fuse(weights_of(model), shape, 128), empty_cache(shape, 8), Stepper(shape, 128)
    with torch.inference_mode():
        step.logits(weights, cache, rows_of([a[:39]], [0], [[3, 4]]))
        both = step.logits(weights, cache, rows_of([a[39:], b], [39, 0], [[3, 4], [1, 0]]))
    np.testing.assert_allclose(both[0], reference(model, a)[-1].numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(both[1], reference(model, b)[-1].numpy(), atol=1e-5, rtol=0)


def test_query_heads_have_to_be_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match="heads = 3, want a multiple of kv_heads = 2"):
        Shape(layers=1, hidden=8, heads=3, kv_heads=2, head_dim=16, ffn=8, vocab=8, eps=1e-6, theta=1e4)


def test_under_bf16_autocast_the_head_stays_in_fp32():
    model, ids = tiny(), document(0, 20)
    with torch.autocast("cpu", torch.bfloat16):
        got = forward(model, [ids])[0]
    assert got.dtype == torch.float32
    # Eight bits of significand through two layers, on logits of size 3.
    torch.testing.assert_close(got, reference(model, ids), atol=0.2, rtol=0)
