"""One agent turn by turn, to step through: what stood in its context, what it said, what that cost.

Radio buttons and CSS: the arrow keys go from turn to turn, no script runs, and where styles are dropped all turns
stand below each other. Not here: the whole rollout (`swarm.show`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from zlib import crc32

from swarm.show import Decode
from swarm.show_html import Html, element, fold, join, page
from swarm.types import Rollout, Span, Stage


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a rollout's own agent: `Turns(rollout, chat.decode)`. Children have rollouts of their own."""

    rollout: Rollout
    decode: Decode

    def __repr__(self) -> str:
        return f"{self.rollout.trace.agent}, {len(self.rollout.ledger.stages)} turns"

    def _repr_html_(self) -> str:
        panes = [element("section", pane) for pane in self._panes()]
        name = f"turns-{crc32(''.join(panes).encode()):08x}"
        buttons = [element("input", type="radio", name=name, id=f"{name}-{k}") for k in range(len(panes))]
        buttons[:1] = [Html(button.replace("<input", "<input checked", 1)) for button in buttons[:1]]
        labelled = [join([b, element("label", f"turn {k}", **{"for": f"{name}-{k}"})]) for k, b in enumerate(buttons)]
        return page(_style(name, len(panes)), element("div", *labelled, *panes, cls="steps", id=name))

    def _panes(self) -> Iterator[Html]:
        stages = self.rollout.ledger.stages
        spent = [0, *accumulate(stage.critical_steps for stage in stages)]
        turns = zip_longest(_turns(self.rollout), stages)
        for (turn, stage), before in zip(turns, spent, strict=False):
            yield self._pane(*(turn or ([], [])), stage or Stage(0), before)

    def _pane(self, seen: list[Span], said: list[Span], stage: Stage, before: int) -> Html:
        words = f"{before} critical steps spent before it; it costs {stage.main}"
        if stage.subagents:
            words += (
                f" + max{stage.subagents} = {stage.critical_steps}"
                if len(stage.subagents) > 1
                else (f" + {stage.subagents[0]} = {stage.critical_steps}")
            )
        context = [element("pre", self.decode(span.ids), title=span.kind) for span in seen]
        length = sum(len(span.ids) for span in seen)
        spoken = [element("pre", self.decode(span.ids), cls="said", title="sampled") for span in said]
        added = fold(join([f"what came into its context: {length} tokens"]), *context)
        return join([element("div", words, cls="soft"), added, *spoken])


def _turns(rollout: Rollout) -> Iterator[tuple[list[Span], list[Span]]]:
    """Of each turn the spans that came into the context since the one before, and those that were sampled."""
    for segment in rollout.trace.segments:
        seen: list[Span] = []
        said: list[Span] = []
        for span in segment.spans:
            if span.kind == "sampled":
                said.append(span)
                continue
            if said:
                yield seen, said
                seen, said = [], []
            seen.append(span)
        if said:
            yield seen, said


def _style(name: str, count: int) -> Html:
    """Shows the pane of the button that is chosen."""
    chosen = ",".join(f"#{name}>input:nth-of-type({k}):checked~section:nth-of-type({k})" for k in range(1, count + 1))
    return Html(f"<style>#{name}>section{{display:none}}{chosen}{{display:block}}</style>")
