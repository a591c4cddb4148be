"""Compares finished runs, several seeds of each recipe: the numbers, page and pictures of `docs/results.md`.

    --group swarm=runs/wide_search-1,runs/wide_search-2 --group single_agent=...   →   OUT/results.md, .json, *.png

Equal folders give equal files. Not here: running anything, the numbers (`recipes.compare.numbers`), the words
(`recipes.compare.page`) and the pictures (`recipes.compare.charts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from recipes.ablations import serial_collapse, serial_collapse_parl, spurious, spurious_finish
from recipes.arguments import UsageError, parser_of, unknown
from recipes.compare import charts, page
from recipes.compare.numbers import CURES, Run, ablation, cure, headline
from recipes.config import Recipe
from recipes.episodes import read
from recipes.overrides import to_json
from recipes.report import ReportError, replace
from recipes.wide_search import single_agent, wide_search
from swarm.rundir import read_done, read_metrics, read_recipe

GROUPS: Mapping[str, Callable[[], Recipe]] = {
    "swarm": wide_search,
    "single_agent": single_agent,
    "serial_collapse": serial_collapse,
    "serial_collapse_parl": serial_collapse_parl,
    "spurious": spurious,
    "spurious_finish": spurious_finish,
}
"""Group → the recipe that its runs were made with."""
_NEEDED = ("seed", "spawn", "iterations", "episodes", "tasks", "parl", "evaluation")
_MACHINE = frozenset(
    {
        *("seed", "threads", "at_once", "wandb", "checkpoint_every", "start", "subagent"),
        *("publish", "publish.store", "publish.every", "publish.last", "publish.best", "publish.name"),
    }
)
"""Fields that may differ between the seeds of a group; the two checkpoints are compared by their sha256 instead."""


def load(path: Path) -> Run:
    """Reads a run, of this version's recipe or of another's. Raises ReportError where it is unfinished or not
    a training run, RunDirError or EpisodesError where it is none or does not read.
    """
    recipe = read_recipe(path)
    missing = [name for name in _NEEDED if name not in recipe]
    if missing:
        raise ReportError(f"{path}: recipe.json has no {missing[0]}, want that of a training run")
    done = read_done(path)
    if done is None:
        raise ReportError(
            f"{path}: the run is not finished, want one with a done.json (swarm-rl train goes on with it)"
        )
    if not (path / "episodes.jsonl").is_file():
        raise ReportError(f"{path}: no episodes.jsonl, want the closing evaluation of the run")
    metrics = [row for row in read_metrics(path) if "rollout/item_f1" in row]
    if not metrics:
        raise ReportError(f"{path}: metrics.jsonl has no training rollouts")
    return Run(path, recipe, metrics, read(path / "episodes.jsonl"), done)


def write_results(groups: Mapping[str, Sequence[Path]], out: Path) -> dict[str, Any]:
    """Writes results.md, results.json and the pictures into `out`; returns what results.json holds.

    `groups`: group → its run folders, one a seed. Raises what `load` and `compare` raise, and OSError.
    """
    runs = {name: [load(path) for path in groups[name]] for name in GROUPS if name in groups}
    results = compare(runs)
    out.mkdir(parents=True, exist_ok=True)
    pictures = charts.draw_all(results, {name: [r.metrics for r in found] for name, found in runs.items()}, out)
    replace(out / "results.md", page.markdown(results, pictures).encode())
    replace(out / "results.json", msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return results


def compare(groups: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The content of results.json: `headline` and `ablations`, as far as their groups are there, and `groups`.

    Raises ReportError where runs cannot be compared: the message names the runs and the field.
    """
    groups = {name: sorted(runs, key=lambda r: r.recipe["seed"]) for name, runs in groups.items()}
    for name, runs in groups.items():
        _check_group(name, runs)
    if "single_agent" in groups:
        if "swarm" not in groups:
            raise ReportError("group single_agent: nothing to compare it with, want the group swarm too")
        _check_evaluation(groups["swarm"][0], groups["single_agent"][0])
    ablations = {name: ablation(runs) for name, runs in groups.items() if any(name in cure for cure in CURES)}
    swarm, single = groups.get("swarm", []), groups.get("single_agent", [])
    differing = _differing(swarm[0], single[0]) if swarm and single else {}
    return {
        "headline": {**headline(swarm, single), "differing_fields": differing} if swarm else None,
        "ablations": ablations,
        "cures": [cure(ablations, *c) for c in CURES if c[0] in ablations and c[1] in ablations],
        "groups": {name: _described(name, runs) for name, runs in groups.items()},
    }


# --- which runs can be compared --------------------------------------------------------


def _check_group(name: str, runs: Sequence[Run]) -> None:
    if not runs:
        raise ReportError(f"group {name}: no runs, want one or more")
    seen: dict[int, Run] = {}
    for run in runs:
        seed = run.recipe["seed"]
        if seed in seen:
            raise ReportError(f"{seen[seed].path} and {run.path} both have the seed {seed}")
        seen[seed] = run
        if run.recipe["spawn"] != GROUPS[name]().spawn:
            raise ReportError(f"{run.path}: spawn is {run.recipe['spawn']}, want a run of {GROUPS[name].__name__}")
        _check_same(runs[0], run, _fixed(runs[0]), _fixed(run))


def _check_evaluation(swarm: Run, single: Run) -> None:
    """Both were evaluated on the same tasks of the same world, within the same budgets."""
    a, b = ({k: v for k, v in _fixed(r).items() if k.startswith(("world.", "evaluation."))} for r in (swarm, single))
    _check_same(swarm, single, a, b)


def _differing(swarm: Run, single: Run) -> dict[str, Any]:
    """Fields, other than those that make a single agent, in which the two trainings differ: name → both values."""
    a, b = _fixed(swarm), _fixed(single)
    return {k: [a[k], b.get(k)] for k in a if a[k] != b.get(k) and k != "spawn" and not k.startswith("parl.")}


def _check_same(a: Run, b: Run, fields_a: Mapping[str, Any], fields_b: Mapping[str, Any]) -> None:
    for key, value in fields_a.items():
        other = fields_b.get(key)
        if other != value:
            raise ReportError(f"{a.path} and {b.path} cannot be compared: {key} is {value} and {other}")


def _fixed(run: Run) -> dict[str, Any]:
    """What the seeds of one group have in common, by dotted name."""
    fields = {k: v for k, v in flat(run.recipe).items() if k not in _MACHINE}
    frozen = run.summary.get("frozen_sha256", {}).get("before")
    return {**fields, "start_sha256": run.summary.get("start_sha256"), "frozen_sha256.before": frozen}


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"ppo": {"lr": 1}}` as `{"ppo.lr": 1}`."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def _described(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What the page says about how a group was made.

    `overrides`: fields that were set to other values than the recipe's own; `foreign`: fields that it has not.
    """
    own = flat(to_json(GROUPS[name]()))
    mine = {k: v for k, v in flat(runs[0].recipe).items() if k not in _MACHINE}
    frozen = [run.summary.get("frozen_sha256", {}) for run in runs]
    recipe = {k: v for k, v in runs[0].recipe.items() if k not in _MACHINE}
    return {
        "recipe": GROUPS[name].__name__,
        "seeds": [run.recipe["seed"] for run in runs],
        "overrides": {k: v for k, v in mine.items() if k in own and v != own[k]},
        "foreign": [k for k in mine if k not in own],
        "fields": recipe,
        "wall_seconds": [run.summary.get("wall_seconds") for run in runs],
        "lambda_final": [run.summary.get("lambda_final") for run in runs],
        "frozen_unchanged": all(f.get("before") is not None and f["before"] == f.get("after") for f in frozen),
        "start_sha256": runs[0].summary.get("start_sha256"),
        "failed_episodes": sum(e.failed for run in runs for e in run.episodes),
    }


# --- the command -----------------------------------------------------------------------


def compare_command(argv: list[str], console: Console) -> int:
    """`swarm-rl compare OUT --group NAME=RUN[,RUN...] ...`; raises what a user can get wrong, one line each."""
    words = (
        "Compares finished runs, several seeds a group, and writes OUT/results.md, OUT/results.json and pictures.\n"
        f"Groups: {', '.join(GROUPS)}."
    )
    example = "swarm-rl compare docs --group swarm=runs/wide_search-1,runs/wide_search-2 --group single_agent=..."
    parser = parser_of("compare", "OUT --group NAME=RUN[,RUN...] [--group ...]", words, example)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write into, for example docs")
    parser.add_argument(
        "--group",
        action="append",
        required=True,
        metavar="NAME=RUN[,RUN...]",
        help="the runs of one recipe, a seed each",
    )
    o = parser.parse_args(argv)
    results = write_results(parse_groups(o.group), o.out)
    for line in page.answer(results):
        console.print(escape(line), highlight=False)
    console.print(f"results: {escape(str(o.out / 'results.md'))}", highlight=False)
    return 0


def parse_groups(texts: Sequence[str]) -> dict[str, list[Path]]:
    """`["swarm=a,b"]` as `{"swarm": [Path("a"), Path("b")]}`. Raises UsageError."""
    groups: dict[str, list[Path]] = {}
    for text in texts:
        name, _, paths = text.partition("=")
        if name not in GROUPS:
            raise UsageError(unknown("group", name, GROUPS))
        if name in groups:
            raise UsageError(f"--group {name} is given twice, want its runs in one, separated by commas")
        groups[name] = [Path(p.strip()) for p in paths.split(",") if p.strip()]
        if not groups[name]:
            raise UsageError(f"--group {text!r} names no run, want {name}=RUN[,RUN...]")
    return groups
