"""The engines of a recipe: one for each checkpoint, or the subagents' in turns; what each serves is its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.config import SHIPPED, Recipe
from recipes.engines import open_engines
from recipes.placement import Placement, Serving
from swarm.checkpoint import load_model, ref_of
from swarm.engine.probe import verify
from swarm.folders import CheckpointError
from swarm.types import CheckpointRef, EngineError, Sampling

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


@pytest.mark.slow
async def test_an_engine_is_opened_when_it_is_asked_for_and_closed_when_nobody_plays_it():
    torch.set_num_threads(1)
    sloppy = ref_of(SLOPPY)
    async with open_engines(Recipe(serving=Serving(cache_mib=8)), FOLDERS[:2], 128, 1) as engines:
        assert await engines.serve(ref_of(SHIPPED)) is engines.each[1]
        first = await engines.serve(sloppy)
        assert await off(SLOPPY, first) < 1e-4
        assert await engines.serve(sloppy) is first
        assert set(await engines.checksums()) == {ref_of(SHIPPED).sha256, sloppy.sha256}
        await engines.retire({sloppy.sha256})
        assert await off(SLOPPY, first) < 1e-4
        await engines.retire(set())
        with pytest.raises(EngineError, match="not running"):
            await first.generate([1, 2], Sampling(2))
        assert await off(SLOPPY, await engines.serve(sloppy)) < 1e-4
        # Those that were there from the beginning stay.
        assert await off(SHIPPED, engines.each[1]) < 1e-4


@pytest.mark.slow
async def test_an_engine_that_cannot_be_opened_leaves_the_others_as_they_are(tmp_path: Path):
    shutil.copytree(SLOPPY, tmp_path / "broken")
    ref = ref_of(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    async with open_engines(Recipe(serving=Serving(cache_mib=8)), FOLDERS[:2], 128, 1) as engines:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt"):
                await engines.serve(ref)
        assert await off(SHIPPED, engines.each[1]) < 1e-4


@pytest.mark.slow
async def test_those_that_take_turns_must_be_alike(tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(SLOPPY, other)
    config = json.loads((other / "config.json").read_text())
    recipe = Recipe(serving=Serving(cache_mib=8), placement=Placement(subagents="turns"))
    async with open_engines(recipe, FOLDERS[:2], 128, 1) as engines:
        assert await off(SLOPPY, await engines.serve(ref_of(SLOPPY))) < 1e-4
        (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
        with pytest.raises(CheckpointError, match="other: num_hidden_layers = 9, want 4 as .*reader-1m has"):
            await engines.serve(CheckpointRef(other, "another"))
        (other / "config.json").write_text(json.dumps(config))
        (other / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="another tokenizer.json than"):
            await engines.serve(CheckpointRef(other, "another"))


def test_settings_that_do_not_go_together_are_refused_in_one_line():
    recipe = Recipe()
    with pytest.raises(ValueError, match=r"serving\.dtype = 'bfloat16' with engine = 'embedded', want 'float32'"):
        replace(recipe, serving=Serving(dtype="bfloat16"))
    with pytest.raises(ValueError, match="placement: engines = 1, want 2 or more"):
        Placement(engines=1)
    with pytest.raises(ValueError, match=r"serving: probe_bound = 0\.0, want a finite number above 0"):
        Serving(probe_bound=0.0)
