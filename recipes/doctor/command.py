"""`swarm-rl doctor`: checks a machine before a run, each finding in one line with its remedy.

    facts of this machine ─▶ findings        at once
    engines, Ray, imports ─▶ findings        really tried, all at the same time, each with a deadline

Not here: what follows from a fact (`recipes.doctor.findings`), and what is tried in processes of its own
(`recipes.doctor.tries`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import sys
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter
from typing import Any

import torch
import trio
from rich.console import Console
from rich.markup import escape

from recipes.arguments import UsageError, parser_of, unknown
from recipes.compaction.study import Study
from recipes.config import SHIPPED, Training
from recipes.doctor import findings
from recipes.doctor.findings import Finding
from recipes.doctor.tries import FAILURES, Tried, engines, one_line
from recipes.overrides import apply, to_json
from recipes.plan.command import Plan, Planned, folders_of, plan
from recipes.plan.machine import Cluster, free_bytes, this_machine
from recipes.plan.memory import parameters
from recipes.plan.processes import on_ray
from recipes.publish.by_hand import with_start
from recipes.track import mode_of
from swarm.checkpoint import ref_of
from swarm.folders import CheckpointError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
IMPORT_NAMES = ("swarm", "orchestrator", "subagents", "rewards", "envs", "recipes")
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_SECONDS, _ENGINE_SECONDS, _RAY_SECONDS = 60.0, 300.0, 90.0
_LARGE = 4 << 30
"""Bytes of weights beyond which a checksum takes too long for a check."""
_SHM = Path("/dev/shm")
_TOKEN_BYTES = 3
"""A recorded token with its log-probability, compressed: measured here."""

Check = Callable[[], Awaitable[list[Finding]]]


def diagnose(recipe: Any, out: Path, say: Callable[[str], None]) -> list[Finding]:
    """All findings for a recipe that would run into `out`; `say` hears what is being tried.

    Raises UsageError for what is no recipe of a run, CheckpointError for a model of which nothing is known.
    """
    recipe = recipe.run if isinstance(recipe, Study) else recipe
    cluster = this_machine()
    planned = plan(recipe, cluster)
    found = at_once(recipe, out, cluster, planned)
    return [*found, *trio.run(_tried, recipe, _missing(found), say)]


def unready(recipe: Training) -> list[Finding]:
    """What keeps a recipe from beginning here, before anything is loaded: packages, GPUs, weights, room, Ray."""
    cluster = this_machine()
    found = [*_packages(recipe, cluster), _gpus(cluster), *_checkpoints(folders_of(recipe), read=False),
             *_memory(recipe, cluster, plan(recipe, cluster))]  # fmt: skip
    wrong = [f for f in found if f.level == "fail"]
    if not wrong and recipe.placement.address:
        wrong = [f for f in trio.run(partial(_try, recipe, "ray", _RAY_SECONDS)) if f.level == "fail"]
    return wrong


def guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(recipe, out, clean=, console=)`, refused in one line where the recipe is not ready for."""

    def checked(recipe: Training, out: Path, *, clean: bool = False, console: Console | None = None) -> Any:
        wrong = unready(recipe)
        if wrong:
            more = f" (and {len(wrong) - 1} more: swarm-rl doctor names them)" if len(wrong) > 1 else ""
            raise UsageError(f"not ready: {wrong[0]}{more}")
        return run(recipe, out, clean=clean, console=console)

    return checked


# --- facts of this machine -------------------------------------------------------------


def at_once(recipe: Planned, out: Path, cluster: Cluster, planned: Plan) -> list[Finding]:
    """Everything that is known without starting anything."""
    training = recipe if isinstance(recipe, Training) else None
    served = training is not None and training.engine == "server"
    shipped = sorted(p.parent for p in SHIPPED.parent.glob("*/config.json"))
    return [
        findings.python(platform.python_version(), _project()["requires-python"]),
        *_packages(recipe, cluster),
        findings.threads(os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1, recipe.threads),
        findings.bf16(_asks_bf16(recipe), _native_bf16(), torch.cuda.is_available()),
        _gpus(cluster),
        *_memory(recipe, cluster, planned),
        _disk(recipe, out, planned),
        *([_shared_memory(planned)] if served or (training is not None and on_ray(training)) else []),
        findings.ports(_port_error(), Path(gettempdir()), served),
        *([findings.tracking(mode_of(training.wandb, os.environ), _has_key())] if training is not None else []),
        *_checkpoints(list(dict.fromkeys([*folders_of(recipe), *shipped])), read=True),
    ]


def _project() -> dict[str, Any]:
    """What pyproject.toml asks for; of an installed copy, what its metadata does."""
    if PROJECT.exists():
        return tomllib.loads(PROJECT.read_text())["project"]
    for d in distributions(name="swarm-rl"):
        return {"requires-python": d.metadata["Requires-Python"], "dependencies": list(d.requires or ())}
    return {"requires-python": ">=3.11", "dependencies": []}


def _packages(recipe: Planned, cluster: Cluster) -> list[Finding]:
    project = _project()
    extras = _extras(recipe, cluster)
    more = [f"{r}; extra == '{e}'" for e, those in project.get("optional-dependencies", {}).items() for r in those]
    installed = {d.name.lower().replace("_", "-"): d.version for d in distributions()}
    return findings.packages([*project["dependencies"], *more], extras, installed)


def _extras(recipe: Planned, cluster: Cluster) -> frozenset[str]:
    """The optional parts that a recipe wants."""
    if not isinstance(recipe, Training):
        return frozenset()
    vllm = {"vllm-gpu" if cluster.gpus else "vllm-cpu"} if recipe.engine != "embedded" else set[str]()
    return frozenset(vllm | ({"ray"} if on_ray(recipe) else set[str]()))


def _asks_bf16(recipe: Planned) -> bool:
    if not isinstance(recipe, Training):
        return recipe.sft.bf16
    return recipe.ppo.bf16 or recipe.serving.dtype == "bfloat16"


def _native_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


def _gpus(cluster: Cluster) -> Finding:
    return findings.gpus(cluster.gpus, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _memory(recipe: Planned, cluster: Cluster, planned: Plan) -> list[Finding]:
    if isinstance(recipe, Training) and recipe.placement.address:
        seen = f"the run is on the Ray cluster at {recipe.placement.address!r}, not on this machine alone"
        return [Finding("warn", "memory", seen, "describe it to swarm-rl plan (--nodes, --gpus)")]
    here = sum(p.process.host.total for p in planned.placed if p.node == 0)
    return findings.memory(planned.problems, here, free_bytes())


def _disk(recipe: Planned, out: Path, planned: Plan) -> Finding:
    """Two trainer states and the one being written, the trained policy, and what is recorded."""
    learner = max((p.process for p in planned.placed), key=lambda p: (p.host + p.device).optimizer)
    memory, policy = learner.host + learner.device, planned.sizes.policy
    state = 2 * memory.gradients + memory.optimizer
    tokens = planned.tokens.get("expected")
    recorded = (tokens.trained + 4 * tokens.subagents) * _TOKEN_BYTES if tokens else 0
    times = recipe.iterations if isinstance(recipe, Training) else 0
    folder = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    needed = 3 * state + parameters(policy) * policy.width + times * recorded
    return findings.disk(folder, os.access(folder, os.W_OK), needed, shutil.disk_usage(folder).free)


def _shared_memory(planned: Plan) -> Finding:
    free = shutil.disk_usage(_SHM).free if _SHM.exists() else 0
    policy = planned.sizes.policy
    return findings.shared_memory(parameters(policy) * policy.width, free)


def _port_error() -> str:
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _has_key() -> bool:
    netrc = Path.home() / ".netrc"
    return bool(os.environ.get("WANDB_API_KEY")) or (netrc.exists() and "wandb" in netrc.read_text())


def _checkpoints(folders: Sequence[Path], *, read: bool) -> list[Finding]:
    """Folders whose weights are not what was saved, or missing; with `read` their checksums are computed."""
    wrong: dict[str, str] = {}
    unread: list[str] = []
    for folder in dict.fromkeys(folders):
        files = list(folder.glob("model*.safetensors"))
        if not (folder / "config.json").exists() or not files:
            wrong[str(folder)] = f"{folder} has no {'weights' if files or folder.exists() else 'checkpoint'}"
        elif read and sum(f.stat().st_size for f in files) > _LARGE:
            unread.append(str(folder))
        elif read:
            try:
                ref_of(folder)
            except CheckpointError as e:
                wrong[str(folder)] = str(e)
    return findings.checkpoints(len(folders) - len(wrong) - len(unread), wrong, unread)


def _missing(found: Sequence[Finding]) -> bool:
    return any(f.level == "fail" and f.topic == "checkpoints" for f in found)


# --- what is really tried --------------------------------------------------------------


async def _tried(recipe: Planned, missing: bool, say: Callable[[str], None]) -> list[Finding]:
    """Imports, engines and Ray, all at once; their findings in this order."""
    beside = [name for name in BESIDE_TORCH if find_spec(name) is not None]
    checks: dict[str, Check] = {f"importing {', '.join(beside) or 'metadata'}": partial(_clashes, beside)}
    if isinstance(recipe, Training):
        if not missing:
            checks[f"starting the {recipe.engine} engines, up to {_ENGINE_SECONDS:.0f} s"] = partial(_engines, recipe)
        if on_ray(recipe):
            where = recipe.placement.address or "on this machine"
            checks[f"Ray {where}, up to {_RAY_SECONDS:.0f} s"] = partial(_try, recipe, "ray", _RAY_SECONDS)
    found: dict[str, list[Finding]] = {}

    async def keep(name: str, check: Check) -> None:
        found[name] = await check()

    async with trio.open_nursery() as nursery:
        for name, check in checks.items():
            say(name)
            nursery.start_soon(keep, name, check)
    skipped = Finding("warn", "engines", "not started, a checkpoint is missing", "see checkpoints")
    return [f for name in checks for f in found[name]] + ([skipped] if missing else [])


async def _clashes(names: Sequence[str]) -> list[Finding]:
    broken: dict[str, str] = {}

    async def load(name: str) -> None:
        _, error = await _process([sys.executable, "-c", f"import {name}"], b"", _IMPORT_SECONDS)
        if error:
            broken[name] = error

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(load, name)
    owners = packages_distributions()
    others = {name: sorted(set(owners.get(name, ())) - {"swarm-rl"}) for name in IMPORT_NAMES}
    return findings.clashes({name: broken[name] for name in names if name in broken}, others)


async def _engines(recipe: Training) -> list[Finding]:
    """The embedded engines here, those of vLLM in a process that can be ended."""
    if recipe.engine != "embedded":
        return await _try(recipe, "engines", _ENGINE_SECONDS)
    began, words, error = perf_counter(), "the embedded engines", ""
    try:
        with trio.fail_after(_ENGINE_SECONDS):
            words = await engines(recipe)
    except FAILURES as e:
        error = one_line(e)
    except trio.TooSlowError:
        error = f"no answer in {_ENGINE_SECONDS:.0f} s"
    return [findings.started("engines", words, perf_counter() - began, error)]


async def _try(recipe: Training, what: str, seconds: float) -> list[Finding]:
    asked = {"try": what, "kind": type(recipe).__name__, "recipe": to_json(recipe)}
    command = [sys.executable, "-m", "recipes.doctor.tries"]
    line, error = await _process(command, json.dumps(asked).encode(), seconds)
    tried = Tried(seconds, "", error) if error else Tried(**json.loads(line))
    return [findings.started(what, tried.words or f"starting {what}", tried.seconds, tried.error)]


async def _process(command: Sequence[str], given: bytes, seconds: float) -> tuple[str, str]:
    """The last line that a process says, or what went wrong; it and what it started are ended in time."""
    with trio.move_on_after(seconds):
        done = await trio.run_process(
            command, stdin=given, capture_stdout=True, capture_stderr=True, check=False,
            start_new_session=True, deliver_cancel=_end,
        )  # fmt: skip
        said, complaint = (x.decode(errors="replace").strip().splitlines() for x in (done.stdout, done.stderr))
        if done.returncode == 0:
            return said[-1] if said else "", ""
        return "", complaint[-1][:300] if complaint else f"ended with {done.returncode}"
    return "", f"no answer in {seconds:.0f} s"


async def _end(process: trio.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- the command -----------------------------------------------------------------------


def doctor_command(argv: Sequence[str], recipes: Mapping[str, Callable[[], Any]], console: Console) -> int:
    """Shows the findings for a recipe on this machine; 1 where something fails."""
    words = (
        "Checks this machine before a run: packages, memory against the plan, disk, ports, checkpoints, and really\n"
        "starts the recipe's engines, and Ray where it is used. Ends with 1 if anything fails."
    )
    parser = parser_of("doctor", "[RECIPE] [--out FOLDER] [--FIELD VALUE ...]", words, "swarm-rl doctor wide_search")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="wide_search", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/RECIPE)")
    named = argv if (argv and not argv[0].startswith("--")) or {"-h", "--help"} & set(argv) else ["wide_search", *argv]
    o, rest = parser.parse_known_args(named)
    if o.recipe not in recipes:
        raise UsageError(unknown("recipe", o.recipe, recipes))
    recipe = with_start(apply(recipes[o.recipe](), rest))
    found = diagnose(recipe, o.out or Path("runs") / o.recipe, partial(_say, console))
    for finding in found:
        console.print(f"{_MARKS[finding.level]} {escape(str(finding))}", highlight=False, soft_wrap=True)
    count = {level: sum(f.level == level for f in found) for level in _MARKS}
    console.print(f"{len(found)} findings: {count['ok']} ok, {count['warn']} warnings, {count['fail']} failures")
    return 1 if count["fail"] else 0


_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def _say(console: Console, line: str) -> None:
    console.print(f"[dim]… {escape(line)}[/dim]", highlight=False)
