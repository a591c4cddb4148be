"""A run opened for debugging: its own engine goes on from its records, and says what it said."""

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import trio
from rich.console import Console

from recipes.cli import main
from recipes.config import SHIPPED
from recipes.debug.rerun import iteration_of, replay_command
from recipes.debug.run import DebugError, Debugger, native, open_run, version_of, weights_of
from recipes.overrides import to_json
from recipes.session import load_tokenizer, roll_out
from recipes.train import TABLES
from recipes.wide_search import wide_search
from swarm.fork import Edit
from swarm.records import read, write
from swarm.replay import differences, timeless, tree
from swarm.types import Ledger, Rollout, Segment, Span, Task, Trace
from tests.test_train import small

ROLLOUTS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the rollouts of one iteration, made by the weights that training starts from."""
    folder = tmp_path_factory.mktemp("run")
    recipe = replace(small(wide_search()), episodes=ROLLOUTS)
    (folder / "recipe.json").write_text(json.dumps(to_json(recipe)))

    async def make() -> list[Rollout]:
        async with TABLES.open(recipe, load_tokenizer(SHIPPED)) as job:
            tasks, budgets = job.draw(0)
            raw = await roll_out(job.harness(), tasks, budgets, 5, 64)
            return (await job.rewarded(raw, 1))[0]

    write(folder / "rollouts" / "iteration_0001.rollouts", trio.run(make))
    return folder


@pytest.fixture(scope="module")
def opened(run: Path) -> Iterator[Debugger]:
    with open_run(run) as debugger:
        yield debugger


def said(console_text: StringIO) -> str:
    return " ".join(console_text.getvalue().split())


@pytest.mark.slow
def test_a_run_is_replayed_and_all_is_identical(run: Path) -> None:
    out = StringIO()
    assert replay_command([str(run)], Console(file=out, width=200)) == 0
    assert said(out) == f"{run}: {ROLLOUTS} rollouts replayed, all identical"


@pytest.mark.slow
def test_a_reward_that_a_rule_gives_otherwise_today_is_told(run: Path, tmp_path: Path) -> None:
    first, *others = read(run / "rollouts" / "iteration_0001.rollouts")
    assert first.reward is not None
    other = replace(first.reward, parts={**first.reward.parts, "perf": 2.0})
    write(tmp_path / "rollouts" / "iteration_0007.rollouts", [replace(first, reward=other), *others])
    (tmp_path / "recipe.json").write_text((run / "recipe.json").read_text())
    out = StringIO()
    assert replay_command([str(tmp_path), "--iterations", "7"], Console(file=out, width=400)) == 1
    assert "iteration_0007.rollouts, rollout 0: main, turn" in said(out)
    assert f"{ROLLOUTS} rollouts replayed, 1 differ" in said(out)


@pytest.mark.slow
def test_every_fork_with_nothing_changed_is_the_rollout_again_by_the_engine_that_made_it(opened: Debugger) -> None:
    rollout = max(opened.records, key=lambda r: (len(r.children), len(r.trace.acts)))
    for r in tree(rollout):
        turn = len(r.trace.acts) // 2
        branch = opened.fork(rollout, r.trace.agent, turn).rollout
        assert differences(timeless(rollout), timeless(branch), nats=1e-4) == []
    assert opened.weights == "the weights that training started from"


@pytest.mark.slow
def test_the_policy_says_today_what_it_said(opened: Debugger) -> None:
    for said in map(opened.recheck, opened.records):
        assert [(s.at, s.error) for s in said] == [(-1, "")] * len(said)
        assert max(s.drift for s in said) < 1e-4


@pytest.mark.slow
def test_another_temperature_leads_elsewhere_and_is_rewarded_under_the_recorded_weights(opened: Debugger) -> None:
    r = opened.records[0]
    branch = opened.fork(r, turn=0, edit=Edit(temperature=3.0, seed=1)).rollout
    assert branch.trace.segments != r.trace.segments
    assert branch.reward is not None
    assert r.reward is not None
    assert branch.reward.weights == r.reward.weights


@pytest.mark.slow
def test_a_rollout_is_a_langgraph_history_that_goes_on_live(opened: Debugger) -> None:
    r = opened.records[0]
    graph, config = opened.graph(r, "first")
    history = [s for s in graph.get_state_history(config) if s.values]
    assert [len(s.values["state"].acts) for s in history] == [*range(len(r.trace.acts), -1, -1)]
    again = graph.invoke(None, history[-1].config)["state"]
    ids = [s.ids for s in (*again.past, again.segment)]
    assert ids == [s.ids for s in r.trace.segments]


@pytest.mark.slow
def test_the_command_lists_turns_and_forks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fork", str(run), "--rollout", "0"]) == 0
    assert "came back" in capsys.readouterr().out
    out = tmp_path / "branch.rollouts"
    assert main(["fork", str(run), "--rollout", "0", "--turn", "0", "--say", "| x | y |", "--out", str(out)]) == 0
    assert "the weights that training started from" in " ".join(capsys.readouterr().out.split())
    [branch] = read(out)
    assert branch.trace.acts[0].given
    assert branch.answer == "| x | y |"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("fork", "--rollout", "99"), f"rollout 99, want one from 0 to {ROLLOUTS - 1}"),
        (("fork", "--turn", "0", "--result", "x"), "--result 'x', want K=TEXT"),
        (("replay", "--iterations", "5"), "want some of its 6"),
        (("replay", "--rollouts", "5-2"), "'5-2', want A or A-B"),
    ],
)
def test_a_mistake_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], options, line: str) -> None:
    assert main([options[0], str(run), *options[1:]]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def told(*versions: int) -> Rollout:
    spans = (Span("prompt", (1,)), *(Span("sampled", (2,), (0.0,), v) for v in versions))
    return Rollout(Task("t", "q", "s", "d", (), ()), Trace("main", (Segment(spans),), "answered"), Ledger())


def test_the_version_of_a_rollout_is_that_which_began_it() -> None:
    assert [version_of(r) for r in (told(3, 4), told())] == [3, 0]


def test_weights_that_are_not_kept_are_said_to_be_replaced_by_the_final_ones(tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(SHIPPED)
    recipe = small(wide_search())
    _, first = weights_of(tmp_path, recipe, 0)
    ref, other = weights_of(tmp_path, recipe, 12)
    assert first == "the weights that training started from"
    assert other == f"version 12 is not kept: the final policy, version {ref.version}, takes its place"


def test_a_rollout_of_another_loop_is_refused() -> None:
    class Theirs:
        pass

    with pytest.raises(DebugError, match="harness Theirs: it has a loop of its own"):
        native(Theirs(), told(1))  # type: ignore[arg-type]


def test_the_iteration_of_a_file_is_in_its_name() -> None:
    assert [iteration_of(Path(name)) for name in ("iteration_0012.rollouts", "branch.rollouts")] == [12, 0]
