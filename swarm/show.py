"""A rollout as a notebook shows it: lanes, ledger, reward, answer against gold, and the transcript of each agent.

    rollout                               what it holds as text: prompts, results, answers
    Shown(rollout, chat.decode)           what was said, too: ids are text only to who has the language

One piece of HTML with no script and nothing loaded, so that it also reads where the notebook is not run.
Not here: an agent turn by turn (`swarm.show_turns`), tokens and what a learner made of them (`swarm.show_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.show_html import Html, element, fold, join, page, table
from swarm.show_lanes import lanes, lanes_html

if TYPE_CHECKING:  # the types show themselves, so they import this file
    from swarm.types import Ledger, Reward, Rollout, Segment, Task

Decode = Callable[["Sequence[int]"], str]


def plain(cell: str) -> str:
    """The form in which cells are compared unless another is given: case and space do not count."""
    return " ".join(cell.split()).casefold()


@dataclass(frozen=True, slots=True)
class Shown:
    """A rollout for a notebook: `Shown(rollout, chat.decode, canonical)`.

    `decode` reads what agents said; `form` is that in which cells are compared, as the verifier compares them.
    """

    rollout: Rollout
    decode: Decode | None = None
    form: Callable[[str], str] = plain

    def __repr__(self) -> str:
        return summary(self.rollout)

    def _repr_html_(self) -> str:
        return rollout_html(self.rollout, self.decode, self.form)


def summary(rollout: Rollout) -> str:
    """One line: `airports in Ohio: answered, 2 subagents, 21 critical steps, 8 rows`."""
    ledger, n = rollout.ledger, len(rollout.children)
    agents = f"{n} subagent{'' if n == 1 else 's'}"
    steps = f"{ledger.critical_steps} critical steps of {rollout.total_steps} in all"
    return f"{rollout.task.subject}: {rollout.trace.status}, {agents}, {steps}, {len(rollout.table)} rows"


def rollout_html(rollout: Rollout, decode: Decode | None = None, form: Callable[[str], str] = plain) -> str:
    """The whole rollout; the answer, the ledger and the transcripts are folded."""
    parts = [_facts(rollout), lanes_html(rollout)]
    if rollout.reward:
        parts.append(fold(join([element("b", "reward"), f" {rollout.reward.total:.3f}"]), _reward(rollout.reward)))
    right = sum(line.cls == "right" for line in compared(rollout, form))
    answer = f" {right} of {len(rollout.task.gold)} rows right, {len(rollout.table)} handed in"
    parts.append(fold(join([element("b", "answer against gold"), answer]), answer_html(rollout, form)))
    parts.append(fold(element("b", "ledger of main"), _stages(rollout.ledger), _tokens(rollout.ledger)))
    agents = join(_agent(lane.rollout, decode) for lane in lanes(rollout))
    several = f" of {agents.count('<summary>')} agents" if rollout.children else ""
    parts.append(fold(join([element("b", "transcript"), several]), agents))
    return page(*parts)


def ledger_html(ledger: Ledger) -> str:
    """Where the steps went, turn by turn, and the tokens."""
    return page(_stages(ledger), _tokens(ledger))


def _facts(rollout: Rollout) -> Html:
    trace, ledger = rollout.trace, rollout.ledger
    facts = (
        f"{trace.status}{f' ({trace.error})' if trace.error else ''}",
        f"{ledger.critical_steps} critical steps",
        f"{rollout.total_steps} steps in all",
        f"{len(rollout.children)} subagents",
        f"{ledger.tokens_sampled} tokens sampled by {trace.agent}",
    )
    return join(
        [
            element("div", element("b", rollout.task.query)),
            element("div", *(element("span", fact) for fact in _apart(facts)), cls="facts soft"),
        ]
    )


def _apart(facts: Sequence[str]) -> list[str]:
    """With a dot between them, where no style keeps them apart."""
    return [*(f"{fact} ·" for fact in facts[:-1]), facts[-1]]


# --- costs and reward --------------------------------------------------------------------


def _stages(ledger: Ledger) -> Html:
    rows = [
        (str(k), str(s.main), f"max({', '.join(map(str, s.subagents))})" if s.subagents else "", str(s.critical_steps))
        for k, s in enumerate(ledger.stages)
    ]
    whole = ("all", str(ledger.main_steps), "", str(ledger.critical_steps))
    return table(("turn", "own", "+ subagents", "= critical steps"), [*rows, whole], (1, 3))


def _tokens(ledger: Ledger) -> Html:
    text = f"{ledger.tokens_sampled} tokens sampled, {ledger.tokens_prompt} fed"
    counts = "".join(f", {n} {kind}" for kind, n in sorted(ledger.counts.items()))
    return element("div", text + counts, cls="soft")


def _reward(reward: Reward) -> Html:
    rows = [
        (name, f"{part:.3f}", f"{reward.weights.get(name, 0.0):+.3f}", f"{part * reward.weights.get(name, 0.0):+.3f}")
        for name, part in reward.parts.items()
    ]
    return table(("part", "value", "× weight", "="), [*rows, ("total", "", "", f"{reward.total:+.3f}")], (1, 2, 3))


# --- the answer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A row of gold beside what was handed in for it, "" where there is none; `cls`: right, wrong, missing or extra."""

    cls: str
    gold: tuple[str, ...]
    found: tuple[str, ...]


def compared(rollout: Rollout, form: Callable[[str], str] = plain) -> list[Line]:
    """The rows of gold in order, then what was handed in besides; of equal keys the first row counts."""
    task = rollout.task
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for row in rollout.table:
        if tuple(map(form, row)) != tuple(map(form, task.columns)):
            found.setdefault(_key(task, row, form), row)
    lines: list[Line] = []
    for gold in task.gold:
        mine = found.pop(_key(task, gold, form), ())
        right = tuple(map(form, mine[: len(gold)])) == tuple(map(form, gold))
        lines.append(Line("right" if right else "wrong" if mine else "missing", gold, mine))
    return lines + [Line("extra", (), row) for row in found.values()]


def answer_html(rollout: Rollout, form: Callable[[str], str] = plain) -> Html:
    """The answer against the gold table, cell by cell: ✓ right, ✗ found and wanted, missing, extra."""
    rows = [(line.cls, *_cells(line, len(rollout.task.columns), form)) for line in compared(rollout, form)]
    return table(("row", *rollout.task.columns), rows)


def _cells(line: Line, width: int, form: Callable[[str], str]) -> Iterator[Html]:
    for k in range(width):
        gold = line.gold[k] if k < len(line.gold) else ""
        found = line.found[k] if k < len(line.found) else ""
        if line.cls == "missing":
            yield element("span", gold, cls="soft")
        elif line.cls == "extra":
            yield element("span", found, cls="wrong")
        elif form(gold) == form(found):
            yield element("span", f"✓ {found}", cls="right")
        else:
            yield element("span", f"✗ {found or 'nothing'}, want {gold}", cls="wrong")


def _key(task: Task, row: Sequence[str], form: Callable[[str], str]) -> tuple[str, ...]:
    return tuple(map(form, row[: task.keys]))


# --- transcripts -------------------------------------------------------------------------


def _agent(rollout: Rollout, decode: Decode | None) -> Html:
    head = [
        element("b", rollout.trace.agent),
        f" {rollout.trace.status}, {rollout.ledger.critical_steps} critical steps",
    ]
    inside = _contexts(rollout, decode) if decode else [_as_text(rollout)]
    return fold(join(head), *inside)


def _contexts(rollout: Rollout, decode: Decode) -> Iterator[Html]:
    """What stood in each of the agent's contexts, and what it said in it."""
    for k, segment in enumerate(rollout.trace.segments):
        if len(rollout.trace.segments) > 1:
            yield element("div", f"context {k}, opened by {segment.opened_by}", cls="soft")
        yield from context_html(segment, decode)


def context_html(segment: Segment, decode: Decode) -> Iterator[Html]:
    """The spans of one context in order, those that the agent said marked."""
    for span in segment.spans:
        yield element("pre", decode(span.ids), cls="said" if span.kind == "sampled" else "", title=span.kind)


def _as_text(rollout: Rollout) -> Html:
    """Without the language: the prompt, how much was said and what came back, and the answer."""
    parts = [element("pre", rollout.prompt)]
    for k, act in enumerate(rollout.trace.acts):
        parts.append(element("div", f"turn {k}: {act.sampled} tokens, results: {len(act.results)}", cls="soft"))
        parts += [element("pre", "".join(p if isinstance(p, str) else p.title for p in r.parts)) for r in act.results]
    return join([*parts, element("pre", rollout.answer, cls="said")])
