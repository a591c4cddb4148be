"""The study of compaction: every form of the advantage with every seed, and what none of them is trained for.

    OUT/chained-0 copied-0 decayed-0 chained-1 …   a PPO run each, trained and evaluated
    OUT/start                                      truncation, untrained, full_window: the first weights
    OUT/report                                     all of it

A study that was stopped goes on with the same command: finished runs are skipped, a half one goes on where it
was, and systems whose episodes are on file are not run again. Not here: a run (`recipes.compaction.run`), and what is
made of the episodes (`recipes.compaction.report`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from recipes.compaction.episodes import read
from recipes.compaction.numbers import FORMS, START
from recipes.compaction.report import report_study, run_folder, start_file
from recipes.compaction.run import Compaction, compaction_run, evaluate_start, run_compaction
from recipes.overrides import to_json
from recipes.progress import Progress
from swarm.checks import want
from swarm.rundir import RunDir, read_done

_want = partial(want, "study")


@dataclass(frozen=True, slots=True)
class Study:
    """`run` with every one of `seeds` and of `forms`: `Study(seeds=(0, 1), forms=("chained",))`.

    Both are set by the study, so `run` has the seed and the form of the recipe, and trains compaction. Raises
    ValueError.
    """

    run: Compaction = field(default_factory=compaction_run)
    seeds: tuple[int, ...] = (0, 1, 2)
    forms: tuple[str, ...] = FORMS

    def __post_init__(self) -> None:
        for name, those in (("seeds", self.seeds), ("forms", self.forms)):
            _want(name, those, bool(those) and len(set(those)) == len(those), "one or more, each once")
        _want("seeds", self.seeds, all(s >= 0 for s in self.seeds), "0 or more each")
        _want("forms", self.forms, set(self.forms) <= set(FORMS), f"some of {', '.join(FORMS)}")
        usual, form = compaction_run(), self.run.ppo.advantage.form
        _want("run.seed", self.run.seed, self.run.seed == usual.seed, f"{usual.seed}; seeds says which there are")
        _want("run.ppo.advantage.form", form, form == usual.ppo.advantage.form,
              f"{usual.ppo.advantage.form!r}; forms says which there are")  # fmt: skip
        _want("run.system", self.run.system, self.run.system == "compaction", "'compaction'")


def compaction() -> Study:
    """An agent whose context is compacted: three forms of the advantage, three seeds, against what is not trained."""
    return Study()


def study(recipe: Study, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates and reports all of it; goes on where a stopped study was. Returns the report."""
    console = console or Console()
    with RunDir(out, to_json(recipe), clean=clean) as folder:
        _train_all(recipe, out, console)
        _evaluate_all(recipe, out, console)
        folder.finish({"seeds": list(recipe.seeds), "forms": list(recipe.forms)})
    return report_study(out, console)


def run_of(recipe: Study, form: str, seed: int) -> Compaction:
    """The recipe of one run: a seed of its own for tasks, sampling and the optimizer."""
    ppo = recipe.run.ppo
    return replace(recipe.run, seed=seed, ppo=replace(ppo, seed=seed, advantage=replace(ppo.advantage, form=form)))


def _train_all(recipe: Study, out: Path, console: Console) -> None:
    """A seed of every form before the next seed, so that a study that is stopped early can be read."""
    runs = [(form, seed) for seed in recipe.seeds for form in recipe.forms]
    for k, (form, seed) in enumerate(runs, 1):
        path = run_folder(out, form, seed)
        name = f"run {k} of {len(runs)}: {form}, seed {seed}"
        if read_done(path) is not None:
            console.print(f"{name}: done", highlight=False)
            continue
        console.print(f"{name}, into {escape(str(path))}", highlight=False)
        run_compaction(run_of(recipe, form, seed), path, console=console)


def _evaluate_all(recipe: Study, out: Path, console: Console) -> None:
    """The weights of the start on the same held-out tasks as the runs."""
    tasks = recipe.run.evaluation.tasks
    for k, system in enumerate(START, 1):
        name, path = f"start {k} of {len(START)}: {system}", start_file(out, system)
        if len(read(path)) == tasks:
            console.print(f"{name}: done", highlight=False)
            continue
        console.print(name, highlight=False)
        with Progress(console, {"evaluation": tasks}) as progress:
            evaluate_start(recipe.run, system, path, partial(progress.advance, "evaluation"))
