"""Rollouts and updates on a real Ray cluster of two nodes on this machine, whose processes are killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.cluster import Cluster, RayRanks, connect, disconnect
from swarm.gather import Job, gather
from swarm.loop import Harness
from swarm.replay import timeless
from swarm.rl.group import LearnerGroup, Rank
from swarm.rl.ranks import LearnerError
from swarm.types import Budget, Rollout, Sampling
from swarm.workers import ClusterConfig, ClusterError, WorkerError
from tests.fake_ranks import Fails
from tests.fake_rollers import TASK, Echo, Letters, OpenScripted, ScriptedEngine, requests, running, speak
from tests.test_rl_group import check_as_one, make

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="without the extra `ray`"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes, of one processor each."""
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180"})
    from ray.cluster_utils import Cluster as Nodes

    made = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    assert connect(ClusterConfig(made.address))
    yield made
    disconnect()
    made.shutdown()


@pytest.fixture
def config(nodes: Any) -> ClusterConfig:
    return ClusterConfig(nodes.address, workers=2, learners=2, at_once=4, place_seconds=120, start_seconds=120)


@pytest.fixture
def factory(tmp_path: Path) -> OpenScripted:
    return OpenScripted(tmp_path)


def gone(processes: list[int]) -> bool:
    """Whether all have ended, or do so within a minute."""
    deadline = time.monotonic() + 60
    while alive := any(running(p) for p in processes):
        if time.monotonic() > deadline:
            break
        os.sched_yield()
    return not alive


def timeless_all(rollouts: list[Rollout]) -> list[Rollout]:
    return [timeless(r) for r in rollouts]


async def here(count: int) -> list[Rollout]:
    """What the same requests give in this process."""
    budget = Budget(100, 4096, 60.0)
    harness = Harness(ScriptedEngine(speak), Letters(), (Echo(),), "", Sampling(16, stop=Letters.stop), budget)
    return timeless_all(await gather([Job(harness, TASK, r.seed, budget) for r in requests(count)]))


async def test_rollouts_of_workers_are_those_of_this_process(config: ClusterConfig, factory: OpenScripted) -> None:
    async with Cluster(config, factory) as cluster:
        await cluster.up(2)
        processes = factory.processes()
        assert len(processes) == 2
        assert timeless_all(await cluster.roll_out(requests(60))) == await here(60)
    assert gone(processes)


@pytest.mark.parametrize("seed", [0, 1])
async def test_processes_killed_in_an_iteration_change_nothing_in_its_result(
    config: ClusterConfig, factory: OpenScripted, seed: int
) -> None:
    rng, heard = random.Random(seed), Counter[int]()
    moments = set(rng.sample(range(1, 100), 4))

    def done(rollout: Rollout) -> None:
        heard[rollout.ledger.tokens_sampled] += 1
        if heard.total() in moments and (alive := factory.processes()):
            os.kill(rng.choice(alive), signal.SIGKILL)

    # One request may be there at all four deaths: it is not given up before the fifth.
    async with Cluster(replace(config, attempts=5), factory) as cluster:
        await cluster.up(2)
        made = timeless_all(await cluster.roll_out(requests(120), done))
        assert cluster.stats.lost > 0
    expected = await here(120)
    assert made == expected
    assert heard == Counter(r.ledger.tokens_sampled for r in expected)


async def test_a_node_that_leaves_and_one_that_joins_are_survived(
    nodes: Any, config: ClusterConfig, factory: OpenScripted
) -> None:
    heard = Counter[str]()

    def done(rollout: Rollout) -> None:
        heard["done"] += 1
        if heard["done"] == 20:
            nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        if heard["done"] == 60:
            nodes.add_node(num_cpus=1)

    async with Cluster(config, factory) as cluster:
        await cluster.up(2)
        before = factory.processes()
        assert timeless_all(await cluster.roll_out(requests(120), done)) == await here(120)
        await cluster.up(2)
        assert len(set(factory.processes()) - set(before)) == 1
        assert timeless_all(await cluster.roll_out(requests(10))) == await here(10)


async def test_a_request_that_kills_its_worker_ends_as_one_error(config: ClusterConfig, factory: OpenScripted) -> None:
    async with Cluster(config, factory) as cluster:
        made = await cluster.roll_out(requests(12, {5: "poison"}))
        assert cluster.stats.given_up == 1
    assert [k for k, r in enumerate(made) if r.failed] == [5]
    assert made[5].trace.error.startswith("lost with 3 workers, the last time: The actor is dead because its worker")
    assert made[5].reward is None
    expected = await here(12)
    assert timeless_all(made[:5] + made[6:]) == expected[:5] + expected[6:]


async def test_a_worker_started_after_an_update_serves_its_weights(
    config: ClusterConfig, factory: OpenScripted
) -> None:
    async with Cluster(config, factory) as cluster:
        await cluster.up(2)
        await cluster.update({"a": torch.ones(1000, 100), "b": torch.full((2,), 0.5, dtype=torch.bfloat16)}, 3)
        assert await cluster.checksums() == [{"policy": "3: 100001"}] * 2
        old = factory.processes()
        for process in old:
            os.kill(process, signal.SIGKILL)
        made = await cluster.roll_out(requests(20))
        assert not set(factory.processes()) & set(old)
        assert {s.version for r in made for s in r.trace.segments[0].spans if s.kind == "sampled"} == {3}
        assert {sums["policy"] for sums in await cluster.checksums()} == {"3: 100001"}


async def test_what_a_roller_raises_is_one_error_that_ends_the_run(
    config: ClusterConfig, factory: OpenScripted
) -> None:
    async with Cluster(config, factory) as cluster:
        with pytest.raises(WorkerError, match=r"^a worker's roll raised ZeroDivisionError: of a roller\n"):
            await cluster.roll_out(requests(10, {3: "wrong"}))


async def test_weights_that_a_roller_refuses_end_the_run(config: ClusterConfig, factory: OpenScripted) -> None:
    async with Cluster(config, factory) as cluster:
        await cluster.up(1)
        with pytest.raises(WorkerError, match="a worker's update raised ValueError: weights of no version"):
            await cluster.update({"a": torch.ones(1)}, -1)


async def test_an_engine_that_takes_its_loop_along_is_replaced(config: ClusterConfig, factory: OpenScripted) -> None:
    async with Cluster(replace(config, attempts=1), factory) as cluster:
        await cluster.up(2)
        made = await cluster.roll_out(requests(6, {2: "collapse"}))
        assert made[2].trace.error == "lost with 1 workers, the last time: MemoryError: of an engine"
        await cluster.up(2)


async def test_a_roller_that_does_not_open_is_one_error(config: ClusterConfig, tmp_path: Path) -> None:
    one = replace(config, workers=1, attempts=1)
    async with Cluster(one, OpenScripted(tmp_path, broken=True)) as cluster:
        with pytest.raises(WorkerError, match="cluster: 1 workers in a row failed to start: OSError: no such device"):
            await cluster.roll_out(requests(1))


async def test_no_room_is_one_error_that_says_what_there_is(config: ClusterConfig, factory: OpenScripted) -> None:
    async with Cluster(replace(config, worker_cpus=64, place_seconds=1), factory) as cluster:
        line = r"no room for any worker in 1 s: asked 64 CPU for each of 2 workers, the cluster of 2 nodes has 2 CPU "
        with pytest.raises(ClusterError, match=line):
            await cluster.roll_out(requests(1))


def test_two_learners_on_ray_learn_as_one(config: ClusterConfig) -> None:
    with LearnerGroup(RayRanks(config, partial(Rank, make, 2)), 2, seconds=300) as group:
        check_as_one(group)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("die", "learners: rank 1 of 2 died: The actor is dead because its worker process has died"),
        ("raise", "learners: rank 1 of 2 raised ZeroDivisionError: of rank 1"),
        ("hang", "learners: add was not done after 1 s"),
    ],
)
def test_a_learner_that_fails_on_ray_ends_the_call_with_its_cause(config: ClusterConfig, how: str, line: str) -> None:
    ranks = RayRanks(config, partial(Fails, how))
    try:
        assert ranks.call("add", [(1,), (2,)], 120) == [1, 12]
        with pytest.raises(LearnerError, match=line):
            ranks.call("add", [(0,), (0,)], 1 if how == "hang" else 120)
    finally:
        ranks.close()


def test_no_room_for_learners_is_one_error(config: ClusterConfig) -> None:
    with pytest.raises(
        ClusterError, match="no room for all learners in 1 s: asked 1 CPU, 1 GPU for each of 2 learners"
    ):
        RayRanks(replace(config, learner_gpus=1, place_seconds=1), partial(Fails, "die"))


def test_a_factory_that_cannot_be_sent_is_refused(config: ClusterConfig) -> None:
    with pytest.raises(ValueError, match="want one that can be pickled"):
        Cluster(config, lambda: OpenScripted(Path("."))())


def test_an_address_where_nobody_listens_is_one_error():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    code = "from swarm.cluster import *; from swarm.workers import *; connect(ClusterConfig(sys.argv[1]))"
    run = subprocess.run([sys.executable, "-c", f"import sys; {code}", address], capture_output=True, text=True)
    assert f"ClusterError: cluster: no Ray at {address}: [Errno 111] Connection refused" in run.stderr


DRIVER = """
import sys
from pathlib import Path
import trio
from swarm.cluster import Cluster
from swarm.workers import ClusterConfig
from tests.fake_rollers import OpenScripted

async def main():
    async with Cluster(ClusterConfig(workers=1), OpenScripted(Path(sys.argv[1]))) as cluster:
        await cluster.up(1)
        print("up", flush=True)
        await trio.sleep_forever()

if __name__ == "__main__":
    trio.run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_driver(tmp_path: Path, how: signal.Signals) -> None:
    script, folder = tmp_path / "driver.py", tmp_path / "processes"
    script.write_text(DRIVER)
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, script, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        processes = OpenScripted(folder).processes()
        assert len(processes) == 1
        driver.send_signal(how)
    assert driver.returncode == -how
    assert gone(processes)
