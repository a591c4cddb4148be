"""The cold start: the embedded model learns both roles from demonstrations, before any reinforcement.

    swarm-rl train cold_start              the model that ships in subagents/checkpoints/reader-1m
    swarm-rl train cold_start_sloppy       its copy that splits work badly: where the ablations start

A Qwen3 of about a million parameters with a tokenizer of its own is fitted to recorded rollouts of
scripted policies (`recipes.demonstrations`): reading in full, spawning in a small share of episodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import trio
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from envs.pages import EntityPage
from envs.tasks import TaskSet
from envs.world import World, WorldConfig
from recipes.config import SHIPPED, Recipe
from recipes.demonstrations import DemoMix, examples_of, record
from recipes.overrides import to_json
from recipes.progress import Progress
from recipes.session import load_checkpoint, load_tokenizer, open_world
from recipes.systems import SYSTEM, Builder
from recipes.tokenizer import build_tokenizer
from swarm.chat import HermesChat
from swarm.checkpoint import save
from swarm.rl.rows import Rows
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import SFTConfig, sft_loss, sft_step, sft_stepper
from swarm.rundir import RunDir
from swarm.seeds import derive

_HELD_OUT = 100
"""Traces kept aside to measure the loss on."""


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
    """`steps` optimizer steps of about `step_tokens` tokens. `start`: go on from this checkpoint instead of from nothing."""

    seed: int = 0
    start: Path | None = None
    steps: int = 1500
    step_tokens: int = 6000
    model: ModelConfig = field(default_factory=ModelConfig)
    world: WorldConfig = field(default_factory=lambda: WorldConfig(conflicts=0.1, missing=0.05))
    demos: DemoMix = field(default_factory=DemoMix)
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(LrSchedule(3e-3, 30, 1500, "cosine", 0.03), bf16=True))
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"cold start: {name} = {getattr(self, name)}, want 1 or more")


def cold_start() -> ColdStart:
    """From nothing to a model that reads well, and spawns now and then."""
    return ColdStart()


def cold_start_sloppy() -> ColdStart:
    """From the shipped model to one whose parallel work is at first worse than its serial work."""
    return ColdStart(
        start=SHIPPED,
        steps=200,
        demos=DemoMix(orchestrated=500, serial=200, single=50, long=0, children=1, junk=0.99, skip=0.5),
        sft=SFTConfig(LrSchedule(5e-4, 10, 200, "linear", 0.05), bf16=True),
    )


def fit(recipe: ColdStart, out: Path, *, clean: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Records demonstrations, fits the model, saves `OUT/policy`. Returns its losses."""
    console = console or Console()
    torch.set_num_threads(recipe.threads or torch.get_num_threads())
    with RunDir(out, to_json(recipe), clean=clean) as run:
        if run.done:
            console.print(f"{out} is done; --clean trains anew.")
            return json.loads((out / "summary.json").read_text())
        run.rewind(0)
        phases = {"demonstrations": 1, "fitting": recipe.steps}
        with Progress(console, phases, {"demonstrations": 60.0, "fitting": 0.4}) as progress:
            summary = _fit(recipe, run, progress)
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        run.finish(summary)
    console.print(f"{out / 'policy'}: held-out loss {summary['loss']:.4f} nats a token")
    return summary


def _fit(recipe: ColdStart, run: RunDir, progress: Progress) -> dict[str, Any]:
    began = perf_counter()
    progress.begin("demonstrations")
    world, tasks = open_world(recipe.world)
    tokenizer, model = _model(recipe, world, tasks)
    builder = Builder(world, HermesChat(tokenizer, terse_tools=True), Recipe())
    demos = trio.run(record, builder, tasks, recipe.demos, recipe.seed)
    order = torch.randperm(len(demos), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    held_out = examples_of([demos[i] for i in order[:_HELD_OUT]])
    data = examples_of([demos[i] for i in order[_HELD_OUT:]])
    stepper = sft_stepper(model, recipe.sft)
    tokens = 0
    progress.begin("fitting")
    for k, chosen in zip(range(recipe.steps), batches(data.rows, recipe.step_tokens, recipe.seed), strict=False):
        m = sft_step(model, stepper, recipe.sft, data, chosen)
        tokens += m.tokens
        progress.advance("fitting")
        progress.note(f"loss {m.loss:.4f}")
        if (k + 1) % 25 == 0:
            run.log({"phase": "sft", "step": k + 1, **{f"train/{n}": v for n, v in asdict(m).items()}})
    save(model, tokenizer, run.path / "policy", 0)
    return {
        "loss": sft_loss(model, recipe.sft, held_out),
        "tokens": tokens,
        "traces": len(data.rows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_seconds": perf_counter() - began,
        "seed": recipe.seed,
    }


def batches(rows: Rows, tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Row indices of one step after another, each of at least `tokens` tokens, over shuffled epochs without end."""
    generator = torch.Generator().manual_seed(derive(seed, "batches"))
    chosen: list[int] = []
    size = 0
    while True:
        for s in torch.randperm(len(rows), generator=generator).tolist():
            chosen.append(s)
            size += int(rows.length_S[s])
            if size >= tokens:
                yield torch.tensor(chosen)
                chosen, size = [], 0


def _model(
    recipe: ColdStart, world: World, tasks: TaskSet
) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    if recipe.start is not None:
        return load_tokenizer(recipe.start), load_checkpoint(recipe.start)[0]
    tokenizer = build_tokenizer(_texts(world, tasks), recipe.model.vocab)
    m = recipe.model
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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(recipe.seed)
    return tokenizer, Qwen3ForCausalLM(config)


def _texts(world: World, tasks: TaskSet) -> Iterator[str]:
    """What the model will read: titles, fields, questions, and the words that every prompt has."""
    for page in world.pages.values():
        yield page.title
        if isinstance(page, EntityPage):
            yield from (f"{f.name}: {f.value}" for f in page.fields)
    for task in tasks.draw("train", 300, 0):
        yield from [task.query] * 3
    yield from [f"{SYSTEM}\ntools: search access create_subagent assign_task", "Fill rows.", "created"] * 300


