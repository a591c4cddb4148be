"""What the doctor really starts, also in a process of its own: `python -m recipes.doctor.tries` with JSON on stdin.

    {"try": "engines", "kind": "Recipe", "recipe": …}   opens the recipe's engines, and one token comes from each
    {"try": "ray", "kind": "Recipe", "recipe": …}       joins the recipe's Ray, or starts one here

It answers `{"seconds": 1.2, "words": "…", "error": ""}` on the last line of stdout. Not here: deadlines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

import trio

from recipes.compaction.run import Compaction
from recipes.config import Recipe, Training
from recipes.engines import open_engines
from recipes.overrides import from_json
from recipes.plan.command import served_of
from recipes.plan.processes import longest
from recipes.session import threads_of
from swarm.cluster import connect, disconnect, resources
from swarm.folders import CheckpointError
from swarm.types import EngineError, Sampling
from swarm.workers import ClusterConfig, WorkerError

FAILURES = (EngineError, CheckpointError, WorkerError, ValueError, ExceptionGroup)
"""What an engine or Ray ends with that does not start."""
KINDS: Mapping[str, type[Training]] = {"Recipe": Recipe, "Compaction": Compaction}


async def engines(recipe: Training) -> str:
    """One token from each engine of the recipe. Raises EngineError and CheckpointError."""
    folders = served_of(recipe)
    async with open_engines(recipe, folders, longest(recipe), threads_of(recipe)) as opened:
        for engine in opened.each:
            said = await engine.generate((0,), Sampling(1))
            if len(said.ids) != 1:
                raise EngineError(f"{len(said.ids)} tokens came, want 1")
    return f"{len(folders)} {recipe.engine} engines, a token from each"


def ray(recipe: Training) -> str:
    """What Ray has, of what the recipe asks in all. Raises WorkerError where it has less, or is not reached."""
    p = recipe.placement
    connect(ClusterConfig(p.address, max(1, p.workers)))
    try:
        return shares(asked_of_ray(recipe), resources())
    finally:
        disconnect()


def asked_of_ray(recipe: Training) -> dict[str, float]:
    """The cores and GPUs of all workers, and of the learners where there are several."""
    p = recipe.placement
    learners = p.learners if p.learners > 1 else 0
    return {
        "CPU": p.workers * p.worker_cpus + learners * ClusterConfig().learner_cpus,
        "GPU": p.workers * p.worker_gpus + learners * p.learner_gpus,
    }


def shares(asked: Mapping[str, float], there: Mapping[str, float]) -> str:
    """`Ray with 2 CPU (1 asked)`. Raises WorkerError where less is there than asked."""
    for name, count in asked.items():
        if there.get(name, 0.0) < count:
            raise WorkerError(f"{count:g} {name} asked, the cluster has {there.get(name, 0.0):g}, want more nodes")
    has = (f"{there.get(name, 0.0):g} {name} ({count:g} asked)" for name, count in asked.items())
    return f"Ray with {', '.join(has)}"


@dataclass(frozen=True, slots=True)
class Tried:
    """How it went: `Tried(1.2, "2 embedded engines, a token from each")`; `error` is empty where it went well."""

    seconds: float
    words: str
    error: str = ""


def one_line(error: Exception) -> str:
    """The first of its errors, in one line."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:300] or type(error).__name__


def main() -> int:
    """Reads what to try, and tells how it went."""
    asked = json.load(sys.stdin)
    recipe = from_json(KINDS[asked["kind"]], asked["recipe"])
    began, words, error = perf_counter(), "", ""
    try:
        words = trio.run(engines, recipe) if asked["try"] == "engines" else ray(recipe)
    except FAILURES as e:
        error = one_line(e)
    print(json.dumps(asdict(Tried(perf_counter() - began, words, error))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
