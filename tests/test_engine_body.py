"""The fused training forward against the plain one and transformers' own, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import Qwen3ForCausalLM

from swarm.engine.body import hidden_at
from swarm.engine.qwen3 import hidden, shape_of, weights_of
from tests.engine_cases import VOCAB, tiny

LENGTHS = (70, 33, 33, 17, 16, 5, 1)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    whole(tiny(), ids_of((3,)), (3,)).sum().backward()


@pytest.fixture(params=[1, 2], ids=["1 core", "2 cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def ids_of(lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def whole(
    model: Qwen3ForCausalLM,
    ids_T: torch.Tensor,
    lengths: Sequence[int],
    after: Sequence[int] | None = None,
    half: bool = False,
) -> torch.Tensor:
    """Read at every position."""
    after = [-1] * len(lengths) if after is None else after
    return hidden_at(weights_of(model), shape_of(model.config), ids_T, lengths, after, torch.arange(len(ids_T)), half)


def gradients(model: Qwen3ForCausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], part: float) -> None:
    """Each gradient to a part of its largest entry."""
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=part * float(want[name].abs().max()), rtol=0, msg=name)


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (2, 32), (6, 48), (4, 8)])
def test_packed_rows_are_those_of_transformers_one_by_one(heads: int, head_dim: int, cores: int) -> None:
    model, ids_T = tiny(heads=heads, head_dim=head_dim), ids_of(LENGTHS)
    with torch.no_grad():
        rows = [model.model(row[None]).last_hidden_state[0] for row in ids_T.split(LENGTHS)]
        torch.testing.assert_close(whole(model, ids_T, LENGTHS), torch.cat(rows), atol=1e-5, rtol=0)


def test_packed_rows_are_those_of_transformers_padded() -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(list(ids_T.split(LENGTHS)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in LENGTHS], batch_first=True)
    with torch.no_grad():
        h = model.model(padded, attention_mask=mask).last_hidden_state
        want = torch.cat([row[:n] for row, n in zip(h, LENGTHS, strict=True)])
        torch.testing.assert_close(whole(model, ids_T, LENGTHS), want, atol=1e-5, rtol=0)


def test_gradients_are_those_of_transformers(cores: int) -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    weight = torch.randn(len(ids_T), 32, generator=torch.Generator().manual_seed(1))
    got = gradients(model, (whole(model, ids_T, LENGTHS) * weight).sum())
    rows = [model.model(row[None]).last_hidden_state[0] for row in ids_T.split(LENGTHS)]
    assert_near(got, gradients(model, (torch.cat(rows) * weight).sum()), 1e-5)


def test_reading_some_positions_is_reading_all_and_choosing(cores: int) -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    # Out of order, one twice, none in the last documents.
    read_n = torch.tensor([40, 3, 69, 3, 104])
    shape = shape_of(model.config)
    some = hidden_at(weights_of(model), shape, ids_T, LENGTHS, [-1] * len(LENGTHS), read_n)
    everywhere = whole(model, ids_T, LENGTHS)[read_n]
    torch.testing.assert_close(some, everywhere, atol=1e-6, rtol=1e-6)
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    assert_near(gradients(model, (some * weight).sum()), gradients(model, (everywhere * weight).sum()), 1e-6)


def test_another_document_leaves_a_document_bitwise_the_same(cores: int) -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    other_T = ids_T.clone()
    other_T[:70] = (other_T[:70] + 1) % VOCAB
    one, two = (whole(model, x, LENGTHS) for x in (ids_T, other_T))
    assert torch.equal(one[70:], two[70:])
    assert not torch.equal(one[:70], two[:70])


def test_positions_begin_again_in_every_document() -> None:
    model, ids_T = tiny(), ids_of((20,)).repeat(2)
    first, second = whole(model, ids_T, (20, 20)).split(20)
    assert torch.equal(first, second)


def test_a_later_token_changes_nothing_before_it() -> None:
    model, ids_T = tiny(), ids_of((50,))
    other_T = ids_T.clone()
    other_T[30] = (other_T[30] + 1) % VOCAB
    assert torch.equal(whole(model, ids_T, (50,))[:30], whole(model, other_T, (50,))[:30])


def separate(model: Qwen3ForCausalLM, trunk: torch.Tensor, branches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The trunk once, then what each branch gives when it goes through the model with the trunk before it."""
    rows = [whole(model, torch.cat([trunk, b]), (len(trunk) + len(b),)) for b in branches]
    return torch.cat([rows[0][: len(trunk)], *(row[len(trunk) :] for row in rows)])


@pytest.mark.parametrize("trunk", [1, 16, 45])
def test_branches_of_a_common_trunk_are_the_rows_computed_apart(trunk: int, cores: int) -> None:
    model, lengths = tiny(), (trunk, 20, 33, 7)
    ids_T, alone = ids_of(lengths), ids_of((30,), seed=2)
    first, *branches = ids_T.split(lengths)
    weight = torch.randn(len(ids_T), 32, generator=torch.Generator().manual_seed(1))
    packed = whole(model, torch.cat([ids_T, alone]), (*lengths, 30), (-1, 0, 0, 0, -1))[: len(ids_T)]
    apart = separate(model, first, branches)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=0)
    assert_near(gradients(model, (packed * weight).sum()), gradients(model, (apart * weight).sum()), 2e-6)


def test_the_plain_forward_branches_too() -> None:
    model, lengths, after = tiny(), (16, 20, 3, 9), (-1, 0, 0, -1)
    ids_T = ids_of(lengths)
    with torch.no_grad():
        plain = hidden(weights_of(model), shape_of(model.config), ids_T, lengths, after)
        torch.testing.assert_close(whole(model, ids_T, lengths, after), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["self_attn.q_norm", "self_attn.v_proj", "mlp.up_proj", "input_layernorm"])
def test_a_weight_that_is_not_a_number_reaches_the_hidden_states(name: str) -> None:
    model, ids_T = tiny(), ids_of((20,))
    with torch.no_grad():
        model.get_parameter(f"model.layers.0.{name}.weight").view(-1)[3] = torch.nan
        assert whole(model, ids_T, (20,)).isnan().any(dim=1).all()


def test_half_precision_products_stay_near() -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    got, want = whole(model, ids_T, LENGTHS, half=True), whole(model, ids_T, LENGTHS)
    assert got.dtype == torch.float32
    # Eight bits of significand through two layers, on normed rows of size 1.
    torch.testing.assert_close(got, want, atol=0.2, rtol=0)
    assert_near(gradients(model, got.square().mean()), gradients(model, want.square().mean()), 0.1)


def test_a_frozen_weight_gets_no_gradient(cores: int) -> None:
    model, ids_T = tiny(), ids_of(LENGTHS)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.get_parameter("model.layers.0.mlp.down_proj.weight").requires_grad_(False)
    got = gradients(model, whole(model, ids_T, LENGTHS).sum())
    assert len(got) == len(list(model.parameters())) - 2


@pytest.mark.parametrize(
    ("after", "message"),
    [((-1, 1, -1), r"after\[1\] = 1, want -1 or 0"), ((-1, -1, 0), r"after\[2\] = 0, want -1 or 1"), ((-1,), "want 3")],
)
def test_a_branch_away_from_its_trunk_is_refused(after: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whole(tiny(), ids_of((3, 3, 3)), (3, 3, 3), after)
