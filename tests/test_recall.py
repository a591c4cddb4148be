"""Practice in recall: what the rows ask for can be known from what came before, and a model learns it."""

from __future__ import annotations

import random

import pytest

from recipes.compaction.recall import LETTERS, Practice, pairs, practise, repetition, rows
from recipes.config import SHIPPED
from recipes.demonstrations import Demo
from recipes.session import load_checkpoint, load_tokenizer

HANDLES = range(100, 160)


def asked(row: Demo) -> list[tuple[list[int], int]]:
    """Each token to predict, with all that came before it."""
    (segment,) = row.trace.segments
    return [(segment.ids[:k], segment.ids[k]) for k, said in enumerate(segment.mask) if said]


@pytest.mark.parametrize("seed", range(20))
def test_a_repetition_says_what_followed_the_last_time(seed: int) -> None:
    for before, token in asked(repetition(random.Random(seed), HANDLES)):
        assert token == before[before.index(before[-1]) + 1]


@pytest.mark.parametrize("seed", range(20))
def test_pairs_ask_for_the_handle_of_a_letter_and_for_nothing_else(seed: int) -> None:
    letters, bar = range(9), 50
    row = pairs(random.Random(seed), letters, HANDLES, bar)
    assert asked(row)
    for before, token in asked(row):
        letter = before[-1] if before[-1] != bar else before[-2]
        assert letter in letters
        assert token == before[before.index(letter) + 1]


def test_the_share_of_pairs_and_the_number_of_handles_are_kept() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    letters = {tokenizer.get_vocab()[letter] for letter in (*LETTERS, "|")}
    made = rows(tokenizer, Practice(handles=12, pairs=0.25), 400, random.Random(0))
    seen = [set(row.trace.segments[0].ids) for row in made]
    assert sum(bool(ids & letters) for ids in seen) / 400 == pytest.approx(0.25, abs=0.07)
    assert len(set().union(*seen) - letters) == 12


def test_a_loss_falls_with_practice() -> None:
    tokenizer, (model, _) = load_tokenizer(SHIPPED), load_checkpoint(SHIPPED)
    steps: list[None] = []
    first = practise(model, tokenizer, Practice(1, rows=8, handles=12), 0)
    last = practise(model, tokenizer, Practice(25, rows=8, handles=12), 1, lambda: steps.append(None))
    assert last < first - 1
    assert len(steps) == 25


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"rows": 0}, {"handles": 11}, {"handles": 321}, {"pairs": 1.5}])
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="practice: .*want"):
        Practice(**wrong)  # pyright: ignore[reportArgumentType]
