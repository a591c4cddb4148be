"""The cold start: the recipe learns at small scale, and what ships is whole."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from envs.world import WorldConfig
from recipes.cold_start import ColdStart, ModelConfig, fit
from recipes.config import SHIPPED
from recipes.demonstrations import Demo, DemoMix, examples_of
from recipes.session import load_checkpoint, load_tokenizer
from swarm.chat import HermesChat
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import SFTConfig
from swarm.types import Segment, Span, Trace


@pytest.mark.slow
def test_the_recipe_learns_at_small_scale(tmp_path: Path):
    recipe = ColdStart(
        steps=60,
        step_tokens=1500,
        model=ModelConfig(hidden=64, layers=2, heads=2, kv_heads=1, ffn=128, vocab=2000),
        world=WorldConfig(families=("airport",), groups_per_band=3),
        demos=DemoMix(orchestrated=100, serial=50, single=50, long=0, budget=(6, 12)),
        sft=SFTConfig(LrSchedule(5e-3, 5, 60, "cosine", 0.05)),
        threads=1,
    )
    summary = fit(recipe, tmp_path / "run", console=Console(quiet=True))
    assert summary["loss"] < 2.5  # an untrained model is at ln 2000 = 7.6
    model, _ = load_checkpoint(tmp_path / "run" / "policy")
    assert sum(p.numel() for p in model.parameters()) == summary["parameters"]
    assert fit(recipe, tmp_path / "run", console=Console(quiet=True)) == summary


def test_the_shipped_model_and_its_tokenizer_fit_each_other():
    model, _ = load_checkpoint(SHIPPED)
    tokenizer = load_tokenizer(SHIPPED)
    assert model.config.vocab_size == len(tokenizer)
    assert sum(p.numel() for p in model.parameters()) == 1_115_520
    assert HermesChat(tokenizer, terse_tools=True).decode(tokenizer.encode("| #17 | #17.b |")) == "| #17 | #17.b |"


def test_only_the_deciding_token_of_a_spawning_turn_is_weighed_down():
    said = Span("sampled", (7, 8), (0.0, 0.0))
    segment = Segment((Span("prompt", (1, 2)), said, Span("observed", (3,)), said, Span("observed", (4,)), said))
    demo = Demo(Trace("main", (segment,), "answered"), first=0.25)
    assert examples_of([demo]).weight_N.tolist() == [1, 1, 0.25, 1, 1, 1]
    every = examples_of([demo], observed=0.5)
    assert every.weight_N.tolist() == [0.5, 1, 1, 0.5, 0.25, 1, 0.5, 1, 1]
    assert torch.equal(every.rows.target_N, torch.tensor([2, 7, 8, 3, 7, 8, 4, 7, 8]))
