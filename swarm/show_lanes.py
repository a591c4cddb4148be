"""Agents as lanes over critical steps: who worked when, who waited for whom, and the longest chain.

    main     ▇▇▒▒▒▒▒▇        own steps, then the wait for the slowest subagent of the turn
      a        ▇▇▇▇▇         on the critical path
      b        ▇▇▇

Not here: seconds, and the page of a run (`swarm-rl view`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.show_html import Html, element, join

if TYPE_CHECKING:  # the types show themselves, so they import this file
    from swarm.types import Rollout


@dataclass(frozen=True, slots=True)
class Lane:
    """One agent: `start` is the critical step at which it began; `critical`: it is on the longest chain."""

    rollout: Rollout
    start: int
    critical: bool


def lanes(rollout: Rollout, start: int = 0, *, critical: bool = True) -> Iterator[Lane]:
    """The agents in the order in which they were started, parents first."""
    yield Lane(rollout, start, critical)
    for stage, group in zip(rollout.ledger.stages, groups(rollout), strict=False):
        longest = max((c.ledger.critical_steps for c in group), default=0)
        for child in group:
            slowest = child.ledger.critical_steps == longest
            yield from lanes(child, start + stage.main, critical=critical and slowest)
        start += stage.critical_steps


def groups(rollout: Rollout) -> list[tuple[Rollout, ...]]:
    """The subagents that each turn started: as the record tells, or as the ledger counts them."""
    told = [len(act.children) for act in rollout.trace.acts]
    counted = told if sum(told) == len(rollout.children) else [len(s.subagents) for s in rollout.ledger.stages]
    children = iter(rollout.children)
    return [tuple(c for _, c in zip(range(n), children, strict=False)) for n in counted]


def lanes_html(rollout: Rollout) -> Html:
    """A table with a row an agent, and its turns drawn to scale."""
    total = max(1, rollout.ledger.critical_steps)
    head = element("tr", *(element("th", x) for x in ("agent", "steps", "rows", f"critical steps 0 to {total}")))
    return element("table", head, *(_row(lane, total) for lane in lanes(rollout)), cls="lanes")


def _row(lane: Lane, total: int) -> Html:
    r = lane.rollout
    name = "\u00a0\u00a0" * r.trace.agent.count("/") + ("● " if lane.critical else "○ ") + r.trace.agent.split("/")[-1]
    cells = (
        element("td", name),
        element("td", str(r.ledger.critical_steps), cls="n"),
        element("td", str(len(r.table)), cls="n"),
        element("td", _bars(lane, total), cls="bar"),
    )
    return element("tr", *cells, cls="path" if lane.critical else "")


def _bars(lane: Lane, total: int) -> Html:
    bars: list[Html] = []
    at = lane.start
    for k, stage in enumerate(lane.rollout.ledger.stages):
        said = f"turn {k}: {stage.main} + {stage.critical_steps - stage.main} = {stage.critical_steps} steps"
        bars.append(_bar(at, stage.main, "own", said))
        if stage.subagents:
            bars.append(_bar(at + stage.main, stage.critical_steps - stage.main, "wait", f"{said}, waiting"))
        at += stage.critical_steps
    return element("svg", join(bars), viewBox=f"0 0 {total} 1", preserveAspectRatio="none", role="img")


def _bar(at: int, length: int, kind: str, said: str) -> Html:
    # A hair of space keeps one turn from the next.
    drawn = {"x": f"{at + 0.04:.2f}", "y": "0.1", "width": f"{max(length - 0.08, 0.02):.2f}", "height": "0.8"}
    return element("g", element("title", said), element("rect", cls=kind, **drawn))
