"""Overriding a recipe's fields by dotted name."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from recipes.overrides import OverrideError, apply, describe, from_json, to_json


@dataclass(frozen=True)
class Ppo:
    """How the policy learns.

    More words.
    """

    lr: float = 1e-4
    epochs: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.3
    whiten: bool = True

    def __post_init__(self) -> None:
        if self.clip_high < self.clip_low:
            raise ValueError(f"ppo: clip_high = {self.clip_high}, want {self.clip_low} or more")


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    ppo: Ppo = field(default_factory=Ppo)
    families: tuple[str, ...] = ("city", "airport")
    rows: tuple[int, int] = (3, 80)
    cache: Path | None = None
    wandb: Literal["offline", "disabled"] = "offline"


def message(*arguments: str) -> str:
    with pytest.raises(OverrideError) as caught:
        apply(Recipe(), arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_nested_field_is_set_by_its_dotted_name() -> None:
    assert apply(Recipe(), ["--ppo.lr", "2e-4", "--seed=3"]) == Recipe(seed=3, ppo=Ppo(lr=2e-4))


def test_every_kind_of_value_is_converted() -> None:
    arguments = ["--ppo.whiten", "false", "--families", "isotope,city", "--rows", "[5, 9]"]
    made = apply(Recipe(), [*arguments, "--cache", "a b", "--wandb=disabled"])
    assert made == Recipe(0, Ppo(whiten=False), ("isotope", "city"), (5, 9), Path("a b"), "disabled")


def test_none_empties_an_optional_field() -> None:
    assert apply(Recipe(cache=Path("x")), ["--cache", "none"]).cache is None


def test_a_negative_value_is_a_value() -> None:
    assert apply(Recipe(), ["--seed", "-3"]).seed == -3


def test_dashes_in_a_name_are_underscores() -> None:
    assert apply(Recipe(), ["--ppo.clip-high", "0.4"]).ppo.clip_high == 0.4


def test_fields_that_depend_on_each_other_are_set_together() -> None:
    made = apply(Recipe(), ["--ppo.clip_low", "0.5", "--ppo.clip_high", "0.6"])
    assert (made.ppo.clip_low, made.ppo.clip_high) == (0.5, 0.6)


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    assert message("--ppo.lrr", "1") == "unknown field --ppo.lrr, nearest: --ppo.lr"


def test_a_field_of_another_section_is_found_by_its_last_name() -> None:
    assert message("--train.epochs", "1") == "unknown field --train.epochs, nearest: --ppo.epochs"


def test_a_field_is_found_by_one_of_its_words() -> None:
    assert message("--ppo.clip", "1") == "unknown field --ppo.clip, nearest: --ppo.clip_low, --ppo.clip_high"


def test_a_bad_value_names_field_value_and_type() -> None:
    assert message("--ppo.epochs", "two") == "--ppo.epochs = 'two', want int"


def test_a_bad_choice_names_the_choices() -> None:
    assert message("--wandb", "on") == "--wandb = 'on', want 'offline' | 'disabled'"


def test_a_tuple_of_the_wrong_length_is_refused() -> None:
    assert message("--rows", "3") == "--rows = '3', want tuple[int, int]"


def test_a_value_that_the_recipe_refuses_is_passed_on() -> None:
    assert message("--ppo.clip_high", "0.1") == "ppo: clip_high = 0.1, want 0.2 or more"


def test_a_section_is_not_a_field() -> None:
    assert message("--ppo", "1").startswith("ppo is a section, set one of its fields: --ppo.lr, --ppo.epochs")


def test_a_missing_value_is_one_line() -> None:
    assert message("--seed", "--ppo.lr", "1") == "--seed has no value, want --seed VALUE"


def test_a_word_without_a_field_is_refused() -> None:
    assert message("3") == "unexpected argument '3', want --field value"


@given(st.text(max_size=8), st.sampled_from(["seed", "ppo.lr", "rows", "cache", "wandb", "families", "ppo.whiten"]))
def test_any_text_is_taken_or_refused_in_one_line(text: str, name: str) -> None:
    lines = 0
    try:
        apply(Recipe(), [f"--{name}={text}"])
    except OverrideError as error:
        lines = str(error).count("\n")
    assert lines == 0


def test_a_recipe_survives_json() -> None:
    recipe = Recipe(3, Ppo(lr=2e-4), ("city",), (5, 9), Path("a/b"), "disabled")
    assert to_json(recipe)["rows"] == [5, 9]
    assert from_json(Recipe, to_json(recipe)) == recipe


def test_an_unknown_field_in_json_is_refused() -> None:
    data = to_json(Recipe())
    data["ppo"]["momentum"] = 0.9
    with pytest.raises(OverrideError, match=r"Recipe: unknown field ppo\.momentum"):
        from_json(Recipe, data)


def test_a_refused_value_in_json_is_one_line() -> None:
    data = to_json(Recipe())
    data["ppo"]["clip_high"] = 0.0
    with pytest.raises(OverrideError, match=r"Recipe: ppo: clip_high = 0\.0, want 0\.2 or more"):
        from_json(Recipe, data)


def test_help_lists_every_field_with_its_value() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(describe(Recipe()))
    text = console.export_text()
    for words in ("--ppo.lr", "0.0001", "--families", "city,airport", "How the policy learns.", "true | false"):
        assert words in text
