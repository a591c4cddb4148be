"""The cold start: the recipe learns at small scale, and what ships is whole."""

import random
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from envs.world import WorldConfig
from recipes.cold_start import ColdStart, ModelConfig, fit
from recipes.compaction.recall import Practice
from recipes.compaction.start import TrailDemos, TrailStart, fit_trails
from recipes.config import SHIPPED
from recipes.demonstrations import Demo, DemoMix, examples_of, renumbered
from recipes.session import load_checkpoint, load_tokenizer, warn_of_bf16
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


@pytest.mark.slow
def test_the_start_on_trails_records_practises_and_fits(tmp_path: Path):
    recipe = TrailStart(
        steps=3,
        demos=TrailDemos(compaction=40, full_window=20, truncation=4),
        repeat=Practice(2, rows=8),
        recall=Practice(2, rows=8, handles=320, pairs=0.5),
        threads=1,
    )
    summary = fit_trails(recipe, tmp_path / "run", console=Console(quiet=True))
    assert (summary["episodes"], summary["demonstrated_score"] > 0.5) == (4, True)
    load_checkpoint(tmp_path / "run" / "policy")
    assert fit_trails(recipe, tmp_path / "run", console=Console(quiet=True)) == summary


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("step_tokens", 0), ("observed", 1.5), ("kept", -1)])
def test_a_start_on_trails_out_of_range_is_refused(name: str, value: float):
    with pytest.raises(ValueError, match=f"trail start: {name} = {value}, want"):
        TrailStart(**{name: value})


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


def test_documents_are_renumbered_alike_in_all_segments_and_keep_their_order():
    handles = list(range(100, 140))  # the token of #k is 100 + k
    first = Segment((Span("prompt", (7, 100, 101, 102)), Span("sampled", (102, 8), (-0.5, -0.25))))
    second = Segment((Span("prompt", (104, 101, 7)),), "compaction")
    trace = Trace("main", (first, second), "answered")
    seen: set[int] = set()
    for seed in range(20):
        a, b = renumbered(trace, random.Random(seed), handles).segments
        _, question, one, two = a.spans[0].ids
        assert (a.spans[0].ids[0], question, a.spans[1].ids, a.spans[1].logprobs) == (7, 100, (two, 8), (-0.5, -0.25))
        assert (b.spans[0].ids[1:], b.opened_by) == ((one, 7), "compaction")
        assert 101 <= one < two < b.spans[0].ids[0] <= 139
        seen.add(two - one)
    assert len(seen) > 5  # steps of many sizes, so that counting does not help


@pytest.mark.parametrize(
    ("native", "asked", "warned"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_bf16_that_a_processor_emulates_is_warned_of(native: bool, asked: bool, warned: bool, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    console = Console(file=StringIO())
    warn_of_bf16(asked, console)
    assert ("slower than float32" in console.file.getvalue()) == warned
