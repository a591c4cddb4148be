"""The backward passes: worked and published numbers, ends of chains, speed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from swarm.rl.gae import chained_gae, decay_after, first_out_of_order, gae, last_of


def doubles(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def ints(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.long)


def test_three_tokens_worked_out_by_hand() -> None:
    # d = .5, λ = .5: δ = (.5·.4 − .2, .5·.6 − .4, 1 − .6) = (0, −.1, .4); A₃ = .4, A₂ = −.1 + .25·.4, A₁ = 0 + .25·0
    half = doubles(0.5, 0.5, 0.5)
    got = gae(doubles(0, 0, 1), doubles(0.2, 0.4, 0.6), ints(0, 0, 0), doubles(0), half, half)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.4])


def test_discount_and_lambda_are_those_of_the_token_that_looks_ahead() -> None:
    # δ₃ = 1 − .6 = .4; δ₂ = .5·.6 − .4 = −.1, A₂ = −.1 + .5·.8·.4 = .06; δ₁ = .9·.4 − .2 = .16, A₁ = .16 + .9·.5·.06
    got = gae(
        doubles(0, 0, 1),
        doubles(0.2, 0.4, 0.6),
        ints(0, 0, 0),
        doubles(0),
        doubles(0.9, 0.5, 0.7),
        doubles(0.5, 0.8, 0),
    )
    assert got.tolist() == pytest.approx([0.187, 0.06, 0.4])


def test_a_cut_chain_looks_at_the_value_after_the_cut_and_a_terminated_one_at_nothing() -> None:
    # One token each, V = .5: terminated δ = 0 − .5; cut with V(after) = .8 and d = .5: δ = .4 − .5
    got = gae(doubles(0, 0), doubles(0.5, 0.5), ints(0, 1), doubles(0, 0.8), doubles(0.5, 0.5), doubles(0.9, 0.9))
    assert got.tolist() == pytest.approx([-0.5, -0.1])


def test_a_chain_without_tokens_changes_nothing() -> None:
    # Chain 1 has none: chain 0 is 1 − .3, chain 2 is 1 + .2 − .4.
    one = doubles(1, 1)
    got = gae(one, doubles(0.3, 0.4), ints(0, 2), doubles(0, 9, 0.2), one, one)
    assert got.tolist() == pytest.approx([0.7, 0.8])


def test_what_is_not_a_number_stays_in_its_chain() -> None:
    one = doubles(1, 1, 1)
    got = gae(one, doubles(0.3, 0.4, torch.nan), ints(0, 0, 1), doubles(0, torch.inf), one, one)
    # 1 + .4 − .3 = 1.1, and 1 − .4 = .6 after it
    assert got[:2].tolist() == pytest.approx([1.7, 0.6])


# Published vectors: google-deepmind/rlax, rlax/_src/multistep_test.py. Two rows of five steps, a value behind each.

RLAX_GAE = {
    1.0: [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]],
    0.7: [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]],
    0.4: [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]],
}


@pytest.mark.parametrize("lam", RLAX_GAE)
def test_advantages_are_those_of_rlax(lam: float) -> None:
    reward_BT = torch.tensor([[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]], dtype=torch.float64)
    value_BT = torch.tensor([[1, 4, -3, -2, -1], [-3, -2, -1, 0, 5]], dtype=torch.float64)
    discount_BT = torch.tensor([[0.99] * 5, [0.9, 0.9, 0.9, 0.0, 0.9]], dtype=torch.float64)
    chain_N = torch.arange(2).repeat_interleave(5)
    lam_N = torch.full((10,), lam, dtype=torch.float64)
    got = gae(reward_BT.flatten(), value_BT.flatten(), chain_N, doubles(-1, -1), discount_BT.flatten(), lam_N)
    # Their own tolerance: some of their numbers are rounded.
    assert got.tolist() == pytest.approx([x for row in RLAX_GAE[lam] for x in row], abs=1e-3)


def test_advantage_and_value_make_the_lambda_return_of_rlax() -> None:
    reward_BT = torch.tensor([[1, 0, -1, 0, 1], [0.5, 0.8, -0.7, 0, 2.1]], dtype=torch.float64)
    discount_BT = torch.tensor([[0.5, 0.9, 1.0, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]], dtype=torch.float64)
    # They give the values that come next; the first one cancels out.
    value_BT = torch.tensor([[0.123, 3, 1, 5, -5], [0.456, -1.7, 1.2, 2.3, 2.2]], dtype=torch.float64)
    chain_N, lam_N = torch.arange(2).repeat_interleave(5), torch.full((10,), 0.75, dtype=torch.float64)
    got = gae(reward_BT.flatten(), value_BT.flatten(), chain_N, doubles(3, 2.7), discount_BT.flatten(), lam_N)
    want = [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4, 0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]
    assert (got + value_BT.flatten()).tolist() == pytest.approx(want, rel=1e-5)


def test_the_decay_has_a_factor_for_each_token_in_later_segments() -> None:
    # Rollout 0: segments of 2, 1 and 2 tokens, so 3, 2 and 0 tokens follow. Rollout 1: one segment.
    got = decay_after(torch.full((6,), 0.5, dtype=torch.float64), ints(0, 0, 1, 2, 2, 3), ints(0, 0, 0, 0, 0, 1))
    assert got.tolist() == [0.125, 0.125, 0.25, 1.0, 1.0, 1.0]


def test_the_decay_takes_the_weights_between_a_segment_end_and_the_last_token() -> None:
    # Segment 0 ends at token 1: .3·.5·.7; segment 1 at token 2: .5·.7.
    got = decay_after(doubles(9, 0.3, 0.5, 0.7, 9), ints(0, 0, 1, 2, 2), ints(0, 0, 0, 0, 0))
    assert got.tolist() == pytest.approx([0.105, 0.105, 0.35, 1.0, 1.0])


def test_one_discount_and_one_lambda_can_stand_for_all_tokens() -> None:
    half = doubles(0.5, 0.5)
    want = gae(doubles(0, 1), doubles(0.2, 0.4), ints(0, 0), doubles(0.3), half, half)
    got = chained_gae(doubles(0, 1), doubles(0.2, 0.4), doubles(0.3), ints(0, 0), 0.5, 0.5)
    assert got.tolist() == want.tolist()


def test_no_tokens_give_no_advantages() -> None:
    none = doubles()
    assert len(gae(none, none, ints(), none, none, none)) == 0
    assert len(decay_after(none, ints(), ints())) == 0


def test_the_last_token_of_each_run_is_marked() -> None:
    assert last_of(ints(0, 0, 2, 2, 2, 5)).tolist() == [False, True, False, False, True, True]


def test_unequal_lengths_are_refused() -> None:
    two = doubles(1, 1)
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\).*want one shape \[N\]"):
        gae(two, doubles(1, 1, 1), ints(0, 0), doubles(0), two, two)


@pytest.mark.parametrize(("chain", "bad"), [((0, 2), "1] = 2"), ((-1, 0), "0] = -1"), ((1, 0), "0] = 1")])
def test_a_chain_index_outside_or_falling_is_refused(chain: tuple[int, int], bad: str) -> None:
    two = doubles(1, 1)
    with pytest.raises(ValueError, match=f"chain_N.{bad}, want 0 to 1 and never falling"):
        gae(two, two, ints(*chain), two, two, two)


@pytest.mark.parametrize(
    ("rollout", "segment", "turn", "bad"),
    [
        ((0, 0, 1), (0, 1, 2), (0, 1, 0), -1),
        ((0, 2, 2), (0, 1, 2), (0, 0, 0), 1),
        ((1, 1, 0), (0, 1, 2), (0, 0, 0), 2),
        ((0, 0, 1), (1, 0, 2), (0, 0, 0), 1),
        ((0, 0, 1), (0, 1, 1), (0, 0, 0), 2),
        ((0, 0, 1), (0, 0, 1), (1, 0, 0), 1),
        ((0, 0, 1), (-1, 0, 1), (0, 0, 0), 0),
    ],
)
def test_the_first_token_out_of_order_is_found(
    rollout: tuple[int, ...], segment: tuple[int, ...], turn: tuple[int, ...], bad: int
) -> None:
    assert first_out_of_order(ints(*rollout), ints(*segment), ints(*turn), 2) == bad


@pytest.mark.slow
def test_64k_tokens_in_500_chains_take_at_most_two_and_a_half_milliseconds() -> None:
    count = 65536
    generator = torch.Generator().manual_seed(0)
    chain_N = torch.randint(0, 500, (count,), generator=generator).sort().values
    value_N, reward_N = torch.rand(2, count, generator=generator, dtype=torch.float64)
    some_N, after_C = torch.full((count,), 0.99, dtype=torch.float64), torch.zeros(500, dtype=torch.float64)
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        gae(reward_N, value_N, chain_N, after_C, some_N, some_N)
        best = min(best, time.perf_counter() - started)
    assert best <= 2.5e-3
