"""The study of compaction: what it refuses, what its runs are, and a whole one at small scale."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from envs.trails import TrailConfig
from recipes.compaction.episodes import write
from recipes.compaction.numbers import START
from recipes.compaction.report import start_file
from recipes.compaction.run import START_SYSTEMS, TrailEvaluation, compaction_run
from recipes.compaction.study import Study, compaction, run_of, study
from recipes.config import SHIPPED
from recipes.overrides import OverrideError, apply, from_json, to_json
from tests.test_compaction_report import BASE


def small() -> Study:
    """One form, one seed, two iterations, a small world."""
    run = compaction_run()
    run = replace(
        run,
        iterations=2,
        episodes=2,
        start=SHIPPED,
        wandb="disabled",
        threads=1,
        world=replace(run.world, families=("isotope",), groups_per_band=8),
        trails=TrailConfig(trails=(3, 4), links=(1, 2)),
        ppo=replace(run.ppo, critic=replace(run.ppo.critic, warmup_updates=1), minibatches=2),
        main=replace(run.main, steps=16),
        evaluation=TrailEvaluation(tasks=2, during=1),
    )
    return Study(run, seeds=(3,), forms=("chained",))


def test_each_run_has_its_seed_and_its_form() -> None:
    made = run_of(compaction(), "decayed", 2)
    assert (made.seed, made.ppo.seed, made.ppo.advantage.form) == (2, 2, "decayed")
    back = replace(made, seed=0, ppo=replace(made.ppo, seed=0, advantage=replace(made.ppo.advantage, form="chained")))
    assert back == compaction().run


def test_a_study_is_three_forms_with_three_seeds() -> None:
    made = compaction()
    assert (made.seeds, made.forms) == ((0, 1, 2), ("chained", "copied", "decayed"))


def test_what_is_not_trained_is_what_a_run_can_evaluate() -> None:
    assert set(START) == set(START_SYSTEMS)


def test_overrides_reach_the_runs() -> None:
    made = apply(compaction(), ["--run.iterations", "10", "--seeds", "4,5", "--forms", "chained,copied"])
    assert (made.run.iterations, made.seeds, made.forms) == (10, (4, 5), ("chained", "copied"))


def test_a_study_comes_back_from_json() -> None:
    assert from_json(Study, to_json(compaction())) == compaction()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", ""], r"study: seeds = \(\), want one or more, each once"),
        (["--seeds", "1,1"], r"study: seeds = \(1, 1\), want one or more, each once"),
        (["--seeds", "-1"], r"study: seeds = \(-1,\), want 0 or more each"),
        (["--forms", "rloo"], r"study: forms = \('rloo',\), want some of chained, copied, decayed"),
        (["--run.seed", "4"], r"study: run.seed = 4, want 0; seeds says which there are"),
        (
            ["--run.ppo.advantage.form", "copied"],
            r"study: run.ppo.advantage.form = 'copied', want 'chained'; forms says which there are",
        ),
        (["--run.system", "truncation"], r"study: run.system = 'truncation', want 'compaction'"),
    ],
)
def test_what_a_study_cannot_do_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        apply(compaction(), arguments)


def stopped(out: Path) -> Path:
    """A study that was stopped when two of the systems without training had been evaluated."""
    (out / "start").mkdir(parents=True)
    (out / "recipe.json").write_text(json.dumps(to_json(small())))
    for system in ("truncation", "full_window"):
        write(start_file(out, system), [replace(BASE, system=system, task=f"t{k}") for k in range(2)])
    return out


@pytest.mark.slow
def test_a_study_trains_evaluates_and_reports_what_is_not_there_yet(tmp_path: Path) -> None:
    out, said, again = stopped(tmp_path / "s"), StringIO(), StringIO()
    report = study(small(), out, console=Console(file=said, width=160))
    assert list(report["systems"]) == ["truncation", "untrained", "chained", "full_window"]
    assert all(v["tasks"] == 2 for v in report["systems"].values())
    assert report["systems"]["chained"]["seeds"] == [3]
    assert report["minus_untrained"]["chained"]["tasks"] == 2
    assert report["missing"] == []
    lines = said.getvalue()
    assert f"run 1 of 1: chained, seed 3, into {out / 'chained-3'}" in lines
    assert "start 2 of 3: untrained\n" in lines
    assert all(f"{line}: done" in lines for line in ("start 1 of 3: truncation", "start 3 of 3: full_window"))
    assert study(small(), out, console=Console(file=again, width=160)) == report
    assert all(
        f"{line}: done" in again.getvalue() for line in ("run 1 of 1: chained, seed 3", "start 2 of 3: untrained")
    )
