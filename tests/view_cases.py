"""What the viewer's tests share: run folders with real rollouts of scripted agents, and a server in a thread."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import trio

from recipes.view.fork import Forks
from recipes.view.run import RunView
from recipes.view.server import Viewer, serving
from swarm.fork import Branch, Edit, fork
from swarm.records import write
from swarm.types import Reward, Rollout
from tests.debug_cases import language, rolled, swarm
from tests.swarm_cases import TASK, chat

RECIPE = {"iterations": 3, "seed": 7, "spawn": True, "subagent": "gone", "ppo": {"lr": 1e-4}}
GOLD = (("p", "2"), ("q", "1"), ("r", "5"))
ACTIONS = ("advantage", "value", "ratio")


@cache
def example() -> Rollout:
    """An orchestrator of five turns with two subagents side by side: rows p (right), q (a cell wrong), Z (unwanted)."""
    found = trio.run(rolled, swarm())
    task = replace(TASK, columns=("airport", "code"), gold=GOLD)
    return replace(found, task=task, reward=Reward({"perf": 0.5, "finish": 1.0}, {"perf": 1.0, "finish": 0.25}))


def rollouts(n: int, iteration: int = 1) -> list[Rollout]:
    """Of which the k-th has a reward of k / n, and is told by its task's id."""
    made: list[Rollout] = []
    for k in range(n):
        task = replace(example().task, id=f"task-{iteration}-{k}", query=f"List the airports of place {k}.")
        made.append(replace(example(), task=task, reward=Reward({"perf": k / n}, {"perf": 1.0})))
    return made


def metrics(iteration: int) -> dict[str, object]:
    known = {"rollout/item_f1": 0.1 * iteration, "train/drift_mean": 1e-6, "count/failed": iteration, "time/train": 2.0}
    return {"phase": "ppo", "step": iteration, "iteration": iteration, "optimizer_step": 4 * iteration, **known}


def run_folder(path: Path, *iterations: Sequence[Rollout]) -> Path:
    """A run with these rollouts, whose tokenizer stands where a policy's does."""
    (path / "rollouts").mkdir(parents=True)
    (path / "recipe.json").write_text(json.dumps(RECIPE))
    (path / "policy").mkdir()
    (path / "policy" / "tokenizer.json").write_text(tokenizer_json())
    for k, made in enumerate(iterations, 1):
        add_iteration(path, k, made)
    return path


def add_iteration(path: Path, iteration: int, made: Sequence[Rollout]) -> None:
    """As the trainer does: the rollouts, then the line of metrics."""
    write(path / "rollouts" / f"iteration_{iteration:04}.rollouts", made)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(iteration)) + "\n")


def add_credit(path: Path, iteration: int, made: Sequence[Rollout]) -> None:
    """A credit file whose advantages sink from turn to turn; the value of the k-th action token is k / 100."""
    counts = [sum(len(s.ids) for g in r.trace.segments for s in g.spans if s.kind == "sampled") for r in made]
    index_N = np.repeat(np.arange(len(made)), counts)
    k_N = np.concatenate([np.arange(n) for n in counts])
    values = {"advantage": 0.5 - k_N / 10, "value": k_N / 100, "ratio": 1 + k_N / 1000}
    file = path / "rollouts" / f"iteration_{iteration:04}.credit.npz"
    np.savez(file, rollout_N=index_N, **{f"{name}_N": values[name].astype(np.float32) for name in ACTIONS})


@cache
def tokenizer_json() -> str:
    return chat().tokenizer.backend_tokenizer.to_str()


class Scripted:
    """A run that is forked by the scripted agents who made the example."""

    languages = staticmethod(language)

    def fork(self, rollout: Rollout, agent: str, turn: int, edit: Edit) -> Branch:
        return trio.run(fork, swarm(), rollout, agent, turn, edit)

    def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def served(path: Path) -> Generator[str]:
    """The address at which a run is shown, by a server in a thread of its own."""
    told: Queue[tuple[str, trio.lowlevel.TrioToken, trio.CancelScope]] = Queue()

    async def serve() -> None:
        with trio.CancelScope() as scope:
            async with serving(Viewer(RunView(path), Forks(path, Scripted))) as viewer:
                told.put((viewer.address, trio.lowlevel.current_trio_token(), scope))
                await trio.sleep_forever()

    thread = Thread(target=trio.run, args=(serve,))
    thread.start()
    address, token, scope = told.get(timeout=10)
    try:
        yield address
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()
