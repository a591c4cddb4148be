"""The engines of a recipe: one for each checkpoint, or the subagents' in turns; what each serves is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.config import SHIPPED, Recipe
from recipes.engines import open_engines
from recipes.placement import Placement, Serving
from swarm.checkpoint import load_model, ref_of
from swarm.engine.probe import verify

SLOPPY = SHIPPED.with_name("sloppy-1m")
FOLDERS = (SHIPPED, SHIPPED, SLOPPY)


async def off(folder: Path, engine) -> float:
    model = load_model(ref_of(folder))
    return await verify(engine, model, model.config.vocab_size, 0, bound=100.0)


@pytest.mark.slow
@pytest.mark.parametrize("subagents", ["each", "turns"])
async def test_every_checkpoint_is_served_whether_they_have_an_engine_each_or_take_turns(subagents):
    torch.set_num_threads(1)
    recipe = Recipe(serving=Serving(cache_mib=8), placement=Placement(subagents=subagents))
    async with open_engines(recipe, FOLDERS, 128, 1) as engines:
        policy, reader, sloppy = engines.each
        before = [await e.checksum() for e in (reader, sloppy)]
        for _ in range(2):
            assert await off(SHIPPED, reader) < 1e-4
            assert await off(SLOPPY, sloppy) < 1e-4
        assert await off(SLOPPY, reader) > 0.1
        await policy.update(load_model(ref_of(SLOPPY)).state_dict(), 1)
        assert await off(SLOPPY, policy) < 1e-4
        # The policy's weights are its own: what is frozen is served as before.
        assert [await e.checksum() for e in (reader, sloppy)] == before


def test_settings_that_do_not_go_together_are_refused_in_one_line():
    recipe = Recipe()
    with pytest.raises(ValueError, match=r"serving\.dtype = 'bfloat16' with engine = 'embedded', want 'float32'"):
        replace(recipe, serving=Serving(dtype="bfloat16"))
    with pytest.raises(ValueError, match="placement: engines = 1, want 2 or more"):
        Placement(engines=1)
    with pytest.raises(ValueError, match=r"serving: probe_bound = 0\.0, want a finite number above 0"):
        Serving(probe_bound=0.0)
