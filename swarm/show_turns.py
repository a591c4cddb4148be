"""One agent turn by turn, to step through: what stood in its context, what it said, what that cost.

Radio buttons and CSS: the arrow keys go from turn to turn, no script runs, and where styles are dropped all turns
stand below each other. Not here: the whole rollout (`swarm.show`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

from swarm.show import Decode
from swarm.show_html import Html, element, fold, join, page
from swarm.types import Rollout, Span, Stage


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a rollout's own agent, `at` the one that is shown first: `Turns(rollout, chat.decode)`.

    Children have rollouts of their own.
    """

    rollout: Rollout
    decode: Decode
    at: int = 0

    def __repr__(self) -> str:
        return f"{self.rollout.trace.agent}, {len(self.rollout.ledger.stages)} turns"

    def _repr_html_(self) -> str:
        panes = [element("section", pane) for pane in self._panes()]
        name = f"turns-{crc32(''.join(panes).encode()):08x}"
        buttons = [element("label", _button(name, k == self.at), str(k)) for k in range(len(panes))]
        return page(_style(name, len(panes)), element("div", "turn ", *buttons, *panes, cls="steps", id=name))

    def _panes(self) -> Iterator[Html]:
        stages = self.rollout.ledger.stages
        spent = accumulate((stage.critical_steps for stage in stages), initial=0)
        for (seen, said), stage, before in zip(_turns(self.rollout), stages, spent, strict=False):
            yield self._pane(seen, said, stage, before)

    def _pane(self, seen: list[Span], said: list[Span], stage: Stage, before: int) -> Html:
        words = f"{before} critical steps spent before it; it costs {stage.main}"
        if stage.subagents:
            most = f"max{stage.subagents}" if len(stage.subagents) > 1 else max(stage.subagents)
            words += f" + {most} = {stage.critical_steps}"
        length = sum(len(span.ids) for span in seen)
        context = [element("pre", self.decode(span.ids), title=span.kind) for span in seen]
        came = fold(join([f"{length} tokens came into its context"]), *context, opened=True)
        spoken = [element("pre", self.decode(span.ids), cls="said", title="sampled") for span in said]
        return join([element("div", _cost(stage, before), cls="soft"), came, *spoken])


def _cost(stage: Stage, before: int) -> str:
    waited = f" + max({', '.join(map(str, stage.subagents))}) = {stage.critical_steps}" if stage.subagents else ""
    return f"{before} critical steps before it; it costs {stage.main}{waited}"


def _button(name: str, checked: bool) -> Html:
    button = element("input", type="radio", name=name)
    return Html(button.replace("<input", "<input checked", 1)) if checked else button


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
    chosen = (f"#{name}:has(label:nth-of-type({k}) :checked)>section:nth-of-type({k})" for k in range(1, count + 1))
    return Html(f"<style>#{name}>section{{display:none}}{','.join(chosen)}{{display:block}}</style>")
