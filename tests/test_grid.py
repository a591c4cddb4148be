"""The grid of harnesses, tasks and verifiers; mixtures of harnesses; and rewards by other verifiers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal, get_args

import pytest
from rich.console import Console

from recipes.cli import main
from recipes.compaction.run import compaction_run
from recipes.config import SHIPPED, HarnessName, Recipe
from recipes.engines import open_engines
from recipes.grid.cells import Cell, Grid, Source, Trial, as_json, cells, check_fits, grid_table, make, verify
from recipes.grid.command import evaluated
from recipes.grid.judging import VERIFIERS, Judging
from recipes.grid.runs import Asked, Measured, measure, plan
from recipes.grid.verifying import MisfitError, fitting, judge_of
from recipes.harnesses import HARNESSES, WAYS, Mixed, System, native, systems_of
from recipes.overrides import OverrideError, apply, from_json, to_json
from recipes.placement import Placement, Serving
from recipes.train import rewarded, train
from recipes.wide_search import single_agent, wide_search
from rewards.judge import Hybrid
from rewards.verifiers import RULES
from swarm.checkpoint import frozen_ref
from swarm.context import ContextPolicy
from swarm.rl.batch import collect
from swarm.rundir import read_metrics
from swarm.types import Budget, Ledger, Rollout, Runner, Segment, Span, Stage, Task, Trace, Turn
from swarm.verdicts import Verdict, Verifier
from tests.swarm_cases import TASK, harness, says
from tests.test_report_episodes import BASE
from tests.test_train import small

ROWS = Turn("| A | 1 |\n| B | 2 |")
TASKS = [replace(TASK, id=f"t{k}") for k in range(3)]
NAMED = replace(TASK, id="named", columns=("trail", "code"), names=("Ohio", "Utah"))


class Fussy:
    """Scores all rollouts alike, but has no score for those of one task, and fits no task of another domain."""

    main = "liked"

    def fits(self, task: Task) -> str:
        return "" if task.domain == "airport" else f"a task about {task.domain}"

    async def __call__(self, rollout: Rollout) -> Verdict:
        return Verdict({}, "judge_engine: down") if rollout.task.id == "t1" else Verdict({"liked": 0.5, "more": 1.0})


def grid(
    runners: Mapping[str, Runner], verifiers: Mapping[str, Verifier], tasks: Sequence[Task] = TASKS, budget: int = 5
) -> Grid:
    async def load(system: System) -> None:
        loaded.append(system.name)

    loaded.clear()
    return Grid(
        systems=[System(name, name, "policy") for name in runners],
        sources=[Source("table", tasks, budget)],
        verifiers=verifiers,
        open=lambda system: nullcontext(runners[system.harness]),
        load=load,
    )


loaded: list[str] = []


async def trials_of(g: Grid) -> list[Trial]:
    return await verify(g, await make(g, lambda r: None), lambda: None)


# --- measuring -------------------------------------------------------------------------


async def test_every_rollout_is_made_once_and_seen_by_every_verifier():
    heard = list[Rollout]()
    g = grid({"right": harness(says(ROWS)), "silent": harness(says(Turn("nothing")))}, {**RULES_USED, "fussy": Fussy()})
    made = await make(g, heard.append)
    assert (len(heard), loaded) == (6, ["right", "silent"])
    judged = list[None]()
    found = cells(await verify(g, made, lambda: judged.append(None)))
    assert len(judged) == 18
    means = {(c.harness, c.verifier): c.mean for c in found}
    assert means == {
        **{("right", name): 1.0 for name in RULES_USED},
        **{("silent", name): 0.0 for name in RULES_USED},
        ("right", "fussy"): 0.5,
        ("silent", "fussy"): 0.5,
    }


RULES_USED = {name: RULES[name] for name in ("item_f1", "exact")}


async def test_what_a_verifier_could_not_score_is_in_no_mean_and_counted_by_kind():
    (cell,) = cells(await trials_of(grid({"right": harness(says(ROWS))}, {"fussy": Fussy()})))
    assert (cell.mean, cell.tasks, cell.episodes, cell.failed) == (0.5, 2, 2, {"judge_engine": 1})


async def test_a_rollout_that_failed_is_in_no_mean_of_any_verifier():
    g = grid({"right": harness(says(ROWS), fail_at=[1])}, {"item_f1": RULES["item_f1"], "fussy": Fussy()})
    first, second = cells(await trials_of(replace(g, at_once=1)))
    assert (first.mean, first.episodes, first.failed) == (1.0, 2, {"rollout": 1})
    assert (second.episodes, second.failed) == (2, {"rollout": 1})


async def test_systems_that_say_the_same_score_the_same():
    g = grid({"a": harness(says(ROWS)), "b": harness(says(ROWS))}, {"item_f1": RULES["item_f1"]})
    a, b = cells(await trials_of(g))
    assert (a.mean, a.ci) == (b.mean, b.ci)


def test_the_interval_is_over_tasks_and_not_over_their_rollouts():
    trials = [Trial("table", "swarm", "item_f1", f"t{k // 4}", float(k // 4)) for k in range(8)]
    (cell,) = cells(trials)
    assert (cell.mean, cell.tasks, cell.episodes) == (0.5, 2, 8)
    assert cell.ci == (0.0, 1.0)  # of two tasks, either may come up twice


def test_a_cell_without_any_score_has_no_mean():
    (cell,) = cells([Trial("table", "swarm", "judge", "t", None, "judge_unparsed: hm")])
    assert cell == Cell("table", "swarm", "judge", None, None, 0, 0, {"judge_unparsed": 1})


# --- what is shown ---------------------------------------------------------------------

FOUND = [
    Cell("table", "swarm", "item_f1", 0.5, (0.25, 0.75), 2, 2, {"rollout": 1}),
    Cell("table", "swarm", "judge", None, None, 0, 0, {"rollout": 1, "judge_unparsed": 2}),
    Cell("trails", "swarm", "trails", 1.0, (1.0, 1.0), 3, 3, {}),
]


def test_the_table_has_a_row_a_harness_and_a_column_a_verifier():
    said = StringIO()
    Console(file=said, width=140).print(grid_table(FOUND, "table"))
    title, heads, row = said.getvalue().splitlines()
    assert title.startswith("Tasks from table")
    assert heads.split() == ["harness", "item_f1", "judge", "tasks", "no", "score"]
    assert row.split() == ["swarm", "0.500", "(0.250–0.750)", "–", "2", "2", "judge_unparsed,", "1", "rollout"]


def test_the_grid_can_be_written_as_json():
    assert json.loads(json.dumps(as_json(FOUND)))[0] == {
        "tasks_from": "table",
        "harness": "swarm",
        "verifier": "item_f1",
        "mean": 0.5,
        "ci": [0.25, 0.75],
        "tasks": 2,
        "episodes": 2,
        "failed": {"rollout": 1},
    }


def test_episodes_on_tables_are_summed_up_by_system_beside_the_grid():
    made = evaluated(Measured(tuple(FOUND), (BASE,)))
    assert made["systems"]["swarm"]["item_f1"] == 0.5
    assert made["by_rows"]["swarm"]["1-4"]["tasks"] == 1
    assert len(made["grid"]) == 3


# --- what does not fit -----------------------------------------------------------------


async def test_a_verifier_that_does_not_fit_a_task_is_refused_by_name():
    g = grid({"right": harness(says(ROWS))}, {"item_f1": RULES["item_f1"]}, [TASK, NAMED])
    with pytest.raises(MisfitError, match="verifier item_f1 does not fit task named from table: the question names"):
        await check_fits(g)


class OnlyAirports:
    """A runner that knows no other tasks."""

    budget = Budget(5, 100)

    def fits(self, task: Task) -> str:
        return "" if task.domain == "airport" else "it knows only airports"

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        raise AssertionError("it was run")


async def test_a_harness_that_does_not_fit_a_task_is_refused_by_name():
    g = grid({"guide": OnlyAirports()}, {"exact": RULES["exact"]}, [TASK, replace(TASK, domain="city")])
    with pytest.raises(MisfitError, match="harness guide does not fit task t from table: it knows only airports"):
        await check_fits(g)
    assert loaded == []
    await check_fits(replace(g, sources=[Source("table", [TASK], 5)]))


def test_tasks_are_drawn_on_until_enough_fit_and_those_that_fit_stay_the_same():
    pool = [replace(TASK, id=str(k), domain="airport" if k % 3 == 0 else "city") for k in range(100)]
    found = fitting("table", lambda n: pool[:n], 4, {"fussy": Fussy()})
    assert [t.id for t in found] == ["0", "3", "6", "9"]
    assert fitting("table", lambda n: pool[:n], 4, {"exact": RULES["exact"]}) == pool[:4]


def test_tasks_none_of_which_fit_are_refused_with_the_reason():
    with pytest.raises(
        MisfitError, match="verifier trails does not fit task t0: it has no trails.*; 0 of 3 tasks from"
    ):
        fitting("table", lambda n: (TASKS * n)[:n], 3, {"trails": RULES["trails"]})


# --- names -----------------------------------------------------------------------------


def run_of(folder: Path, recipe: object) -> Path:
    (folder / "recipe.json").write_text(json.dumps(to_json(recipe)))
    return folder


def test_a_run_is_measured_as_its_recipe_says_unless_told_otherwise(tmp_path: Path):
    p = plan(run_of(tmp_path, wide_search()), Asked(tasks=7))
    assert [s.name for s in p.systems] == ["single_agent", "cold_start", "swarm", "floor", "ceiling"]
    assert (p.verifiers, p.sources, p.budget) == (("item_f1",), ("table",), 40)
    assert (p.episodes, p.verdicts) == (35, 35)


def test_a_run_of_a_single_agent_has_no_orchestrator(tmp_path: Path):
    run = run_of(tmp_path, single_agent())
    assert [s.name for s in plan(run, Asked()).systems] == ["single_agent", "floor", "ceiling"]
    with pytest.raises(MisfitError, match="harness swarm does not fit the recipe: spawn = false, so that there are no"):
        plan(run, Asked(systems=("swarm",)))


def test_a_harness_takes_the_trained_weights_unless_it_names_others(tmp_path: Path):
    run = run_of(tmp_path, wide_search())
    p = plan(run, Asked(systems=("single", "orchestrator@start", "swarm", "ceiling")))
    assert [(s.harness, s.weights) for s in p.systems] == [
        *(("single", "policy"), ("orchestrator", "start"), ("orchestrator", "policy"), ("ceiling", ""))
    ]


def test_a_run_on_trails_has_its_ways_to_keep_a_context(tmp_path: Path):
    run = run_of(tmp_path, compaction_run())
    p = plan(run, Asked())
    assert [(s.name, s.weights) for s in p.systems] == [("compaction", "policy"), ("compaction@start", "start")]
    assert (p.verifiers, p.sources, p.budget) == (("trails",), ("trails",), 96)
    with pytest.raises(MisfitError, match="unknown harness 'orchestrator', want one of compaction, truncation"):
        plan(run, Asked(systems=("orchestrator",)))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (Asked(systems=("swrm",)), "unknown harness 'swrm', nearest: swarm"),
        (Asked(systems=("swarm@start",)), "harness swarm@start: swarm has its weights already"),
        (Asked(systems=("single@strt",)), "harness single@strt: weights 'strt', want single@policy or single@start"),
        (Asked(systems=("single@",)), "harness single@: weights '', want"),
        (Asked(systems=("compaction",)), "does not fit the recipe: main.rewriting.kind = 'none', want 'compaction'"),
        (Asked(verifiers=("item_f2",)), "unknown verifier 'item_f2', nearest: item_f1"),
        (Asked(verifiers=("judge",)), "verifier judge: judging.checkpoint = none, want a checkpoint that judges"),
        (Asked(verifiers=("hybrid",)), "verifier hybrid: judging.checkpoint = none"),
        (Asked(sources=("tables",)), "unknown source of tasks 'tables', nearest: table"),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, asked: Asked, line: str
):
    with pytest.raises(MisfitError, match=line):
        plan(run_of(tmp_path, wide_search()), asked)


def test_a_harness_of_ones_own_is_passed_beside_the_others(tmp_path: Path):
    run = run_of(tmp_path, wide_search())
    mine = {**WAYS, "mine": native(lambda s: OnlyAirports())}
    assert [s.harness for s in plan(run, Asked(systems=("mine", "mine@start")), mine).systems] == ["mine", "mine"]
    with pytest.raises(MisfitError, match="unknown harness 'mine'"):
        plan(run, Asked(systems=("mine",)))


def test_an_agent_program_must_be_named_and_be_there(tmp_path: Path):
    run = run_of(tmp_path, wide_search())
    with pytest.raises(MisfitError, match=r"harness program does not fit the recipe: program = \(\), want the command"):
        plan(run, Asked(systems=("program",)))
    with pytest.raises(MisfitError, match="program = 'no-such-agent -x', want a command that can be run"):
        plan(run, Asked(systems=("program",), program=("no-such-agent", "-x")))
    assert plan(run, Asked(systems=("program",), program=(sys.executable,))).systems[0].harness == "program"


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_of(tmp_path, wide_search())
    assert main(["eval", str(tmp_path), "--systems", "swrm"]) == 2
    assert capsys.readouterr().err == "swarm-rl: unknown harness 'swrm', nearest: swarm\n"
    assert main(["eval", str(tmp_path), "--verifier", ","]) == 2
    assert "argument --verifier: ',', want names with commas between them" in capsys.readouterr().err


def test_a_judge_is_named_on_the_command_line_or_in_the_recipe(tmp_path: Path):
    run = run_of(tmp_path, wide_search())
    p = plan(run, Asked(verifiers=("judge", "hybrid"), judge=SHIPPED))
    assert p.recipe.judging.checkpoint == SHIPPED


def test_every_harness_that_a_recipe_may_name_is_there():
    assert tuple(HARNESSES) == get_args(HarnessName)
    assert set(VERIFIERS) == {*RULES, "judge", "hybrid"}


# --- a mixture -------------------------------------------------------------------------


class Says:
    """A runner that answers with its name and the limits that it was given."""

    def __init__(self, name: str, budget: Budget) -> None:
        self.name, self.budget = name, budget

    def fits(self, task: Task) -> str:
        return f"{self.name} never does" if task.domain == "city" else ""

    async def roll(self, task: Task, seed: int, budget: Budget) -> Rollout:
        assert budget == replace(self.budget, critical_steps=3)
        return Rollout(task, Trace("main", (), "answered"), Ledger(), answer=self.name)


def mixed(**weights: float) -> Mixed:
    limits = {"a": Budget(5, 100, 10.0), "b": Budget(9, 50, 20.0)}
    return Mixed({name: Says(name, limits[name]) for name in weights}, weights)


async def test_a_mixture_draws_by_the_seed_and_says_who_it_was():
    both = mixed(a=3.0, b=1.0)
    made = [await both.roll(TASK, seed, Budget(3, 100, 20.0)) for seed in range(200)]
    assert all(r.harness == r.answer == both.drawn(seed) for seed, r in enumerate(made))
    assert 130 < sum(r.harness == "a" for r in made) < 170
    assert both.drawn(7) == mixed(b=1.0, a=3.0).drawn(7)


def test_the_budget_of_a_mixture_holds_all_of_its_limits():
    assert mixed(a=1.0, b=1.0).budget == Budget(9, 100, 20.0)


def test_a_mixture_fits_where_all_of_it_does():
    both = mixed(a=1.0, b=1.0)
    assert both.fits(TASK) == ""
    assert both.fits(replace(TASK, domain="city")) == "a: a never does"


# --- the recipe ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (["--harnesses", '{"orchestrater": 1}'], "--harnesses = .*, want dict"),
        (["--harnesses", '{"single": 0}'], r"recipe: harnesses\['single'\] = 0.0, want a finite weight above 0"),
        (
            ["--harnesses", '{"orchestrator": 1}', "--spawn", "false"],
            "harnesses has 'orchestrator', which does not fit",
        ),
        (["--harnesses", '{"compaction": 1}'], "main.rewriting.kind = 'none', want 'compaction'"),
        (["--verifier", "item_f2"], "--verifier = 'item_f2', want"),
        (["--verifier", "trails"], "verifier = 'trails' does not fit: its tasks are tables"),
        (["--verifier", "hybrid"], "verifier = 'hybrid' does not fit: judging.checkpoint = none"),
        (["--judging.weight", "1"], "judging: weight = 1.0, want more than 0 and less than 1"),
        (["--judging.answer_tokens", "9000"], "judging: answer_tokens = 9000, want less than 8192"),
        (["--judging.levels", '{"right": 1}'], "judge: levels = .*, want two or more, each a word"),
    ],
)
def test_what_does_not_fit_a_recipe_is_refused_before_anything_is_loaded(fields: list[str], line: str):
    with pytest.raises(OverrideError, match=line):
        apply(wide_search(), fields)


def test_a_mixture_and_a_judge_are_set_on_the_command_line_and_kept():
    fields = ["--harnesses", '{"orchestrator": 2, "single": 1}', "--verifier", "hybrid", "--judging.checkpoint", "x/y"]
    recipe = apply(wide_search(), fields)
    assert recipe.harnesses == {"orchestrator": 2.0, "single": 1.0}
    assert (recipe.verifier, recipe.judging.checkpoint) == ("hybrid", Path("x/y"))
    assert from_json(Recipe, to_json(recipe)) == recipe


def test_the_single_agent_of_a_recipe_keeps_its_context_as_that_says():
    rewriting = ContextPolicy("compaction", threshold=4000)
    recipe = replace(single_agent(), main=replace(single_agent().main, rewriting=rewriting))
    assert systems_of(recipe)["single_agent"] == System("single_agent", "compaction", "policy")
    assert systems_of(wide_search())["single_agent"] == System("single_agent", "single", "start")
    assert Judging().longest == 0
    assert Judging(checkpoint=SHIPPED).longest == 8192


# --- rewards ---------------------------------------------------------------------------


def sampled(name: str, table: tuple[tuple[str, ...], ...], harness: str = "") -> Rollout:
    task = replace(TASK, id=name, meta={"pages": 1})
    segment = Segment((Span("prompt", (1,)), Span("sampled", (2, 3), (-0.5, -0.5), 1)))
    trace = Trace("main", (segment,), "answered")
    return Rollout(task, trace, Ledger((Stage(1),)), table=table, harness=harness)


HALF = (("A", "1"), ("B", "3"))


async def test_performance_is_the_main_score_of_the_verifier():
    recipe = replace(wide_search(), verifier="exact")
    (one, none), metrics, _ = await rewarded(recipe, RULES["exact"], [sampled("a", TASK.gold), sampled("b", HALF)], 0)
    assert one.reward is not None
    assert none.reward is not None
    assert (one.reward.parts["perf"], none.reward.parts["perf"]) == (1.0, 0.0)
    assert metrics["verdict/exact"] == 0.5
    assert metrics["rollout/item_f1"] == pytest.approx((1 + 0.75) / 2)


async def test_a_rollout_whose_verification_failed_has_no_reward_and_is_left_out_of_the_loss():
    raw = [sampled("t0", TASK.gold), sampled("t1", TASK.gold)]
    rollouts, metrics, _ = await rewarded(wide_search(), Hybrid((RULES["item_f1"], 1.0), (Fussy(), 1.0)), raw, 0)
    assert [r.reward is None for r in rollouts] == [False, True]
    assert metrics["count/no_verdict_judge_engine"] == 1
    assert metrics["verdict/hybrid"] == 0.75
    batch = collect(rollouts)
    assert batch.left_out == {"unrewarded": 1}
    assert batch.reward_R.tolist() == pytest.approx([rollouts[0].reward.total])  # type: ignore[union-attr]
    # The mean reward is of those that have one.
    assert metrics["rollout/reward"] == pytest.approx(rollouts[0].reward.total)  # type: ignore[union-attr]


async def test_the_rollouts_of_each_harness_have_their_own_means():
    raw = [sampled("a", TASK.gold, "orchestrator"), sampled("b", HALF, "single"), sampled("c", (), "single")]
    _, metrics, _ = await rewarded(wide_search(), RULES["item_f1"], raw, 0)
    assert metrics["harness/orchestrator/item_f1"] == 1.0
    assert metrics["harness/single/item_f1"] == pytest.approx(0.375)
    assert metrics["harness/single/rollouts"] == 2
    _, alone, _ = await rewarded(wide_search(), RULES["item_f1"], [sampled("a", HALF)], 0)
    assert not [name for name in alone if name.startswith("harness/")]


@pytest.mark.slow
@pytest.mark.parametrize("subagents", ["each", "turns"])
async def test_a_judge_has_an_engine_of_its_own_that_outlives_every_cast(subagents: Literal["each", "turns"]):
    recipe = Recipe(serving=Serving(cache_mib=8), placement=Placement(subagents=subagents), threads=1)
    scout, sloppy = (frozen_ref(SHIPPED.with_name(name)) for name in ("scout-1m", "sloppy-1m"))
    async with open_engines(recipe, (SHIPPED, SHIPPED), 128, 1) as engines:
        await engines.serve(sloppy)
        judge = await judge_of(Judging(scout.path), engines)
        assert await judge.engine.checksum() != await (await engines.serve(sloppy)).checksum()  # type: ignore[attr-defined]
        await engines.retire(())
        left = await engines.checksums()
        assert scout.sha256 in left
        assert (sloppy.sha256 in left) is (subagents == "turns")


# --- all of it -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_is_trained_across_harnesses_for_another_score_and_measured_by_a_judge(tmp_path: Path):
    recipe = replace(small(wide_search()), verifier="official", harnesses={"orchestrator": 1.0, "single": 1.0})
    recipe = replace(recipe, iterations=1, episodes=8, judging=Judging(turn_tokens=16, attempts=2))
    run = tmp_path / "run"
    train(recipe, run, console=Console(quiet=True))
    rows = read_metrics(run)
    assert rows[0]["harness/orchestrator/rollouts"] + rows[0]["harness/single/rollouts"] == 8
    assert 0.0 <= rows[0]["verdict/f1_by_item"] <= 1.0
    asked = Asked(("swarm", "single"), ("exact", "judge"), tasks=2, rows=(3, 10), budget=12, judge=SHIPPED)
    found = measure(plan(run, asked))
    # A reader of tables is no judge: what it says is no verdict, and no zero.
    assert [(c.harness, c.verifier, c.episodes) for c in found.cells] == [
        *(("swarm", "exact", 2), ("swarm", "judge", 0), ("single", "exact", 2), ("single", "judge", 0))
    ]
    assert {sum(c.failed.values()) for c in found.cells if c.verifier == "judge"} == {2}
