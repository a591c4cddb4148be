"""The viewer's data and its server: what is listed, what is shown of a rollout, and who may look."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console
from tokenizers import Tokenizer

from recipes.arguments import UsageError
from recipes.view.answer import compared
from recipes.view.command import has_screen, view_command
from recipes.view.fork import Forks
from recipes.view.index import Index, Row
from recipes.view.lanes import Lane, lanes_of
from recipes.view.rollout import shown
from recipes.view.run import RunView
from recipes.view.server import PAGE, Viewer, serving
from recipes.view.tokens import credit_of, pieces, turns_of
from swarm.records import write
from swarm.rundir import RunDirError
from swarm.types import Ledger, Rollout, Segment, Span, Stage, Task, Trace
from tests.view_cases import (
    GOLD,
    Scripted,
    add_credit,
    add_iteration,
    example,
    metrics,
    rollouts,
    run_folder,
    tokenizer_json,
)

TASK = Task("t", "q", "s", "city", ("city", "code"), (("A", "1"), ("B", "2"), ("C", "3")))


def agent(name: str, stages: tuple[Stage, ...], *children: Rollout, seconds: float = 0.0, rows: str = "") -> Rollout:
    """An agent that said one token a turn."""
    spans = [s for k in range(len(stages)) for s in (Span("prompt" if not k else "observed", (1,)), _said(k))]
    table = tuple((row, "1") for row in rows)
    trace = Trace(name, (Segment(tuple(spans)),), "answered")
    return Rollout(TASK, trace, Ledger(stages, seconds=seconds), table=table, children=children)


def _said(k: int) -> Span:
    return Span("sampled", (2,), (-0.1 * k,), 1)


def listed(index: Index) -> list[Row]:
    for _ in index.refresh():
        pass
    return index.rows


# --- the list ----------------------------------------------------------------------------


def test_a_row_has_what_the_rollout_cost_and_earned(tmp_path: Path) -> None:
    r = example()
    [row] = listed(Index(run_folder(tmp_path / "x", [r]) / "rollouts"))
    assert (row.id, row.iteration, row.index, row.task) == ("iteration_0001:0", 1, 0, r.task.id)
    assert (row.reward, row.parts) == (0.75, {"perf": 0.5, "finish": 1.0})
    assert (row.critical_steps, row.total_steps) == (r.ledger.critical_steps, r.total_steps)
    assert (row.agents, row.width, row.wanted, row.rows) == (2, 2, 3, len(r.table))
    assert row.tokens == r.ledger.tokens_sampled + sum(c.ledger.tokens_sampled for c in r.children)


def test_a_rollout_whose_subagent_failed_is_marked_failed(tmp_path: Path) -> None:
    child = replace(example().children[0], trace=replace(example().children[0].trace, status="error"))
    [row] = listed(Index(run_folder(tmp_path / "x", [replace(example(), children=(child,))]) / "rollouts"))
    assert row.failed
    assert row.status == "answered"


def test_a_list_goes_on_where_a_file_has_grown(tmp_path: Path) -> None:
    index = Index(run_folder(tmp_path / "x", rollouts(2)) / "rollouts")
    first = list(listed(index))
    write(tmp_path / "x" / "rollouts" / "iteration_0001.rollouts", rollouts(1))
    add_iteration(tmp_path / "x", 2, rollouts(1, 2))
    assert [row.id for row in listed(index)] == [
        *("iteration_0001:0", "iteration_0001:1", "iteration_0001:2", "iteration_0002:0"),
    ]
    assert all(a is b for a, b in zip(first, index.rows, strict=False))
    assert index.generation == 0


def test_what_is_half_written_is_listed_when_it_is_whole(tmp_path: Path) -> None:
    file = run_folder(tmp_path / "x", rollouts(2)) / "rollouts" / "iteration_0001.rollouts"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    index = Index(file.parent)
    assert len(listed(index)) == 1
    file.write_bytes(whole)
    assert len(listed(index)) == 2


def test_an_iteration_that_is_made_again_begins_the_list_anew(tmp_path: Path) -> None:
    file = run_folder(tmp_path / "x", rollouts(2)) / "rollouts" / "iteration_0001.rollouts"
    index = Index(file.parent)
    listed(index)
    file.unlink()
    write(file, rollouts(3, iteration=9))
    assert [row.task for row in listed(index)] == ["task-9-0", "task-9-1", "task-9-2"]
    assert index.generation == 1


def test_a_file_that_is_no_record_is_told_and_the_others_are_listed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "x", rollouts(1)) / "rollouts"
    (folder / "iteration_0000.rollouts").write_text("something else altogether")
    index = Index(folder)
    assert [row.id for row in listed(index)] == ["iteration_0001:0"]
    assert "no rollout record" in index.damaged["iteration_0000"]


def test_the_rollout_of_a_row_comes_back_whole(tmp_path: Path) -> None:
    made = rollouts(3)
    index = Index(run_folder(tmp_path / "x", made) / "rollouts")
    listed(index)
    assert index.load("iteration_0001:2") == made[2]
    for id in ("iteration_0001:3", "iteration_0001:-1", "iteration_0002:0", "", "../x:0"):
        with pytest.raises(KeyError):
            index.load(id)


# --- tokens ------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_the_pieces_of_a_text_are_one_an_id_and_make_the_text(text: str) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)


def test_tokens_that_changed_weights_under_way_are_one_turn() -> None:
    spans = (Span("prompt", (1,)), Span("sampled", (2,), (0.0,), 1), Span("sampled", (3,), (0.0,), 2))
    later = Segment((Span("prompt", (1,)), Span("sampled", (4,), (0.0,), 2)), "compaction")
    found = turns_of(Trace("main", (Segment(spans), later), "answered"))
    assert [(window, [s.version for s in turn]) for window, turn in found] == [(0, [1, 2]), (1, [2])]


def test_credit_is_taken_for_the_rollout_that_it_belongs_to(tmp_path: Path) -> None:
    made = rollouts(2)
    run = run_folder(tmp_path / "x", made)
    add_credit(run, 1, made)
    found = credit_of(run / "rollouts" / "iteration_0001.rollouts", 1, made[1].trace)
    assert found is not None
    assert found["value"][:3] == [0.0, 0.01, 0.02]
    assert found["advantage"][:2] == [0.5, 0.4]


def test_credit_of_another_length_is_no_credit(tmp_path: Path) -> None:
    made = rollouts(1)
    run = run_folder(tmp_path / "x", made)
    add_credit(run, 1, made)
    short = replace(made[0].trace, segments=(Segment(made[0].trace.segments[0].spans[:2]),))
    assert credit_of(run / "rollouts" / "iteration_0001.rollouts", 0, short) is None
    assert credit_of(run / "rollouts" / "iteration_0002.rollouts", 0, made[0].trace) is None


# --- lanes -------------------------------------------------------------------------------


def two_stages() -> Rollout:
    """main: 1 + max(3, 1), 1 + 2, 1: 8 steps. b waits for its own child in its second turn."""
    a = agent("main/0:a", (Stage(1), Stage(2)), seconds=4.0, rows="A")
    c = agent("main/0:b/0:c", (Stage(1),), seconds=1.0)
    b = agent("main/1:b", (Stage(1),), seconds=5.0, rows="AB")
    d = agent("main/2:d", (Stage(0, (1,)), Stage(1)), c, seconds=2.0)
    return agent("main", (Stage(1, (3, 1)), Stage(1, (2,)), Stage(1)), a, b, d, seconds=10.0, rows="AX")


def test_turns_lie_one_after_another_and_subagents_after_the_turn_that_started_them() -> None:
    lanes, _ = lanes_of(two_stages())
    assert [lane.name for lane in lanes] == ["main", "main/0:a", "main/1:b", "main/2:d", "main/0:b/0:c"]
    assert [[(t.start, t.own, t.steps) for t in lane.turns] for lane in lanes[:2]] == [
        [(0, 1, 4), (4, 1, 3), (7, 1, 1)],
        [(1, 1, 1), (2, 2, 2)],
    ]
    assert [lane.start for lane in lanes] == [0, 1, 1, 5, 5]
    assert [t.children for t in lanes[0].turns] == [(1, 2), (3,), ()]


def test_the_critical_path_follows_the_slowest_by_steps_and_by_seconds() -> None:
    lanes, _ = lanes_of(two_stages())
    assert [lane.name for lane in lanes if lane.critical] == ["main", "main/0:a", "main/2:d", "main/0:b/0:c"]
    assert [lane.name for lane in lanes if lane.critical_s] == ["main", "main/1:b", "main/2:d", "main/0:b/0:c"]
    assert (lanes[2].slack, lanes[1].slack_s) == (2, 1.0)


def test_seconds_of_an_agent_that_has_no_others_are_shared_out_by_tokens() -> None:
    lanes, _ = lanes_of(two_stages())
    # Of 10 s, 5 and 2 were waited; the other 3 go to three turns of a token each.
    assert [(t.start_s, t.own_s, t.seconds) for t in lanes[0].turns] == [(0, 1, 6), (6, 1, 3), (9, 1, 1)]
    assert not lanes[0].timed


def test_seconds_that_the_record_has_turn_by_turn_are_kept() -> None:
    r = example()
    acts = tuple(structs.replace(a, seconds=1.0, calling=2.0) for a in r.trace.acts)
    [main, *_], _ = lanes_of(replace(r, trace=replace(r.trace, acts=acts)))
    assert main.timed
    assert [t.seconds for t in main.turns] == [3.0] * len(acts)
    assert [t.own_s for t in main.turns] == [1.0 if t.children else 3.0 for t in main.turns]


def test_subagents_that_the_ledger_does_not_count_stand_with_the_one_before() -> None:
    children = [agent(f"main/{k}:a", (Stage(1),) * n) for k, n in enumerate((2, 5, 3))]
    lanes, _ = lanes_of(agent("main", (Stage(1, (2,)), Stage(1, (3,))), *children))
    assert [t.children for t in lanes[0].turns] == [(1, 2), (3,)]


# --- one rollout ---------------------------------------------------------------------------


def test_an_answer_is_compared_cell_by_cell() -> None:
    table = (("A", "1"), ("b", "9"), ("X", "1"), ("B", "2"), ("city", "code"), ("", ""))
    lines = compared(replace(agent("main", (Stage(1),)), table=table), {3: (("C", "3"),), 4: (("A", "0"), ("C", "3"))})
    assert [(x.verdict, x.found, x.right, x.by) for x in lines] == [
        ("right", ("A", "1"), (True, True), (4,)),
        ("partial", ("b", "9"), (True, False), ()),
        ("missing", (), (), (3, 4)),
        ("extra", ("X", "1"), (), ()),
        ("extra", ("B", "2"), (), ()),
    ]
    assert [x.again for x in lines] == [False, False, False, False, True]


def test_a_short_row_has_its_last_cells_wrong() -> None:
    [line, *_] = compared(replace(agent("main", (Stage(1),)), table=(("A",),)), {})
    assert (line.verdict, line.found, line.right) == ("partial", ("A", ""), (True, False))


def found_in(r: Rollout, kind: str, **credit: list[float]) -> list[tuple[str, int, int]]:
    return [(f.title, f.lane, f.turn) for f in shown("x:0", r, credit or None)["findings"] if f.kind == kind]


def test_the_slowest_subagent_is_named() -> None:
    assert found_in(two_stages(), "steps") == [("Slowest in steps: main/0:a", 1, -1)]
    assert found_in(two_stages(), "seconds") == [("Slowest in seconds: main/1:b", 2, -1)]


def test_a_stage_in_which_all_are_as_slow_blames_nobody() -> None:
    pair = [agent(f"main/{k}:a", (Stage(1),) * 2) for k in range(2)]
    assert found_in(agent("main", (Stage(1, (2, 2)),), *pair), "steps") == [("Longest wait: turn 1", 1, -1)]


def test_the_turn_with_the_least_advantage_is_where_credit_was_lost() -> None:
    credit = {"advantage": [0.5, -0.25, 0.0], "value": [0.1, 0.8, 0.4], "ratio": [1.0, 1.0, 1.0]}
    [found] = [f for f in shown("x:0", two_stages(), credit)["findings"] if f.kind == "credit"]
    assert (found.title, found.turn) == ("Credit lost in turn 2", 1)
    assert found.text == "Mean advantage -0.250 over 1 tokens; the critic's value went from 0.80 to 0.40."


def test_without_credit_the_least_likely_turn_is_named() -> None:
    assert found_in(two_stages(), "unlikely") == [("Least likely turn: 3", 0, 2)]


def test_rows_that_a_subagent_found_and_nobody_handed_in_are_told() -> None:
    assert found_in(two_stages(), "missing") == [("2 of 3 wanted rows missing", 2, -1)]


def test_subagents_that_brought_nothing_new_are_told() -> None:
    lanes: list[Lane] = [Lane(**lane) for lane in shown("x:0", two_stages(), None)["lanes"]]
    assert [(lane.name, lane.wanted, lane.new) for lane in lanes[1:3]] == [("main/0:a", 1, 1), ("main/1:b", 2, 1)]
    assert found_in(two_stages(), "spurious") == [("1 of 4 subagents brought no new wanted row", 4, -1)]


# --- the server ----------------------------------------------------------------------------


@asynccontextmanager
async def looking(path: Path) -> AsyncGenerator[tuple[httpx.AsyncClient, Viewer]]:
    async with (
        serving(Viewer(RunView(path), Forks(path, Scripted))) as viewer,
        httpx.AsyncClient(base_url=viewer.address) as client,
    ):
        while not viewer.view.ready:
            await trio.sleep(0.01)
        yield client, viewer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = [replace(example(), task=replace(example().task, gold=GOLD))]
    path = run_folder(tmp_path / "seen", made, rollouts(2, 2))
    add_credit(path, 1, made)
    return path


async def test_a_run_is_told_with_its_recipe_metrics_and_rollouts(run: Path) -> None:
    async with looking(run) as (client, _):
        about = (await client.get("api/run")).json()
        rows = (await client.get("api/metrics?from=1")).json()["rows"]
        found = (await client.get("api/rollouts")).json()
    assert (about["name"], about["recipe"]["seed"], about["version"]["state"]) == ("seen", 7, "stopped")
    assert rows == [metrics(2)]
    assert [dict(zip(found["fields"], row, strict=True))["id"] for row in found["rows"]] == [
        *("iteration_0001:0", "iteration_0002:0", "iteration_0002:1"),
    ]


async def test_a_transcript_has_the_text_and_a_value_of_each_signal_a_token(run: Path) -> None:
    async with looking(run) as (client, _):
        said = (await client.get("api/rollout?id=iteration_0001:0&lane=0")).json()
    spans = [s for w in said["windows"] for s in w["spans"]]
    sampled = [s for s in spans if s["kind"] == "sampled"]
    assert said["credit"]
    assert "List the airports." in spans[0]["text"]
    assert "create_subagent" in "".join(sampled[0]["pieces"])
    assert [s["turn"] for s in sampled] == list(range(len(sampled)))
    for name in ("logprob", "advantage", "value", "ratio"):
        assert [len(s[name]) for s in sampled] == [len(s["ids"]) for s in sampled]


async def test_a_subagent_whose_checkpoint_is_gone_is_read_with_the_policys_tokenizer_and_that_is_said(
    run: Path,
) -> None:
    async with looking(run) as (client, _):
        said = (await client.get("api/rollout?id=iteration_0001:0&lane=1")).json()
    assert not said["credit"]
    assert "policy's tokenizer" in said["note"]


async def test_without_any_tokenizer_tokens_are_numbers(run: Path) -> None:
    (run / "policy" / "tokenizer.json").unlink()
    async with looking(run) as (client, _):
        said = (await client.get("api/rollout?id=iteration_0001:0&lane=0")).json()
    assert re.fullmatch(r"(⟨\d+⟩)+", said["windows"][0]["spans"][0]["text"])
    assert "shown as numbers" in said["note"]


async def test_what_is_not_there_is_a_404_with_a_reason(run: Path) -> None:
    async with looking(run) as (client, _):
        answers = [
            await client.get(f"api/rollout?id={q}") for q in ("x:0", "iteration_0001:9", "iteration_0001:0&lane=9")
        ]
    assert [a.status_code for a in answers] == [404, 404, 404]
    assert answers[0].json() == {"error": "no rollout 'x:0'"}


async def test_nobody_learns_anything_without_the_key(run: Path) -> None:
    async with looking(run) as (_, viewer), httpx.AsyncClient() as stranger:
        root = viewer.address.rsplit("/", 2)[0]
        answers = [await stranger.get(f"{root}/{p}") for p in ("", "guess/", "guess/api/run", "guess/style.css")]
    assert [a.status_code for a in answers] == [404] * 4
    assert all("seen" not in a.text and "key" not in a.headers for a in answers)


async def test_a_browser_that_was_there_before_is_led_to_the_page(run: Path) -> None:
    async with looking(run) as (client, viewer):
        await client.get("")
        answer = await client.get(viewer.address.rsplit("/", 2)[0] + "/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/" + viewer.address.rsplit("/", 2)[1] + "/")


async def test_it_listens_on_this_machine_alone(run: Path) -> None:
    async with looking(run) as (_, viewer):
        assert viewer.address.startswith("http://127.0.0.1:")


async def test_a_page_may_load_nothing_from_elsewhere(run: Path) -> None:
    async with looking(run) as (client, _):
        answer = await client.get("")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    texts = [p.read_text() for p in PAGE.iterdir()]
    assert {u for t in texts for u in re.findall(r"https?://[\w./]+", t)} == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
async def test_a_page_is_told_when_there_is_more(run: Path) -> None:
    async with looking(run) as (_, viewer), aclosing(viewer.news()) as news:
        first = json.loads((await anext(news)).removeprefix(b"data: "))
        add_iteration(run, 3, rollouts(2, 3))
        second = json.loads((await anext(news)).removeprefix(b"data: "))
    assert (first["rollouts"], first["metrics"]) == (3, 2)
    assert (second["rollouts"], second["metrics"]) == (5, 3)


async def test_a_metric_that_is_not_finite_is_null_on_the_page(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/drift_mean": NaN, "train/drift_max": Infinity}\n')
    async with looking(run) as (client, _):
        [row] = (await client.get("api/metrics?from=2")).json()["rows"]
    assert row == {"step": 3, "train/drift_mean": None, "train/drift_max": None}


# --- forks ---------------------------------------------------------------------------------


async def test_a_fork_is_run_recorded_and_listed(run: Path) -> None:
    asked = {"id": "iteration_0001:0", "agent": "main", "turn": 1, "results": {"0": "| r | 5 |"}}
    async with looking(run) as (client, _):
        made = (await client.post("api/fork", json=asked)).json()
        branch = (await client.get(f"api/rollout?id={made['id']}")).json()
        said = (await client.get(f"api/rollout?id={made['id']}&lane=0")).json()
    assert made == {"id": "branches:0"}
    assert branch["made_of"] == asked
    assert said["came"][1][0] == "| r | 5 |"
    assert (run / "forks" / "branches.rollouts").exists()


async def test_a_fork_says_what_it_is_told_to_say(run: Path) -> None:
    said = '<tool_call>\n{"name": "echo", "arguments": {"text": "other"}}\n</tool_call><|im_end|>'
    asked = {"id": "iteration_0001:0", "agent": "main", "turn": 0, "say": said}
    async with looking(run) as (client, _):
        made = (await client.post("api/fork", json=asked)).json()
        agent = (await client.get(f"api/rollout?id={made['id']}&lane=0")).json()
    assert agent["came"][0] == ["other"]
    first = agent["windows"][0]["spans"][1]
    assert (first["kind"], first["turn"], first["version"]) == ("sampled", 0, -1)
    assert "other" in "".join(first["pieces"])


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"turn": 9}, 422, "main: turn 9, want one from 0 to 3"),
        ({"agent": "nobody"}, 422, "nobody: its record cannot be gone on from, want one of the native loop"),
        ({"say": "<tool_call>\nno JSON\n</tool_call>"}, 422, "does not read"),
        ({"shell": "ls"}, 422, "unknown field `shell`"),
        ({"id": "iteration_0009:0"}, 404, "no rollout 'iteration_0009:0'"),
    ],
)
async def test_a_fork_that_cannot_be_made_is_refused(
    run: Path, change: dict[str, object], status: int, reason: str
) -> None:
    async with looking(run) as (client, _):
        answer = await client.post("api/fork", json={"id": "iteration_0001:0", "agent": "main", "turn": 0, **change})
    assert answer.status_code == status
    assert reason in answer.json()["error"]
    assert not (run / "forks").exists()


async def test_nobody_forks_without_the_key(run: Path) -> None:
    async with looking(run) as (client, viewer):
        root = viewer.address.rsplit("/", 2)[0]
        await client.get("")  # a cookie alone is not enough
        answer = await client.post(
            f"{root}/guess/api/fork", json={"id": "iteration_0001:0", "agent": "main", "turn": 0}
        )
    assert answer.status_code == 404


# --- the command ---------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="no run here"):
        view_command([str(tmp_path)], Console(quiet=True))


def test_a_folder_of_runs_has_them_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        run_folder(tmp_path / name)
    with pytest.raises(RunDirError, match="holds some: a, b; want one of them"):
        RunView(tmp_path)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="'70000', want 0 to 65535"):
        view_command(["x", "--port", "70000"], Console(quiet=True))


@pytest.mark.parametrize(
    ("platform", "environment", "screen"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "x"}, True),
        ("darwin", {}, True),
    ],
)
def test_a_browser_is_opened_where_there_is_a_screen(platform: str, environment: dict[str, str], screen: bool) -> None:
    assert has_screen(platform, environment) is screen
