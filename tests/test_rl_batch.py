"""From rollouts to rows and flat action tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm.rl.batch import collect
from swarm.rl.rows import ends_of, micro_batches, rows_of
from swarm.types import Trace
from tests.rl_cases import prompt, rollout, said, seen, some_rollouts


def test_only_sampled_ids_are_actions_and_they_keep_their_place_and_logprob() -> None:
    batch = collect([rollout([prompt(1, 2), said(3, 4, logprob=-0.5, version=7), seen(5), said(6)])])
    assert batch.rows.ids_L.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.rows.target_N.tolist() == [3, 4, 6]
    assert batch.rows.position_N.tolist() == [2, 3, 5]
    assert batch.logp_rollout_N.tolist() == [-0.5, -0.5, -1.0]
    assert batch.version_N.tolist() == [7, 7, 0]


def test_turns_count_through_segments_and_touching_sampled_spans_are_one_turn() -> None:
    one = rollout([prompt(1), said(2), said(3, version=1), seen(4), said(5)], [prompt(6), said(7)])
    batch = collect([one, one])
    assert batch.turn_N.tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert batch.segment_N.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert batch.rollout_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_what_cannot_be_learnt_from_is_left_out_and_counted() -> None:
    fine = rollout([prompt(1), said(2)])
    failed_child = replace(fine, children=(replace(fine, trace=Trace("main/0:a", (), "error", "engine")),))
    batch = collect([
        fine,
        failed_child,
        rollout([prompt(1), said(2)], status="error"),
        rollout([prompt(1), said(2)], reward=None),
        rollout([prompt(1), said(2)], status="running"),
        rollout([prompt(1)]),
    ])  # fmt: skip
    assert len(batch) == 1
    assert batch.left_out == {"failed": 2, "unrewarded": 1, "running": 1, "no_action": 1}


def test_a_truncated_rollout_is_bootstrapped_without_its_reward_or_left_out_as_asked() -> None:
    cut = rollout([prompt(1), said(2)], [prompt(3), said(4), seen(5)], reward=0.7, status="truncated")
    batch = collect([rollout([prompt(1), said(2)]), cut])
    assert batch.reward_R.tolist() == [1.0, 0.0]
    assert batch.cut_row_R.tolist() == [-1, 2]
    assert collect([cut], truncated="leave_out").left_out == {"truncated": 1}


def test_the_actions_of_subagents_are_not_trained() -> None:
    child = rollout([prompt(8), said(9)])
    assert collect([replace(rollout([prompt(1), said(2)]), children=(child,))]).rows.target_N.tolist() == [2]


def test_a_reward_or_logprob_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="reward = nan, want a finite number"):
        collect([rollout([prompt(1), said(2)], reward=float("nan"))])
    with pytest.raises(ValueError, match="log-probability that is not finite"):
        collect([rollout([prompt(1), said(2, logprob=float("nan"))])])


def test_a_segment_that_begins_with_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match="want a prompt before it"):
        collect([rollout([said(1)])])


def test_no_rollouts_make_an_empty_batch() -> None:
    assert len(collect([])) == 0


@pytest.mark.parametrize("budget", [1, 20, 10**6])
def test_micro_batches_hold_every_action_once_where_it_is_predicted(budget: int) -> None:
    batch = collect(some_rollouts(7))
    micros = micro_batches(batch.rows, torch.arange(len(batch.rows)), budget)
    index_N = torch.cat([m.index_n for m in micros])
    assert sorted(index_N.tolist()) == list(range(len(batch)))
    for m in micros:
        assert m.ids_T[m.read_n + 1].tolist() == m.target_n.tolist() == batch.rows.target_N[m.index_n].tolist()
        assert len(m.ids_T) == sum(m.lengths)
        assert len(m.ids_T) <= budget or len(m.lengths) == 1


def test_a_row_without_actions_is_not_sent_through_the_model() -> None:
    rows = rows_of(rollout([prompt(1, 2), seen(3)], [prompt(4), said(5)]).trace.segments)
    (micro,) = micro_batches(rows, torch.arange(2), 100)
    assert micro.ids_T.tolist() == [4, 5]


def test_the_end_of_a_row_is_read_after_its_last_observation() -> None:
    rows = rows_of(rollout([prompt(1, 2), said(3)], [prompt(4), said(5), seen(6)]).trace.segments)
    (micro,) = micro_batches(ends_of(rows, torch.tensor([1])), torch.arange(1), 100)
    assert micro.ids_T.tolist() == [4, 5, 6]
    assert micro.read_n.tolist() == [2]
