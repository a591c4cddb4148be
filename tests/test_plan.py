"""`swarm-rl plan`: processes and their room, tokens, and what the command prints and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.cli import RECIPES, main
from recipes.compaction.run import compaction_run
from recipes.config import Limits, Recipe, TaskMix
from recipes.gpu import wide_search_4b, wide_search_30b
from recipes.overrides import apply
from recipes.placement import Placement, Serving
from recipes.plan.command import plan, size_at
from recipes.plan.fit import place, problems
from recipes.plan.machine import Cluster, Node, parsed, this_machine
from recipes.plan.memory import FLOAT, GIB, MIB, Memory, ModelSize
from recipes.plan.processes import Process, Sizes, processes_of, row_tokens
from recipes.plan.tokens import Tokens, at_most, expected, measured, of_rollouts
from recipes.wide_search import wide_search
from swarm.context import ContextPolicy
from swarm.folders import CheckpointError
from swarm.records import write
from swarm.rl.critic import CriticConfig
from swarm.rl.losses import KLConfig
from swarm.types import Ledger
from tests.rl_cases import prompt as shown
from tests.rl_cases import rollout, said
from tests.test_train import SMALL as SHORT

SMALL = ModelSize("qwen3", 10, 4, 2, 2, 1, 2, 6, tied=True, width=FLOAT)
NODE = Node(cpus=4, memory=16 * GIB)
GPUS = Node(cpus=96, memory=1024 * GIB, gpus=8, gpu_memory=80 * GIB)


def processes(recipe: Recipe, node: Node = NODE) -> dict[str, Process]:
    return {p.name: p for p in processes_of(recipe, Sizes(SMALL, (SMALL,)), node)}


# --- processes -------------------------------------------------------------------------


def test_everything_stands_in_one_process_by_default():
    (one,) = processes(wide_search()).values()
    assert one.parts == ("world", "engines", "learner")
    assert one.gpus == 0
    assert one.host.cache == 2 * 1024 * MIB


def test_what_a_learner_holds_by_hand():
    """308 parameters; a critic of one layer has 176, and a head of 5."""
    recipe = replace(Recipe(), ppo=replace(Recipe().ppo, critic=CriticConfig(layers=1)))
    learner = processes(replace(recipe, placement=Placement(learners=2)))["learner 1"].host
    assert learner.weights == 4 * (308 + 176 + 5)
    assert learner.gradients == 4 * 308
    assert learner.optimizer == 2 * 4 * (308 + 176)


def test_a_reference_is_one_more_copy_of_the_weights():
    def weights(recipe: Recipe) -> int:
        return processes(replace(recipe, placement=Placement(learners=2)))["learner 1"].host.weights

    kl = replace(Recipe(), ppo=replace(Recipe().ppo, kl=KLConfig(coef=0.1)))
    assert weights(kl) - weights(Recipe()) == 4 * 308


def test_a_row_may_be_longer_than_a_micro_batch():
    assert row_tokens(wide_search()) == 8192
    assert row_tokens(compaction_run()) == 4096
    assert row_tokens(replace(compaction_run(), system="full_window")) == 8192


def test_servers_hold_the_larger_of_the_models_that_share_them():
    recipe = replace(wide_search(), engine="server", placement=Placement(engines=3))
    large = replace(SMALL, ffn=600)
    made = processes_of(recipe, Sizes(SMALL, (large, SMALL)), NODE)
    assert [p.name for p in made] == ["main", "server 1", "server 2", "server 3", "server 4"]
    assert made[0].host.cache == 0
    assert [p.host.weights for p in made[1:]] == [4 * (308 + 2 * 3 * 4 * 594)] * 3 + [4 * 308]


def test_frozen_models_that_take_turns_have_one_engine():
    large = replace(SMALL, ffn=600)
    turns = replace(wide_search(), placement=Placement(subagents="turns"))
    for recipe, engines in ((turns, 2), (wide_search(), 3)):
        (one,) = processes_of(recipe, Sizes(SMALL, (SMALL, large)), NODE)
        assert one.host.cache == engines * 1024 * MIB


def test_workers_have_engines_of_their_own_and_reserve_cores():
    recipe = replace(wide_search(), placement=Placement(workers=2, worker_cpus=1.5, learners=2))
    made = processes(recipe)
    assert list(made) == ["main", "learner 1", "learner 2", "worker 1", "worker 2"]
    assert made["worker 1"].cpus == 1.5
    assert made["worker 1"].host.cache == 2 * 1024 * MIB
    assert made["main"].host.cache == 2 * 1024 * MIB


def test_a_gpu_holds_what_is_trained_and_the_node_the_file():
    made = processes(replace(wide_search(), placement=Placement(learners=2, learner_gpus=1)), GPUS)
    assert made["learner 2"].device.optimizer > 0
    assert made["learner 2"].host.optimizer == 0
    assert made["learner 2"].host.weights == 4 * 308


# --- room ------------------------------------------------------------------------------


def on(name: str, gpus: float = 0.0, cpus: float = 0.0, size: int = 0) -> Process:
    return Process(name, (), Memory(weights=size), gpus, Memory(cache=size if gpus else 0), cpus)


def test_processes_of_this_machine_stand_on_the_first_node_and_actors_where_least_is():
    two = Cluster(NODE, 2)
    placed = place([on("main"), on("server 1"), on("a", cpus=1), on("b", cpus=1), on("c", cpus=4)], two)
    assert [p.node for p in placed] == [0, 0, 0, 1, None]


def test_gpus_are_given_out_in_order_and_shared_where_asked():
    one = Cluster(replace(GPUS, gpus=3))
    placed = place([on("a", 1), on("b", 0.5), on("c", 0.5), on("d", 2), on("e", 1)], one)
    assert [p.gpus for p in placed] == [(0,), (1,), (1,), (), (2,)]
    assert placed[3].node is None


def test_what_is_too_large_is_named_with_its_largest_part():
    one = Cluster(NODE)
    placed = place([on("main", size=10 * GIB), on("server 1", size=7 * GIB)], one)
    (line,) = problems(None, Sizes(SMALL), placed, one)
    assert line.startswith("node 1 memory: main, server 1 take 17.0 of 16.0 GiB, of which weights 17.0; want ")
    assert problems(None, Sizes(SMALL), place([on("main", size=16 * GIB)], one), one) == []


def test_a_gpu_that_is_too_small_is_told_from_its_node():
    one = Cluster(GPUS)
    (line,) = problems(None, Sizes(SMALL), place([on("a", 1, size=81 * GIB)], one), one)
    assert line.startswith("node 1 GPU 0: a take 81.0 of 80.0 GiB, of which cache 81.0; want a smaller --serving")


def test_what_finds_no_room_says_what_it_asked():
    one = Cluster(NODE)
    (line,) = problems(None, Sizes(SMALL), place([on("a", 1, 2.0), on("b", 1)], one), one)
    assert line.startswith("no room for a and 1 more, 1 GPUs and 2 cores each, on this machine: 4 cores, 16.0 GiB, no")


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        # A token has 32 bytes, so that one MiB has room for 32768.
        (replace(wide_search(), serving=Serving(cache_mib=1), main=Limits(9, 32769, 9)),
         "serving.cache_mib = 1: room for 32768 tokens of the policy, a context has 32769; want --serving.cache_mib 2"),
        (replace(wide_search(), engine="vllm", serving=Serving(tensor_parallel=3)),
         "serving.tensor_parallel = 3 with 2 heads of the policy; want a divisor"),
    ],
)  # fmt: skip
def test_what_an_engine_would_refuse_is_told_before(recipe: Recipe, line: str):
    found = problems(recipe, Sizes(SMALL, (SMALL,)), [], Cluster(NODE))
    assert found[0].startswith(line)


def test_an_embedded_engine_serves_one_family():
    mixed = Sizes(SMALL, (replace(SMALL, family="llama"),))
    assert problems(wide_search(), mixed, [], Cluster(NODE)) == [
        "engine = 'embedded' with a subagent of family llama; want --engine vllm"
    ]


def test_a_learner_is_not_put_on_the_gpu_of_a_server():
    recipe = replace(wide_search_4b(), placement=Placement(engines=2))
    sizes = Sizes(SMALL, (SMALL,))
    assert problems(recipe, sizes, [], Cluster(GPUS))[0].startswith("placement.learner_gpus = 0: ")
    assert problems(recipe, sizes, [], Cluster(NODE)) == []


# --- tokens ----------------------------------------------------------------------------

TOY = replace(
    Recipe(),
    episodes=10,
    tasks=TaskMix(budget=(4, 4)),
    main=Limits(turn_tokens=16, context=1000, steps=40),
    child=Limits(turn_tokens=8, context=30, steps=9),
)


def test_limits_bound_the_tokens_of_an_iteration():
    # 5 turns of 16; 20 assignments of 10 turns of 8, but at most a window of 30; a row is a context.
    assert at_most(TOY) == Tokens(10 * 80, 10 * 20 * 30, 10 * 1000)
    assert at_most(replace(TOY, spawn=False)).subagents == 0


def test_windows_that_are_rewritten_hold_more():
    policy = ContextPolicy("compaction", threshold=20, summary_tokens=4, limit=2)
    recipe = replace(TOY, main=Limits(turn_tokens=16, context=30, steps=40, rewriting=policy))
    # 80 and two summaries of 4, of three windows of 30 each.
    assert at_most(recipe) == Tokens(880, 6000, 900)


def test_the_expected_tokens_follow_the_stated_assumption():
    # Half of 5 turns, an eighth of 16 each; half of 20 assignments, each half of 10 turns of one token; a quarter.
    assert expected(TOY) == Tokens(10 * 5, 10 * 10 * 5, 10 * 250)


def test_an_average_budget_is_that_of_its_distribution():
    wide = replace(TOY, tasks=TaskMix(budget=(10, 40)))
    # (40 − 10) / ln 4 = 21.64 turns and the last one, half of them, two tokens each.
    assert expected(wide).sampled == round(10 * (21.6404 + 1))


def test_measured_tokens_are_those_of_the_last_recorded_iteration(tmp_path: Path):
    assert measured(tmp_path, 5) is None
    child = rollout([shown(1, 2), said(3, 4)])
    child = replace(child, ledger=Ledger(tokens_sampled=2))
    root = rollout([shown(1), said(2, 3, 4)])
    root = replace(root, children=(replace(child, children=(child,)),), ledger=Ledger(tokens_sampled=3))
    assert of_rollouts([root]) == Tokens(3, 4, 4)
    write(tmp_path / "rollouts" / "iteration_0001.rollouts", [child])
    write(tmp_path / "rollouts" / "iteration_0002.rollouts", [root, root])
    assert measured(tmp_path, 5) == Tokens(15, 20, 20)


# --- clusters --------------------------------------------------------------------------


def test_what_nvidia_smi_says_is_read():
    assert parsed("143771\n143771\n") == [143771 * MIB] * 2
    assert parsed("") == []


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gpus", "8"], "cluster: no --cpus, want --cpus and --memory of a node, --gpus and --gpu-memory if any"),
        (["--cpus", "2", "--memory", "8", "--gpus", "1"], "cluster: no --gpu-memory, want"),
        (["--cpus", "0", "--memory", "8"], "cluster: cpus = 0, want 1 or more"),
        (["--cpus", "2", "--memory", "8", "--nodes", "0"], "cluster: nodes = 0, want 1 or more"),
        (["--cpus", "x", "--memory", "8"], "argument --cpus: invalid int value: 'x'"),
        (["--ppo.lrr", "1"], "unknown field --ppo.lrr, nearest: --ppo.lr"),
        (["--start", "nowhere"], "nowhere: no config.json, want a checkpoint, or a folder named Qwen3-4B or"),
    ],
)
def test_a_cluster_or_a_recipe_that_is_none_is_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "wide_search", *argv]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"swarm-rl: {line}")


def test_a_config_that_is_not_understood_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(CheckpointError, match=r"config\.json: model_type 'mamba', want one of qwen3"):
        size_at(tmp_path)


# --- the command -----------------------------------------------------------------------

DESCRIBED = ["--cpus", "96", "--memory", "2048", "--gpus", "8", "--gpu-memory", "141"]


@pytest.mark.parametrize("name", [n for n in RECIPES if n != "cold_start_polish"])
def test_every_recipe_has_a_plan_that_fits_a_large_cluster(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", name, "--nodes", "2", *DESCRIBED, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"]
    assert all(p["node"] is not None for p in told["processes"])


def test_the_recipe_for_one_node_fits_gpus_of_80_gib_and_not_of_40():
    assert plan(wide_search_4b(), Cluster(GPUS)).problems == ()
    small = plan(wide_search_4b(), Cluster(replace(GPUS, gpu_memory=40 * GIB))).problems
    assert len(small) == 8
    assert "activations" in small[0]
    assert "cache" in small[-1]


def test_the_recipe_for_two_nodes_wants_both():
    node = replace(GPUS, gpu_memory=141 * GIB)
    assert plan(wide_search_30b(), Cluster(node, 2)).problems == ()
    (line,) = plan(wide_search_30b(), Cluster(node)).problems
    assert line.startswith("no room for worker 4 and 7 more, 1 GPUs and 8 cores each")


def test_a_plan_that_does_not_fit_ends_with_1_and_says_why(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "wide_search_4b", "--cpus", "8", "--memory", "64"]) == 1
    out = capsys.readouterr().out
    assert "does not fit no room for learner 1 and 1 more, 1 GPUs each" in out
    assert "models/Qwen3-4B is not here: its size is that of the card Qwen3-4B" in out


def test_overrides_change_the_plan(capsys: pytest.CaptureFixture[str]):
    argv = ["plan", "wide_search", "--cpus", "4", "--memory", "64", "--json"]
    main([*argv, "--episodes", "128", "--engine", "server", "--placement.engines", "4"])
    told = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in told["processes"]] == ["main", "server 1", "server 2", "server 3", "server 4"]
    assert told["tokens"]["at most"]["sampled"] == 128 * 8192


def test_the_shipped_recipe_fits_this_machine_in_words(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "wide_search"]) == 0
    out = capsys.readouterr().out
    assert "policy: qwen3, 1,115,520 parameters" in out
    assert "KV cache" in out
    assert "expected: an agent takes half of the turns" in out
    assert out.rstrip().endswith("it fits")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_takes_about_the_memory_that_its_plan_says(tmp_path: Path):
    argv = [*SHORT, "--iterations", "1", "--serving.cache_mib", "32", "--main.context", "4096"]
    (one,) = plan(apply(wide_search(), argv), this_machine()).placed
    # The process tells its own peak: what the system tells of a child counts its parent's memory until it is replaced.
    code = (
        "import sys; from recipes.cli import main; code = main();"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0]); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "train", "wide_search", "--out", str(tmp_path / "run"), *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.5 < int(done.stdout.split()[-1]) * 1024 / one.process.host.total <= 1
