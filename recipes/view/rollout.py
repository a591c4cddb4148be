"""One rollout as the page shows it: lanes, reward, answer, and in words what made it slow or cost it credit.

Not here: its tokens (`recipes.view.tokens`), which are asked for agent by agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from recipes.view.answer import Line, compared, wanted_rows
from recipes.view.lanes import Lane, Turn, lanes_of
from recipes.view.tokens import Credit
from swarm.types import Rollout


class Finding(Struct, frozen=True):
    """Something worth a look: `kind` (steps, seconds, credit, unlikely, missing, spurious, failed), in words, where."""

    kind: str
    title: str
    text: str
    lane: int = 0
    turn: int = -1


def shown(id: str, rollout: Rollout, credit: Credit | None) -> dict[str, Any]:
    """What the page needs of a rollout, ready for JSON."""
    lanes, rollouts = lanes_of(rollout)
    _count_rows(lanes, rollouts)
    if credit:
        _add_signals(lanes[0].turns, credit)
    lines = compared(rollout, {lane.lane: r.table for lane, r in zip(lanes[1:], rollouts[1:], strict=True)})
    reward = rollout.reward
    return {
        "id": id,
        "task": {k: getattr(rollout.task, k) for k in ("id", "query", "subject", "domain", "columns", "keys")},
        "harness": rollout.harness,
        "failed": rollout.failed,
        "total_steps": rollout.total_steps,
        "reward": {"total": reward.total, "parts": reward.parts, "weights": reward.weights} if reward else None,
        "lanes": [msgspec.structs.asdict(lane) for lane in lanes],
        "lines": lines,
        "findings": findings(lanes, lines, bool(credit)),
        "credit": bool(credit),
    }


def _count_rows(lanes: Sequence[Lane], rollouts: Sequence[Rollout]) -> None:
    """Of every subagent, the wanted rows that it brought, and those that none started before it had."""
    task = rollouts[0].task
    seen: set[tuple[str, ...]] = set()
    for lane, rollout in zip(lanes, rollouts, strict=True):
        found = wanted_rows(task, rollout.table)
        lane.wanted = len(found)
        if lane.parent >= 0 and not rollout.children:
            lane.new = len(found - seen)
            seen |= found


def _add_signals(turns: Sequence[Turn], credit: Credit) -> None:
    """To each turn [mean, first, last] of its tokens' values."""
    at = 0
    for turn in turns:
        for name, values in credit.items():
            own = values[at : at + turn.tokens]
            if own:
                turn.signals[name] = [sum(own) / len(own), own[0], own[-1]]
        at += turn.tokens


# --- in words ------------------------------------------------------------------------------


def findings(lanes: Sequence[Lane], lines: Sequence[Line], credit: bool) -> list[Finding]:
    """What to look at first, the failures before all else."""
    found = [Finding("failed", "Failed", f"{x.name}: {x.error or x.status}", x.lane) for x in lanes if _failed(x)]
    found += _slow(lanes)
    found += _lost_credit(lanes[0]) if credit else _unlikely(lanes[0])
    return found + _rows(lanes, lines) + _spurious(lanes)


def _failed(lane: Lane) -> bool:
    return lane.status in ("error", "truncated")


def _slow(lanes: Sequence[Lane]) -> list[Finding]:
    """The subagents that the longest stages waited for, by steps and by seconds."""
    found: list[Finding] = []
    if critical := [x for x in lanes[1:] if x.critical]:
        found.append(_longest(max(critical, key=lambda x: x.steps), lanes))
    if timed := [x for x in lanes[1:] if x.critical_s and x.seconds > 0]:
        slow = max(timed, key=lambda x: x.seconds)
        text = f"{slow.seconds:.1f} of {lanes[0].seconds:.1f} s, of which it queued {slow.ledger.seconds_queued:.1f} s."
        found.append(Finding("seconds", f"Slowest in seconds: {slow.name}", text, slow.lane))
    return found


def _longest(slow: Lane, lanes: Sequence[Lane]) -> Finding:
    """One subagent that the others waited for, or a stage in which several took as many steps."""
    beside = [x.slack for x in lanes if x.parent == slow.parent and x.turn == slow.turn and x.lane != slow.lane]
    share = f"{slow.steps} of {lanes[0].steps} critical steps, started in turn {slow.turn + 1}"
    if even := beside.count(0):
        text = f"{share}. {even + 1} of {len(beside) + 1} took as many: the stage is even."
        return Finding("steps", f"Longest wait: turn {slow.turn + 1}", text, slow.lane)
    gain = f"without it the stage would end {min(beside)} sooner" if beside else "nothing ran beside it"
    return Finding("steps", f"Slowest in steps: {slow.name}", f"{share}; {gain}.", slow.lane)


def _lost_credit(main: Lane) -> list[Finding]:
    turns = [(t.signals["advantage"][0], k) for k, t in enumerate(main.turns) if "advantage" in t.signals]
    if not turns:
        return []
    low, k = min(turns)
    values = [turn.signals.get("value") for turn in main.turns[k : k + 2]]
    text = f"Mean advantage {low:+.3f} over {main.turns[k].tokens} tokens"
    if values[0]:
        after = values[1][1] if len(values) > 1 and values[1] else values[0][2]
        text += f"; the critic's value went from {values[0][1]:.2f} to {after:.2f}"
    title = f"Credit lost in turn {k + 1}" if low < 0 else f"Least credit in turn {k + 1}"
    return [Finding("credit", title, text + ".", 0, k)]


def _unlikely(main: Lane) -> list[Finding]:
    turns = [(t.logprob, k) for k, t in enumerate(main.turns) if t.logprob is not None]
    if not turns:
        return []
    low, k = min(turns)
    text = f"Mean log-probability {low:.2f}, lowest {main.turns[k].lowest:.2f}: here the policy was least sure."
    return [Finding("unlikely", f"Least likely turn: {k + 1}", text, 0, k)]


def _rows(lanes: Sequence[Lane], lines: Sequence[Line]) -> list[Finding]:
    missing = [x for x in lines if x.verdict == "missing"]
    if not missing:
        return []
    lost = [x for x in missing if x.by]
    wanted = sum(x.verdict != "extra" for x in lines)
    text = f"{len(lost)} of them were found by a subagent and not handed in." if lost else "No subagent had them."
    text = text if len(lanes) > 1 else "The answer does not have them."
    return [Finding("missing", f"{len(missing)} of {wanted} wanted rows missing", text, lost[0].by[0] if lost else 0)]


def _spurious(lanes: Sequence[Lane]) -> list[Finding]:
    idle = [x for x in lanes[1:] if x.new == 0 and not any(y.parent == x.lane for y in lanes)]
    if not idle:
        return []
    names = ", ".join(x.name for x in idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
    title = f"{len(idle)} of {len(lanes) - 1} subagents brought no new wanted row"
    return [Finding("spurious", title, names + ".", idle[0].lane)]
