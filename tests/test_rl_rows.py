"""Rows that begin alike go through a model together, and learn what they would learn apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.rl.batch import collect
from swarm.rl.forward import hidden_states, log_chosen
from swarm.rl.rows import MicroBatch, Rows, micro_batches, rows_of
from swarm.rl.trees import Tree, cost, saving, trees_of
from swarm.types import Segment
from tests.rl_cases import VOCAB, prompt, rollout, said, seen, some_rollouts, tiny


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    learnt(fork(8, 2), True)


def some(n: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def fork(trunk: int, branches: int, own: int = 9) -> Rows:
    """Rows of one rollout that was forked: a prompt and a first turn in common, then answers of their own."""
    common = [prompt(*some(trunk - 3, 0)), said(*some(3, 1))]
    segments = [(*common, seen(*some(4, 2 + k)), said(*some(own - 4, 90 + k))) for k in range(branches)]
    return rows_of([Segment(s, "fork") for s in segments])


def everything(rows: Rows, share: bool, budget: int = 10**6) -> list[MicroBatch]:
    return micro_batches(rows, torch.arange(len(rows)), budget, share)


def learnt(rows: Rows, share: bool, budget: int = 10**6) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all action tokens, and the gradient of a weighted sum, all parameters in a row."""
    model, logp_N = tiny(), torch.zeros(len(rows.target_N))
    for m in everything(rows, share, budget):
        logp_n, _ = log_chosen(model, hidden_states(model, m), m.target_n)
        (logp_n * torch.linspace(-1, 1, len(logp_N))[m.index_n]).mean().backward()
        logp_N[m.index_n] = logp_n.detach()
    return logp_N, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_saving_of_a_fork_is_that_of_all_trunks_but_one() -> None:
    # C = 1000. A row of 200: 200 · 1100 = 220,000; a trunk of 100: 100 · 1050 = 105,000. Two of three are saved.
    assert cost(200) == 220_000
    assert saving([200, 200, 200], 100) == pytest.approx(2 * 105_000 / 660_000)


def test_rows_that_begin_alike_are_a_tree_and_others_stand_alone() -> None:
    rows = [[1, 2, 3, 4, 5], [9, 9], [1, 2, 3, 7, 7, 7], [1, 2, 3, 4, 6]]
    trees = trees_of([np.array(r) for r in rows], 100)
    # The trunk 1 2 3 of three rows saves 2 · 3 tokens, 1 2 3 4 of two rows 4.
    assert sorted(trees, key=lambda t: t.rows) == [Tree((0, 3, 2), 3), Tree((1,), 0)]


def test_two_long_trunks_are_better_than_a_short_one_for_all() -> None:
    a, b = [1, 2, *some(20, 0)], [1, 2, *some(20, 1)]
    trees = trees_of([np.array(r) for r in ([*a, 3], [*b, 3], [*a, 4], [*b, 4])], 100)
    assert {t.rows: t.trunk for t in trees} == {(0, 2): 22, (1, 3): 22}


def test_a_row_that_is_the_beginning_of_another_keeps_its_last_token() -> None:
    trees = trees_of([np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4, 5])], 100)
    assert [t.trunk for t in trees] == [3]


def test_a_saving_that_does_not_pay_is_let_go() -> None:
    # 1 token of 101: half a percent.
    rows = [np.array([0, *some(100, k)]) for k in (1, 2)]
    assert all(t.trunk == 0 for t in trees_of(rows, 1000))


@settings(max_examples=20)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6),
    most=st.integers(2, 30),
)
def test_no_other_cut_of_the_sorted_rows_saves_more(rows: list[list[int]], most: int) -> None:
    trees = trees_of([np.array(r) for r in rows], most)
    assert sorted(k for t in trees for k in t.rows) == list(range(len(rows)))
    for t in trees:
        assert all(len(rows[k]) > t.trunk for k in t.rows)
        assert len({tuple(rows[k][: t.trunk]) for k in t.rows}) == 1
        assert len(t.rows) == 1 or t.trunk + sum(len(rows[k]) - t.trunk for k in t.rows) <= most
    assert sum(gain(rows, t.rows) for t in trees) == pytest.approx(best_gain(sorted(rows), most))


def gain(rows: list[list[int]], members: tuple[int, ...]) -> float:
    return (len(members) - 1) * float(cost(common([rows[k] for k in members])))


def common(rows: list[list[int]]) -> int:
    trunk = 0
    while all(len(r) > trunk + 1 for r in rows) and len({r[trunk] for r in rows}) == 1:
        trunk += 1
    return trunk


def best_gain(rows: list[list[int]], most: int) -> float:
    """Every way to cut, tried."""
    found = 0.0
    for count in range(len(rows)):
        for cuts in combinations(range(1, len(rows)), count):
            bounds = [0, *cuts, len(rows)]
            parts = [list(range(a, b)) for a, b in pairwise(bounds)]
            sizes = [sum(len(rows[k]) for k in p) - (len(p) - 1) * common([rows[k] for k in p]) for p in parts]
            if all(len(p) == 1 or s <= most for p, s in zip(parts, sizes, strict=True)):
                found = max(found, sum(gain(rows, tuple(p)) for p in parts))
    return found


@pytest.mark.parametrize(("trunk", "branches"), [(5, 2), (16, 4), (70, 3)])
def test_a_fork_learns_what_its_rows_learn_apart(trunk: int, branches: int) -> None:
    rows = fork(trunk, branches)
    (shared,), (apart,) = everything(rows, True), everything(rows, False)
    assert len(apart.ids_T) - len(shared.ids_T) == (branches - 1) * trunk
    one, other = learnt(rows, True), learnt(rows, False)
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(one[1], other[1], atol=2e-6 * float(other[1].abs().max()), rtol=0)


def test_actions_in_the_trunk_are_read_for_every_row() -> None:
    rows = fork(20, 3)
    (m,) = everything(rows, True)
    assert len(m.index_n) == len(rows.target_N) == 3 * (3 + 5)
    # The first turn's three tokens are predicted from the last prompt token on, for each row in the same place.
    assert m.read_n.reshape(3, 8)[:, :3].tolist() == [[16, 17, 18]] * 3
    # Positions in the pack: a trunk of 20, branches of 9 whose last 5 are actions.
    assert m.read_n.reshape(3, 8)[:, 3:].tolist() == [list(range(20 + 9 * k + 3, 20 + 9 * k + 8)) for k in range(3)]


@pytest.mark.parametrize("budget", [1, 25, 10**6])
def test_shared_or_not_every_action_is_there_once_with_its_history(budget: int) -> None:
    rollouts = [*some_rollouts(5), rollout([prompt(*some(9, 5)), said(1, 2), seen(3)], [prompt(*some(9, 5)), said(4)])]
    rows = collect(rollouts).rows
    micros = everything(rows, True, budget)
    assert sorted(torch.cat([m.index_n for m in micros]).tolist()) == list(range(len(rows.target_N)))
    for m in micros:
        assert len(m.ids_T) == sum(m.lengths)
        assert len(m.ids_T) <= budget or len(m.lengths) == 1
        for read, index in zip(m.read_n.tolist(), m.index_n.tolist(), strict=True):
            s = int((rows.first_S <= index).nonzero().max())
            row = rows.ids_L[rows.start_S[s] : rows.start_S[s] + rows.position_N[index]]
            assert history(m, read) == row.tolist()


def history(m: MicroBatch, read: int) -> list[int]:
    """What the model sees when it is read at this place of the pack."""
    starts = np.cumsum([0, *m.lengths])
    g = int(np.searchsorted(starts, read, side="right")) - 1
    before = m.ids_T[starts[m.after[g]] : starts[m.after[g] + 1]].tolist() if m.after[g] >= 0 else []
    return before + m.ids_T[starts[g] : read + 1].tolist()


def test_log_probabilities_and_gradients_do_not_depend_on_the_budget() -> None:
    rows = collect(some_rollouts(6)).rows
    whole = learnt(rows, True)
    for budget in (1, 40):
        part = learnt(rows, True, budget)
        torch.testing.assert_close(part[0], whole[0], atol=1e-5, rtol=0)
