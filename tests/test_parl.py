"""The PARL reward on rollouts whose numbers are worked out by hand."""

from dataclasses import replace

import pytest

from rewards.parl import ParlConfig, parallelism, parl, spawning
from swarm.types import Ledger, Rollout, Stage, Status, Table, Task, Trace

TASK = Task("t", "q", "s", "airport", ("airport", "elevation"), (("A", "1"), ("B", "2"), ("C", "3")))


def child(table: Table = (), status: Status = "answered") -> Rollout:
    return Rollout(TASK, Trace("main/0:a", (), status), Ledger((Stage(2),)), table=table)


def root(*stages: Stage, children: tuple[Rollout, ...] = (), **counts: int) -> Rollout:
    return Rollout(TASK, Trace("main", (), "answered"), Ledger(stages, counts=counts), children=children)


def test_critical_steps_charge_the_slowest_child_and_total_steps_all():
    assert Stage(1, (3, 5, 2)).critical_steps == 6
    rollout = root(Stage(1), Stage(1, (2, 2)), Stage(3), children=(child(), child()))
    assert (rollout.ledger.critical_steps, rollout.total_steps) == (1 + 3 + 3, 5 + 4)


def test_only_spawns_that_return_something_new_and_needed_are_useful():
    children = (child((("A", "1"),)), child((("a ", "9"),)), child((("X", "0"),)), child((("B", "2"), ("C", "3"))))
    spawned = spawning(root(Stage(1, (2, 2, 2, 2)), children=children, duplicate_assignment=1))
    assert (spawned.assigned, spawned.useful, spawned.width, spawned.refused) == (5, 2, 4, 1)
    assert spawned.finish_rate == pytest.approx(0.4)
    assert spawned.spurious_rate == pytest.approx(0.6)


def test_serial_spawns_are_not_paid_as_parallel_ones_and_refused_ones_not_at_all():
    serial = root(Stage(1, (2,)), Stage(1, (2,)), children=(child(), child()))
    refused = root(Stage(1), unknown_agent=9)
    assert spawning(serial).width == 1
    assert spawning(refused).width == 0


def test_the_reward_is_the_weighted_sum_of_its_parts():
    config = ParlConfig(
        lambda_parallel=0.4, lambda_finish=0.2, anneal_steps=10, reference_width=4, cost_critical=0.01, cost_total=0.001
    )
    rollout = root(Stage(1, (2, 2)), children=(child((("A", "1"),)), child()))
    reward = parl(rollout, 0.5, config, optimizer_step=5).reward
    assert reward is not None
    # λ halved: 0.5 + 0.2·(1/3) + 0.1·(1/2) − 0.01·3 − 0.001·5
    assert reward.total == pytest.approx(0.5 + 0.2 / 3 + 0.05 - 0.03 - 0.005)


def test_parallelism_is_paid_up_to_the_reference_and_never_for_one_at_a_time():
    assert [parallelism(w, 5) for w in (0, 1, 2, 5, 9)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert parallelism(3, 1) == 0.0


def test_without_a_reference_the_width_of_the_task_is_meant():
    task = replace(TASK, meta={"pages": 3})
    rollout = replace(root(Stage(1, (2, 2)), children=(child(), child())), task=task)
    rewarded = parl(rollout, 0.0, ParlConfig(), 0)
    assert rewarded.reward is not None
    assert rewarded.reward.parts["parallel"] == 0.5


def test_lambdas_reach_exactly_zero_and_hold_without_annealing():
    config = ParlConfig(lambda_parallel=0.3, lambda_finish=0.2, anneal_steps=7)
    assert config.lambdas(7) == (0.0, 0.0) == config.lambdas(700)
    assert ParlConfig(lambda_parallel=0.5, lambda_finish=0.0, anneal=False).lambdas(700) == (0.5, 0.0)


def test_an_infrastructure_error_anywhere_in_the_tree_is_never_a_reward():
    rollout = root(Stage(1, (2,)), children=(child(status="error"),))
    assert parl(rollout, 1.0, ParlConfig(), 0).reward is None


@pytest.mark.parametrize("field", ["reference_width", "anneal_steps"])
def test_senseless_settings_are_refused_with_the_value(field: str):
    with pytest.raises(ValueError, match=f"{field} = 0, want 1 or more"):
        ParlConfig(**{field: 0})
