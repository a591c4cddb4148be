"""A trace as text, token by token: what each sampled token reads as, and what the learner made of it.

Not here: the shape of a rollout (`recipes.view.rollout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tokenizers import Tokenizer

from swarm.kept import GIVEN
from swarm.types import Segment, Span, Trace

SIGNALS = ("advantage", "value", "ratio")
"""What a credit file has of every action token, beside the log-probability that the record has."""
_BROKEN = "\ufffd"

Credit = Mapping[str, Sequence[float]]
"""Of one trace, a value an action token: `{"advantage": [...], "value": [...], "ratio": [...]}`."""


def open_tokenizer(folders: Sequence[Path]) -> Tokenizer | None:
    """The tokenizer of the first of these checkpoints that has one."""
    found = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
    return Tokenizer.from_file(str(found)) if found else None


def text_of(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Ids as text, special tokens included; as numbers where there is no tokenizer."""
    return tokenizer.decode(list(ids), skip_special_tokens=False) if tokenizer else "".join(f"⟨{i}⟩" for i in ids)


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text of each id; laid end to end they are the whole. A letter of several ids stands with the last of them.

    An id is read after its neighbour, since some tokenizers drop the space at the beginning of a text.
    """
    if tokenizer is None:
        return [f"⟨{i}⟩" for i in ids]
    out: list[str] = []
    before, read = 0, 0
    for k in range(1, len(ids) + 1):
        known = text_of(tokenizer, ids[before:read])
        whole = text_of(tokenizer, ids[before:k])
        if whole.endswith(_BROKEN) and k < len(ids):
            out.append("")
            continue
        out.append(whole[len(known) :])
        before, read = read, k
    return out


def turns_of(trace: Trace) -> list[tuple[int, tuple[Span, ...]]]:
    """The turns in order, each with the number of its context window: sampled spans that follow one another are one."""
    return [(k, turn) for k, segment in enumerate(spoken(trace)) for turn in _sampled(segment)]


def spoken(trace: Trace) -> list[Segment]:
    """The windows, the turns that a fork put in the agent's mouth being turns like the others, of version GIVEN."""
    given = [act.given for act in trace.acts if act.given]
    return [
        Segment(tuple(_own(span, given) for span in segment.spans), segment.opened_by) for segment in trace.segments
    ]


def _own(span: Span, given: list[tuple[int, ...]]) -> Span:
    if not given or span.kind != "observed" or span.ids != given[0]:
        return span
    return Span("sampled", given.pop(0), (0.0,) * len(span.ids), GIVEN)


def _sampled(segment: Segment) -> list[tuple[Span, ...]]:
    turns: list[list[Span]] = []
    following = False
    for span in segment.spans:
        if span.kind == "sampled":
            turns[-1].append(span) if following else turns.append([span])
        following = span.kind == "sampled"
    return [tuple(turn) for turn in turns]


def transcript(trace: Trace, tokenizer: Tokenizer | None, credit: Credit | None) -> list[dict[str, Any]]:
    """The windows of a trace, each with its spans: sampled ones token by token, the others as one text."""
    windows: list[dict[str, Any]] = []
    turn, at = -1, 0
    for segment in spoken(trace):
        spans: list[dict[str, Any]] = []
        for span in segment.spans:
            if span.kind != "sampled":
                spans.append({"kind": span.kind, "text": text_of(tokenizer, span.ids), "tokens": len(span.ids)})
                continue
            turn += not spans or spans[-1]["kind"] != "sampled"
            spans.append({"kind": "sampled", "turn": turn, **_tokens(span, tokenizer, credit, at)})
            at += len(span.ids)
        windows.append({"opened_by": segment.opened_by, "spans": spans})
    return windows


def _tokens(span: Span, tokenizer: Tokenizer | None, credit: Credit | None, at: int) -> dict[str, Any]:
    found: dict[str, Any] = {"version": span.version, "ids": span.ids, "pieces": pieces(tokenizer, span.ids)}
    found["logprob"] = [round(x, 4) for x in span.logprobs]
    for name, values in (credit or {}).items():
        found[name] = list(values[at : at + len(span.ids)])
    return found


# --- credit ------------------------------------------------------------------------------


def credit_of(records: Path, index: int, trace: Trace) -> Credit | None:
    """The credit of the rollout at this place of a record file: None where the learner left none that fits."""
    path = records.with_suffix(".credit.npz")
    try:
        with np.load(path) as file:
            chosen_N = file["rollout_N"] == index
            found = {name: file[f"{name}_N"][chosen_N].astype(float).round(5).tolist() for name in SIGNALS}
    except (FileNotFoundError, KeyError, ValueError, BadZipFile):
        return None
    actions = sum(len(span.ids) for _, spans in turns_of(trace) for span in spans)
    return found if actions and all(len(values) == actions for values in found.values()) else None
