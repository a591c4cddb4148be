"""`swarm-rl plan RECIPE`: the processes of a run, where they find room, what they hold, and how many tokens there are.

    recipe, sizes of its models ─▶ processes ─▶ nodes and GPUs ─▶ what does not fit

Nothing is loaded: models are known by their config.json, or by a card where the weights are not here.
Not here: formulas (`recipes.plan.memory`), processes (`recipes.plan.processes`), room (`recipes.plan.fit`), tokens
(`recipes.plan.tokens`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes.arguments import UsageError, parser_of, unknown
from recipes.cold_start import ColdStart, ModelConfig
from recipes.compaction.start import TrailStart
from recipes.compaction.study import Study
from recipes.config import Recipe, Training
from recipes.gpu import CARDS
from recipes.grid.judging import JUDGED
from recipes.named import resolve
from recipes.overrides import apply
from recipes.plan.fit import Placed, names_of, notes, place, problems
from recipes.plan.machine import Cluster, add_cluster, cluster_of
from recipes.plan.memory import FLOAT, GIB, MIB, Memory, ModelSize, parameters, size_of
from recipes.plan.processes import Process, Sizes, processes_of
from recipes.plan.tokens import ASSUMED, Tokens, at_most, expected, measured
from swarm.checkpoint import ADAPTER_CONFIG
from swarm.folders import CheckpointError, read_json

Planned = Training | ColdStart | TrailStart
"""The recipes of one run."""
_PARTS = ("weights", "gradients", "optimizer", "cache", "activations", "program")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a run before it starts. It fits where there are no `problems`; `notes` are worth a look."""

    cluster: Cluster
    sizes: Sizes
    placed: tuple[Placed, ...]
    tokens: Mapping[str, Tokens]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def plan(recipe: Any, cluster: Cluster, run: Path | None = None) -> Plan:
    """The plan of a recipe of any kind on a cluster; `run` is a folder where a recorded run may be.

    Raises CheckpointError for a model whose size is not known, UsageError for what is no recipe of a run.
    """
    match recipe:
        case Study():
            count = len(recipe.seeds) * len(recipe.forms)
            one = plan(recipe.run, cluster, None)
            return Plan(one.cluster, one.sizes, one.placed, one.tokens, one.problems,
                        (f"{count} such runs, one after another", *one.notes))  # fmt: skip
        case Training():
            tokens = {"at most": at_most(recipe), "expected": expected(recipe)}
            found = None if run is None else measured(run, recipe.episodes)
            tokens |= {} if found is None else {f"as in {run}": found}
        case ColdStart() | TrailStart():
            tokens = {"an optimizer step, about": Tokens(0, 0, recipe.step_tokens)}
        case _:
            raise UsageError(f"plan: no plan for a {type(recipe).__name__}, want a recipe that trains")
    sizes, training = sizes_of(recipe), recipe if isinstance(recipe, Training) else None
    placed = place(processes_of(recipe, sizes, cluster.node), cluster)
    said = () if training is None else tuple(notes(training, sizes))
    wrong = tuple(problems(training, sizes, placed, cluster))
    return Plan(cluster, sizes, tuple(placed), tokens, wrong, (*_carded(recipe), *said))


# --- models ----------------------------------------------------------------------------


def sizes_of(recipe: Planned) -> Sizes:
    """The sizes of the models that a run loads."""
    if isinstance(recipe, ColdStart) and recipe.start is None:
        return Sizes(_made(recipe.model))
    policy, *rest = (size_at(folder) for folder in folders_of(recipe))
    frozen = len(served_of(recipe)) - 1 if isinstance(recipe, Training) else 0
    return Sizes(policy, tuple(rest[:frozen]), tuple(rest[frozen:]))


def folders_of(recipe: Planned) -> list[Path]:
    """The checkpoints that a run loads: those that are served, then the teachers."""
    if isinstance(recipe, Training):
        return [*served_of(recipe), *(teacher.path for teacher in recipe.ppo.distill.teachers)]
    return [] if recipe.start is None else [recipe.start]


def served_of(recipe: Training) -> list[Path]:
    """The checkpoints that have engines: of the policy, the subagents, other roles, and a judge. Adapters need none."""
    if not isinstance(recipe, Recipe):
        return [recipe.start]
    casts = [recipe.players(k) for k in (0, *map(int, recipe.swaps))]
    folders = dict.fromkeys(_folder(f) for cast in casts for f in cast)
    others = [f for f in folders if not (f / ADAPTER_CONFIG).exists()]
    judge = recipe.judging.checkpoint if recipe.verifier in JUDGED else None
    return [recipe.start, *others, *([_folder(judge)] if judge is not None else [])]


def _folder(written: Path) -> Path:
    """Where a checkpoint is, by its path or its name in the store; one that is not here may have a card."""
    try:
        return resolve(str(written))
    except CheckpointError:
        return written


def size_at(folder: Path) -> ModelSize:
    """The size of a checkpoint, by its config.json, or by the card of that name. Raises CheckpointError."""
    config = folder / "config.json"
    if not config.exists() and folder.name not in CARDS:
        raise CheckpointError(f"{folder}: no config.json, want a checkpoint, or a folder named {' or '.join(CARDS)}")
    try:
        return size_of(read_json(config) if config.exists() else CARDS[folder.name])
    except ValueError as e:
        raise CheckpointError(f"{config}: {e}") from e


def _carded(recipe: Planned) -> list[str]:
    missing = dict.fromkeys(folder for folder in folders_of(recipe) if not (folder / "config.json").exists())
    return [f"{folder} is not here: its size is that of the card {folder.name}" for folder in missing]


def _made(model: ModelConfig) -> ModelSize:
    return ModelSize("qwen3", model.vocab, model.hidden, model.layers, model.heads, model.kv_heads, model.head_dim,
                     model.ffn, tied=True, width=FLOAT)  # fmt: skip


# --- the command -----------------------------------------------------------------------


def plan_command(argv: Sequence[str], recipes: Mapping[str, Callable[[], Any]], console: Console) -> int:
    """Shows the plan of a recipe; 1 where it does not fit."""
    words = (
        "Shows, without loading anything, where a run's processes stand, what each holds of its node and of its GPUs,\n"
        "and how many tokens an iteration has. Ends with 1 where something does not fit."
    )
    example = "swarm-rl plan wide_search_4b --gpus 8 --gpu-memory 141 --memory 1024 --cpus 96"
    parser = parser_of("plan", "RECIPE [--out FOLDER] [--json] [--nodes N ...] [--FIELD VALUE ...]", words, example)
    parser.add_argument("recipe", metavar="RECIPE", help="one of those that `train` takes, with the same fields")
    parser.add_argument("--out", type=Path, help="the run folder, for measured tokens (default: runs/RECIPE)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_cluster(parser)
    o, rest = parser.parse_known_args(argv)
    if o.recipe not in recipes:
        raise UsageError(unknown("recipe", o.recipe, recipes))
    try:
        cluster = cluster_of(o)
    except ValueError as e:
        raise UsageError(str(e)) from e
    made = plan(apply(recipes[o.recipe](), rest), cluster, o.out or Path("runs") / o.recipe)
    if o.json:
        print(json.dumps(as_json(made), indent=1))
    else:
        show(made, console)
    return 1 if made.problems else 0


def as_json(made: Plan) -> dict[str, Any]:
    """The plan in bytes and counts."""
    return {
        "fits": not made.problems,
        "problems": list(made.problems),
        "notes": list(made.notes),
        "cluster": {"nodes": made.cluster.count, **asdict(made.cluster.node)},
        "models": {name: {"parameters": parameters(size), **asdict(size)} for name, size in _models(made.sizes)},
        "processes": [
            {
                "name": p.process.name,
                "parts": list(p.process.parts),
                "node": p.node,
                "gpus": list(p.gpus),
                "host": {**asdict(p.process.host), "total": p.process.host.total},
                "device": {**asdict(p.process.device), "total": p.process.device.total},
            }
            for p in made.placed
        ],
        "tokens": {name: asdict(tokens) for name, tokens in made.tokens.items()},
        "assumed": ASSUMED,
    }


def _models(sizes: Sizes) -> list[tuple[str, ModelSize]]:
    teachers = [(f"teacher {k + 1}", size) for k, size in enumerate(sizes.teachers)]
    return [*zip(names_of(sizes), sizes.served, strict=True), *teachers]


# --- what is shown ---------------------------------------------------------------------


def show(made: Plan, console: Console) -> None:
    """Tables of memory and tokens, then notes, then what does not fit."""
    console.print(f"on {made.cluster}", highlight=False)
    for name, size in _models(made.sizes):
        console.print(f"{name}: {size.family}, {parameters(size):,} parameters", highlight=False)
    console.print(_memory_table(made))
    console.print(_tokens_table(made))
    if "expected" in made.tokens:
        console.print(f"[dim]{ASSUMED}[/dim]", highlight=False, soft_wrap=True)
    for note in made.notes:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False, soft_wrap=True)
    for problem in made.problems:
        console.print(f"[red]does not fit[/red] {escape(problem)}", highlight=False, soft_wrap=True)
    if not made.problems:
        console.print("[green]it fits[/green]")


def _memory_table(made: Plan) -> Table:
    """A line for what each process takes of its node and of each of its GPUs; processes that are alike share one."""
    table = Table(box=None, header_style="bold")
    for heading in ("process", "holds", "of"):
        table.add_column(heading)
    for heading in ("weights", "gradients", "optimizer", "KV cache", "activations", "program", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    for alike in _alike(made.placed):
        first = alike[0].process
        name = first.name if len(alike) == 1 else f"{first.name} … {alike[-1].process.name.split()[-1]}"
        nodes = _span("node", [p.node + 1 for p in alike if p.node is not None]) or "no room:"
        gpus = _span("GPU", [g for p in alike for g in p.gpus]) or "GPU"
        rows = [(f"{nodes} memory", first.host)]
        if first.gpus:
            rows.insert(0, (f"{nodes} {gpus}", first.device))
        for k, (where, memory) in enumerate(rows):
            head = (name, ", ".join(first.parts)) if k == 0 else ("", "")
            table.add_row(*head, where, *(_bytes(getattr(memory, part)) for part in _PARTS), _bytes(memory.total))
    for where, memory, has in _wholes(made):
        table.add_row("all of them", "", where, *[""] * 6, f"{_bytes(memory.total)} of {_bytes(has)}", style="bold")
    return table


def _alike(placed: Sequence[Placed]) -> list[list[Placed]]:
    groups: list[list[Placed]] = []
    for p in placed:
        before = groups[-1][0].process if groups else None
        if before is None or _kind(before) != _kind(p.process) or (p.node is None) != (groups[-1][0].node is None):
            groups.append([])
        groups[-1].append(p)
    return groups


def _kind(process: Process) -> tuple[Any, ...]:
    return (process.name.split()[0], process.host, process.device, process.gpus)


def _wholes(made: Plan) -> list[tuple[str, Memory, int]]:
    """The fullest node's memory, and the fullest GPU."""
    node = made.cluster.node
    on: dict[tuple[int, int | None], Memory] = {}
    for p in made.placed:
        if p.node is not None:
            for gpu, memory in ((None, p.process.host), *((g, p.process.device) for g in p.gpus)):
                on[p.node, gpu] = on.get((p.node, gpu), Memory()) + memory
    out: list[tuple[str, Memory, int]] = []
    for gpus, has in ((False, node.memory), (True, node.gpu_memory)):
        those = [(k, m) for k, m in on.items() if (k[1] is not None) == gpus]
        if those:
            (at, gpu), memory = max(those, key=lambda item: item[1].total)
            out.append((f"node {at + 1} " + ("memory" if gpu is None else f"GPU {gpu}"), memory, has))
    return out


def _span(word: str, numbers: Sequence[int]) -> str:
    """`node 1`, `GPU 0–3`."""
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return f"{word} {low}" if low == high else f"{word} {low}–{high}"


def _bytes(count: int) -> str:
    if not count:
        return "–"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _tokens_table(made: Plan) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("tokens an iteration")
    for heading in ("sampled by the policy", "by subagents", "in training rows"):
        table.add_column(heading, justify="right")
    for name, tokens in made.tokens.items():
        table.add_row(escape(name), f"{tokens.sampled:,}", f"{tokens.subagents:,}", f"{tokens.trained:,}")
    return table
