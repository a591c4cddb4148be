"""Practice in recall: what followed this token before follows it again. It comes before any demonstration.

    repetition   #7 #52 #9 #7 #52 #9 #7 …          a few handles, over and over
    pairs        b#52 a#7 a#7 b#52 |a|#7| |b|#52|   handles behind their letters, in another order each time

A summary is recall, and demonstrations alone do not teach it to a model of this size: what they ask to be looked
up is rare in them and far away. Short periods of few handles do, within some hundred steps, and once a model can
repeat it soon recalls pairs of any handles. Not here: what the handles stand for (`recipes.compaction.start`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.demonstrations import DRILL, Demo, examples_of
from recipes.tokenizer import HANDLES, handle_tokens
from swarm.rl.schedule import LrSchedule
from swarm.rl.sft import SFTConfig, sft_step, sft_stepper
from swarm.types import Segment, Span, Trace

LETTERS = "abcdefghi"
_LENGTH = 60
"""About as many tokens has a row of repetition."""


@dataclass(frozen=True, slots=True)
class Practice:
    """`steps` optimizer steps of `rows` rows each. `pairs`: the share of rows that are pairs; the others repeat.

    `handles`: how many different ones occur, fewer being easier.
    """

    steps: int = 400
    rows: int = 48
    handles: int = 60
    pairs: float = 0.0
    lr: LrSchedule = field(default_factory=lambda: LrSchedule(3e-3, 20))

    def __post_init__(self) -> None:
        if self.steps < 0 or self.rows < 1:
            raise ValueError(f"practice: {self.steps} steps of {self.rows} rows, want 0 or more of 1 or more")
        if not 12 <= self.handles <= HANDLES:
            raise ValueError(f"practice: handles = {self.handles}, want 12 to {HANDLES}")
        if not 0 <= self.pairs <= 1:
            raise ValueError(f"practice: pairs = {self.pairs}, want a share from 0 to 1")


def practise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    config: Practice,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> float:
    """Fits the model to rows drawn anew for each step. Returns the loss of the last step, in nats a token.

    `done` hears of each step.
    """
    rng = random.Random(seed)
    sft = replace(SFTConfig(), lr=config.lr)
    stepper, loss = sft_stepper(model, sft), 0.0
    for _ in range(config.steps):
        data = examples_of(rows(tokenizer, config, config.rows, rng))
        loss = sft_step(model, stepper, sft, data, torch.arange(config.rows)).loss
        done()
    return loss


def rows(tokenizer: PreTrainedTokenizerFast, config: Practice, count: int, rng: random.Random) -> list[Demo]:
    """`count` rows as `config` has them."""
    handles = handle_tokens(tokenizer)[: config.handles]
    letters, bar = [tokenizer.get_vocab()[letter] for letter in LETTERS], tokenizer.get_vocab()["|"]
    return [pairs(rng, letters, handles, bar) if rng.random() < config.pairs else repetition(rng, handles)
            for _ in range(count)]  # fmt: skip


def repetition(rng: random.Random, handles: Sequence[int]) -> Demo:
    """2 to 12 handles, three times or more; to be predicted from where the second time shows the period."""
    length = rng.randint(2, 12)
    times = rng.randint(3, max(3, _LENGTH // length))
    ids = rng.sample(handles, length) * times
    return Demo(Trace(DRILL, (Segment((_shown(ids[: length + 1]), _said(ids[length + 1 :]))),), "answered"))


def pairs(rng: random.Random, letters: Sequence[int], handles: Sequence[int], bar: int) -> Demo:
    """2 to 9 letters with a handle each, three to six times; the handles are to be predicted from the second time.

    From then on one time in two is written as rows of a table, between bars.
    """
    count = rng.randint(2, len(letters))
    value = dict(zip(rng.sample(letters, count), rng.sample(handles, count), strict=True))
    spans: list[Span] = []
    for time in range(rng.randint(3, 6)):
        row = time > 0 and rng.random() < 0.5
        for letter in rng.sample(list(value), count):
            spans.append(_shown([bar, letter, bar] if row else [letter]))
            spans.append(_said([value[letter]]) if time else _shown([value[letter]]))
            spans += [_shown([bar])] if row else []
    return Demo(Trace(DRILL, (Segment(tuple(spans)),), "answered"))


def _shown(ids: Sequence[int]) -> Span:
    return Span("prompt", tuple(ids))


def _said(ids: Sequence[int]) -> Span:
    return Span("sampled", tuple(ids), (0.0,) * len(ids))
