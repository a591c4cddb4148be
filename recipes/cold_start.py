"""The cold start: the embedded model learns both roles from demonstrations, before any reinforcement.

    swarm-rl train cold_start              from nothing, both roles
    swarm-rl train cold_start_polish       from there to what ships as subagents/checkpoints/reader-1m
    swarm-rl train cold_start_sloppy       its copy that splits work badly: where the ablations start

A Qwen3 of about a million parameters with a tokenizer of its own is fitted to recorded rollouts of
scripted policies (`recipes.demonstrations`): reading in full, spawning in a small share of episodes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
import trio
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from envs.pages import EntityPage
from envs.tasks import TaskSet
from envs.world import World, WorldConfig, build_world
from recipes.config import SHIPPED, Recipe
from recipes.demonstrations import DemoMix, drill, examples_of, record
from recipes.overrides import to_json
from recipes.progress import Progress
from recipes.session import CACHE, load_checkpoint, load_tokenizer, warn_of_bf16
from recipes.systems import SYSTEM, Builder
from recipes.tokenizer import END, PAD, build_tokenizer, handle_tokens
from swarm.chat import HermesChat
from swarm.checkpoint import save
from swarm.rl.rows import Rows
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import Examples, SFTConfig, sft_loss, sft_step, sft_stepper
from swarm.rundir import RunDir

_HELD_OUT = 150
"""Traces kept aside to measure the loss on."""
DEMOS = "demonstrations"
_DRILLED, _DRILL_TOKENS = 200, 60
"""Handles that drills use, and about how many tokens one has."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense Qwen3 with tied embeddings."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    vocab: int = 2560
    positions: int = 8192


@dataclass(frozen=True, slots=True)
class ColdStart:
    """`steps` optimizer steps of about `step_tokens` tokens. `start`: go on from this checkpoint, not from nothing.

    `observed`: what a token that the policy did not say counts for, beside 1 for one that it said. `drills`:
    copying practice in the first `drill_share` of the steps, as a share of `step_tokens`.
    """

    seed: int = 0
    start: Path | None = None
    steps: int = 2400
    step_tokens: int = 2500
    observed: float = 0.15
    drills: float = 0.1
    drill_share: float = 0.4
    model: ModelConfig = field(default_factory=ModelConfig)
    world: WorldConfig = field(default_factory=lambda: WorldConfig(conflicts=0.1, missing=0.05))
    demos: DemoMix = field(default_factory=DemoMix)
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(LrSchedule(3e-3, 30, 2400, "cosine", 0.03)))
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"cold start: {name} = {getattr(self, name)}, want 1 or more")
        if self.demos.episodes <= _HELD_OUT:
            raise ValueError(f"cold start: {self.demos.episodes} demonstrations, want more than {_HELD_OUT}")
        for name in ("observed", "drills", "drill_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"cold start: {name} = {getattr(self, name)}, want a share from 0 to 1")


def cold_start() -> ColdStart:
    """From nothing to a model that reads well, and spawns now and then."""
    return ColdStart()


def cold_start_polish() -> ColdStart:
    """From the cold start to the model that ships: longer lists, slips and how to recover, tool failures."""
    return ColdStart(
        seed=1,
        start=Path("runs/cold_start/policy"),
        steps=900,
        observed=0.05,
        drills=0.0,
        world=WorldConfig(conflicts=0.1, missing=0.05, tool_failures=0.01),
        demos=DemoMix(orchestrated=1000, serial=250, single=450, long=70, children=2, long_budget=(40, 128)),
        sft=SFTConfig(LrSchedule(1e-3, 20, 900, "cosine", 0.03)),
    )


def cold_start_sloppy() -> ColdStart:
    """From the shipped model to one whose parallel work is at first worse than its serial work."""
    return ColdStart(
        start=SHIPPED,
        steps=200,
        drills=0.0,
        demos=DemoMix(
            orchestrated=500, serial=250, single=50, long=0, children=1, spawn_share=0.1, junk=0.99, skip=0.75
        ),
        sft=SFTConfig(LrSchedule(5e-4, 10, 200, "linear", 0.05)),
    )


def fit(recipe: ColdStart, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Records demonstrations, fits the model, saves `OUT/policy`. Returns its losses."""
    return fitted(recipe, _fit, out, clean=clean, console=console)


class Episodes(Protocol):
    @property
    def episodes(self) -> int: ...


class Fitting(Protocol):
    """What every supervised recipe has."""

    @property
    def steps(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def sft(self) -> SFTConfig: ...

    @property
    def demos(self) -> Episodes: ...


F = TypeVar("F", bound=Fitting)


def fitted(
    recipe: F,
    fit_in: Callable[[F, RunDir, Progress], dict[str, Any]],
    out: Path,
    *,
    between: Mapping[str, int] | None = None,
    clean: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """A supervised run in the folder `out`: `fit_in` records, fits and saves, and what it returns is kept.

    `between`: phases of the bar between recording and fitting, and their steps. A run that is done is not run again.
    """
    console = console or Console()
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    warn_of_bf16(recipe.sft.bf16, console)
    with RunDir(out, to_json(recipe), clean=clean) as run:
        if run.done:
            console.print(f"{out} is done; --clean trains anew.")
            return json.loads((out / "summary.json").read_text())
        run.rewind(0)
        phases = {DEMOS: recipe.demos.episodes, **(between or {}), "fitting": recipe.steps}
        with Progress(console, phases, {DEMOS: 0.15, "fitting": 0.4}) as progress:
            progress.begin(DEMOS)
            summary = fit_in(recipe, run, progress)
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        run.finish(summary)
    console.print(f"{out / 'policy'}: held-out loss {summary['loss']:.4f} nats a token")
    return summary


def fit_steps(
    recipe: Fitting,
    model: PreTrainedModel,
    data: Examples,
    chosen: Iterator[torch.Tensor],
    run: RunDir,
    progress: Progress,
) -> int:
    """The recipe's optimizer steps, each on the next `chosen` rows; logged every 25. Returns the tokens."""
    stepper, tokens = sft_stepper(model, recipe.sft), 0
    progress.begin("fitting")
    for k, chosen_S in zip(range(recipe.steps), chosen, strict=False):
        m = sft_step(model, stepper, recipe.sft, data, chosen_S)
        tokens += m.tokens
        progress.advance("fitting")
        progress.note(f"loss {m.loss:.4f}")
        if (k + 1) % 25 == 0:
            run.log({"phase": "sft", "step": k + 1, **{f"train/{n}": v for n, v in asdict(m).items()}})
    return tokens


def _fit(recipe: ColdStart, run: RunDir, progress: Progress) -> dict[str, Any]:
    began = perf_counter()
    world = build_world(recipe.world, CACHE)
    tasks = TaskSet(world)
    tokenizer, model = _model(recipe, world, tasks)
    builder = Builder(world, HermesChat(tokenizer, terse_tools=True), Recipe())
    demos = trio.run(record, builder, tasks, recipe.demos, recipe.seed, lambda _: progress.advance(DEMOS))
    rng = random.Random(recipe.seed)
    rng.shuffle(demos)
    held_out, taught = examples_of(demos[:_HELD_OUT]), demos[_HELD_OUT:]
    handles = handle_tokens(tokenizer)[:_DRILLED]
    drills = [drill(rng, handles, len(tokenizer)) for _ in range(int(2 * recipe.drills * len(taught)))]
    data = examples_of([*taught, *drills], recipe.observed)
    tokens = fit_steps(recipe, model, data, batches(data.rows, len(drills), recipe, rng), run, progress)
    save(model, tokenizer, run.path / "policy", 0)
    return {
        "loss": sft_loss(model, recipe.sft, held_out),
        "tokens": tokens,
        "traces": len(taught),
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_seconds": perf_counter() - began,
        "seed": recipe.seed,
    }


def batches(rows: Rows, drills: int, recipe: ColdStart, rng: random.Random) -> Iterator[torch.Tensor]:
    """Row indices of one step after another, over shuffled epochs without end. The last `drills` rows are drills."""
    taught = len(rows) - drills
    drilled = int(recipe.step_tokens * recipe.drills / _DRILL_TOKENS) if drills else 0
    for step, chosen in enumerate(epochs(rows.length_S[:taught], recipe.step_tokens, recipe.seed)):
        drilling = drilled if step < recipe.drill_share * recipe.steps else 0
        yield torch.tensor([*chosen, *(taught + rng.randrange(drills) for _ in range(drilling))])


def epochs(length_S: torch.Tensor, step_tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of rows for one step after another, each of at least `step_tokens` tokens, shuffled without end."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = length_S.tolist()
    chosen: list[int] = []
    size = 0
    while True:
        for s in torch.randperm(len(lengths), generator=generator).tolist():
            chosen.append(s)
            size += lengths[s]
            if size >= step_tokens:
                yield chosen
                chosen, size = [], 0


def _model(recipe: ColdStart, world: World, tasks: TaskSet) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    if recipe.start is not None:
        return load_tokenizer(recipe.start), load_checkpoint(recipe.start)[0]
    tokenizer = build_tokenizer(_texts(world, tasks), recipe.model.vocab)
    m, vocabulary = recipe.model, tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=m.hidden,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        intermediate_size=m.ffn,
        max_position_embeddings=m.positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    torch.manual_seed(recipe.seed)
    return tokenizer, Qwen3ForCausalLM(config)


def _texts(world: World, tasks: TaskSet) -> Iterator[str]:
    """What the model will read: titles, fields, questions, and the words that every prompt has."""
    yield from (page.title for page in world.pages.values())
    entities = (page for page in world.pages.values() if isinstance(page, EntityPage))
    yield from (f"{f.name}: {f.value}" for page in entities for f in page.fields)
    yield from [task.query for task in tasks.draw("train", 300, 0)] * 3
    tools = "search access"
    yield from [f"{SYSTEM}\ntools: {tools} create_subagent assign_task", f"Fill rows.\ntools: {tools}", "created"] * 300
