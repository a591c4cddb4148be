"""The sentences of a comparison: what came out, and what falls short of what was wanted, from results.json.

Not here: the page that they stand on (`recipes.compare.page`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipes import plots
from recipes.compare.numbers import ROUNDING, SMALL, WANTED_GAIN
from recipes.report import WIDE

GROUP_NAMES: Mapping[str, str] = {
    "swarm": plots.STYLES["swarm"][0],
    "single_agent": plots.STYLES["single_agent_ppo"][0],
    "serial_collapse": "λ1 = λ2 = 0",
    "serial_collapse_parl": "PARL, annealed to 0",
    "spurious": "λ1 for ever, λ2 = 0",
    "spurious_finish": "λ1 and λ2 for ever",
}
"""Group → its name in tables and pictures."""
OPPONENTS = {
    "single_agent_ppo": "a single agent that had the same PPO",
    "single_agent": "the swarm without subagents",
}
SIGNS = {"exact": "", "at_least": "≥ ", "at_most": "≤ "}
SIZE_WORDS = {
    "wide": f"tables of {WIDE} rows and more",
    "all": "all tables",
    "small": f"tables of at most {SMALL} rows",
}


def answer(results: Mapping[str, Any]) -> list[str]:
    """The result in a few sentences, for the page and the terminal."""
    lines: list[str] = []
    if results["headline"]:
        lines += _headline_answer(results["headline"])
    for name, values in results["ablations"].items():
        lines.append(f"{group_words(name)}: {_verdict(values)}.")
    return lines


def opponent_of(headline: Mapping[str, Any]) -> str:
    """The single agent that the swarm is held against: with PPO of its own if there is one."""
    return "single_agent_ppo" if "single_agent_ppo" in headline["gain"] else "single_agent"


def _headline_answer(headline: Mapping[str, Any]) -> Iterator[str]:
    opponent = opponent_of(headline)
    rows = headline["steps_to_target"][opponent]
    targets = ", ".join(f"{100 * r['target']:.0f}" for r in rows)
    ratios = ", ".join(bounded_words(r["ratio"], ".1f") for r in rows)
    k25 = ", ".join(f"{r['k25']:.1f}" for r in rows)
    yield (
        f"To a mean item-F1 of {targets} % on wide tables {OPPONENTS[opponent]} needs {ratios} times the "
        f"critical steps of the swarm (Kimi K2.5, in time: {k25})."
    )
    for size, words in SIZE_WORDS.items():
        gain = headline["gain"][opponent][size]
        if gain["mean"] is not None:
            yield f"Item-F1 at the full budget, on {words}, swarm minus {system_words(opponent)}: {gain_words(gain)}."


def gain_words(gain: Mapping[str, Any]) -> str:
    """`+6.4 points (seeds +6.1, +6.7; 95 % over 60 tasks +3.0 to +9.9)`; the gain must have a mean."""
    low, high = (100 * x for x in gain["ci"])
    seeds = ", ".join(f"{100 * v:+.1f}" for v in gain["values"])
    return (
        f"{100 * gain['mean']:+.1f} points (seeds {seeds}; 95 % over {gain['tasks']} tasks {low:+.1f} to {high:+.1f})"
    )


def _verdict(values: Mapping[str, Any]) -> str:
    """What became of an ablation's spawning, from its last iterations."""
    n, first, last = len(values["seeds"]), values["first"], values["last"]
    ends = (
        f"spawn rate {first['spawn_rate']['mean']:.2f} → {last['spawn_rate']['mean']:.2f}, "
        f"spurious {first['spurious_rate']['mean']:.2f} → {last['spurious_rate']['mean']:.2f}, "
        f"item-F1 {first['item_f1']['mean']:.3f} → {last['item_f1']['mean']:.3f}"
    )
    found = [
        f"{values['collapsed']} of {n} seeds collapsed to a serial agent",
        f"{values['spurious']} of {n} spawn spuriously",
    ]
    return f"{', '.join(found)} at the end ({ends})"


def cured(cure: Mapping[str, Any], ablations: Mapping[str, Any]) -> str:
    """Whether a failure and its cure were both seen, and in how many seeds."""
    word = {"collapsed": "collapse to a serial agent", "spurious": "spawn spuriously"}[cure["failure"]]
    counts = [(ablations[cure[k]][cure["failure"]], len(ablations[cure[k]]["seeds"])) for k in ("failing", "cured")]
    (a, n), (b, m) = counts
    said = "shown" if cure["met"] else "not shown"
    return (
        f"Failure and cure {said}: with {group_words(cure['failing'])} {a} of {n} seeds {word}, "
        f"with {group_words(cure['cured'])} {b} of {m}."
    )


# --- what falls short ------------------------------------------------------------------


def falls_short(results: Mapping[str, Any]) -> list[str]:
    """A sentence for each number that is below what was wanted, and by how much."""
    lines: list[str] = []
    if results["headline"]:
        lines += _headline_short(results["headline"])
    lines += [cured(c, results["ablations"]) for c in results["cures"] if not c["met"]]
    return lines


def _headline_short(headline: Mapping[str, Any]) -> Iterator[str]:
    opponent = opponent_of(headline)
    if opponent == "single_agent":
        yield "No single agent with PPO of its own was compared: the one above is the swarm without subagents."
    for field, (ours, theirs) in headline["differing_fields"].items():
        yield f"The training differs in more than subagents: `{field}` is {ours} for the swarm, {theirs} for the other."
    if unpaired := [s for s in headline["seeds"] if opponent != "single_agent" and s not in headline["pairs"]]:
        yield f"Seeds of only one of the two groups, in no gain or ratio: {', '.join(map(str, unpaired))}."
    for row in headline["steps_to_target"][opponent]:
        if not row["met"]:
            yield _ratio_short(row)
    wide, small = headline["gain"][opponent]["wide"], headline["gain"][opponent]["small"]
    if wide["mean"] is None or wide["mean"] < WANTED_GAIN - ROUNDING:
        known = "not measured" if wide["mean"] is None else gain_words(wide)
        yield f"The gain on {SIZE_WORDS['wide']} is {known}, wanted {100 * WANTED_GAIN:+.1f} or more."
    if small["mean"] is None:
        yield f"No {SIZE_WORDS['small']} were evaluated."
    elif small["mean"] < -ROUNDING:
        noise = ", within the noise of the tasks" if small["ci"][1] >= -ROUNDING else ""
        yield f"On {SIZE_WORDS['small']} the swarm loses item-F1: {gain_words(small)}{noise}."


def _ratio_short(row: Mapping[str, Any]) -> str:
    ratio, wanted = row["ratio"], row["k25"]
    at = f"{100 * row['target']:.0f} %"
    if ratio["value"] is None:
        missed = sum(s["swarm"]["value"] is None for s in row["seeds"])
        why = f"the swarm misses the target in {missed} of {len(row['seeds'])} seeds" if missed else "not measured"
        return f"Ratio at {at}: {why}, wanted {wanted:.1f}."
    below = f", {wanted - ratio['value']:.1f} below" if ratio["value"] < wanted else ""
    return f"Ratio at {at}: {bounded_words(ratio, '.2f')}, wanted {wanted:.1f}{below}."


# --- cells -----------------------------------------------------------------------------


def system_words(system: str) -> str:
    """The name of a system in tables."""
    return plots.style(system, [system])[0]


def group_words(name: str) -> str:
    """What a group is, and its name on the command line."""
    return f"{GROUP_NAMES[name]} (`{name}`)"


def number_words(value: float | None, form: str) -> str:
    """The number, `–` where there is none."""
    return "–" if value is None else format(value, form)


def bounded_words(measured: Mapping[str, Any], form: str, unit: str = "") -> str:
    """`≥ 4.5×`: the number with what is known of it."""
    if measured["value"] is None:
        return "–"
    return f"{SIGNS[measured['bound']]}{measured['value']:{form}}{unit}"


def spread_words(values: Mapping[str, Any], form: str) -> str:
    """`0.812 (0.790–0.834)`; the mean alone where all are the same."""
    if values["mean"] is None:
        return "–"
    mean, low, high = (format(values[k], form) for k in ("mean", "low", "high"))
    return mean if low == high else f"{mean} ({low}–{high})"
