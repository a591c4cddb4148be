"""The page of a comparison: results.md, in tables and plain words, every number from results.json.

First the answer, then the tables behind it, how it was measured, how to do it again, and what falls short.
Not here: the numbers (`recipes.compare.numbers`) and the pictures (`recipes.compare.charts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.compare.numbers import CLOSING, COLLAPSED, CURVES, ENDS, SIZES, SPURIOUS
from recipes.compare.words import (
    OPPONENTS,
    SIZE_WORDS,
    answer,
    bounded_words,
    cured,
    falls_short,
    gain_words,
    group_words,
    number_words,
    opponent_of,
    spread_words,
    system_words,
)
from recipes.report import FIELDS, grid, picture

_HEADINGS: Mapping[str, tuple[str, str]] = {key: (heading, form) for key, heading, form in FIELDS} | {
    "width": ("width", ".1f")
}
_SHOWN = [field for field in FIELDS if field[0] != "tasks"]


def markdown(results: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """results.md; shows the pictures that exist."""
    parts = [
        "# Results",
        picture("results-overview.png", pictures, "Swarm and single agent: learning, quality for steps, ratios"),
        *_answer_section(results),
        *_headline_section(results, pictures),
        *_ablation_section(results, pictures),
        *_measured_section(results),
        *_commands_section(results),
        *_short_section(results),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


# --- the answer ------------------------------------------------------------------------


def _answer_section(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## The question and the answer"
    if results["headline"]:
        yield (
            "Does a policy that learned with PARL to spawn frozen subagents fill wide tables in fewer critical steps, "
            f"and fill more of them, than {OPPONENTS[opponent_of(results['headline'])]}?"
        )
    if results["cures"]:
        yield "Do serial collapse and spurious parallelism appear where PARL lacks a part, and vanish where it has it?"
    yield "\n".join(f"- {line}" for line in answer(results))
    short = falls_short(results)
    yield f"Short of what was wanted: {len(short)} (listed at the end)." if short else "Everything wanted was reached."


# --- swarm against single agent --------------------------------------------------------


def _headline_section(results: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    headline = results["headline"]
    if not headline:
        return
    systems = headline["systems"]
    yield "## Held-out tasks, full budget"
    yield grid(
        ["mean over seeds (smallest–largest)", *map(system_words, systems)],
        [[heading, *(spread_words(v[key], form) for v in systems.values())] for key, heading, form in _SHOWN],
    )
    yield (
        "All systems saw the same tasks, none of them in training. *single agent, PPO*: trained without subagents; "
        "*single agent* and *cold start*: the weights that the swarm's training began with, without and with spawn "
        "tools. *finish rate*: assignments that brought a needed row, among all; *spurious*: the others. "
        "A single value means one seed, or the same in all."
    )
    yield _gains(headline)
    yield from _targets_section(headline, pictures)
    yield picture("results-sizes.png", pictures, "Item-F1 and critical steps by table size")
    yield "## Training"
    yield picture("results-learning.png", pictures, "Learning curves, swarm and single agent")
    yield "Strong lines are means over seeds, faint ones single seeds, all running means of five iterations."
    yield "## Every seed"
    yield grid(["system", "seed", *(heading for _, heading, _ in _SHOWN)], list(_seed_rows(systems)))


def _gains(headline: Mapping[str, Any]) -> str:
    rows = [
        [f"swarm minus {system_words(opponent)}", SIZE_WORDS[size], gain_words(gain[size])]
        for opponent, gain in headline["gain"].items()
        for size, *_ in SIZES
        if gain[size]["mean"] is not None
    ]
    return grid(["item-F1", "on", "gain"], rows)


def _seed_rows(systems: Mapping[str, Any]) -> Iterator[list[str]]:
    for system, values in systems.items():
        for k, seed in enumerate(values["seeds"]):
            cells = [values[key]["values"][k] for key, _, _ in _SHOWN]
            yield [
                system_words(system),
                str(seed),
                *(number_words(c, f) for c, (_, _, f) in zip(cells, _SHOWN, strict=True)),
            ]


def _targets_section(headline: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    yield "## Critical steps to reach a quality"
    for opponent, rows in headline["steps_to_target"].items():
        heads = [f"{system_words(opponent)} against swarm", *(f"{100 * r['target']:.0f} %" for r in rows)]
        lines = [
            [system_words(opponent), *(bounded_words(r["single_agent"], ".1f") for r in rows)],
            ["swarm", *(bounded_words(r["swarm"], ".1f") for r in rows)],
            *(
                [f"ratio, seed {seed['seed']}", *(bounded_words(r["seeds"][k]["ratio"], ".1f", "×") for r in rows)]
                for k, seed in enumerate(rows[0]["seeds"])
            ),
            ["**ratio, mean**", *(bounded_words(r["ratio"], ".1f", "×") for r in rows)],
            ["Kimi K2.5", *(f"{r['k25']:.1f}×" for r in rows)],
        ]
        yield grid(heads, lines)
    yield (
        "Each system was run on the same wide tables with budgets from small to large. A budget gives one point: mean "
        "critical steps used, mean item-F1; the table reads where the curve first meets the target (straight lines "
        "between points), for each seed, then the mean. `≥`: the single agent never met the target, so its largest "
        "mean steps stand in, or the swarm met it with its smallest budget. `≤`: the single agent met it with its "
        "smallest budget. `–`: the swarm did not meet it, in one seed or more. Kimi K2.5 (arXiv 2602.02276, figure 8) "
        "reports ratios of time, not of critical steps."
    )
    yield picture("results-steps.png", pictures, "Critical steps to each target, with the ratios")
    yield picture("results-sweep.png", pictures, "Item-F1 against critical steps")


# --- ablations -------------------------------------------------------------------------


def _ablation_section(results: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    ablations = results["ablations"]
    if not ablations:
        return
    yield "## What goes wrong without each part, and what cures it"
    rows = [
        [group_words(name), when, *(spread_words(values[key][k], _HEADINGS[k][1]) for k in CURVES)]
        for name, values in ablations.items()
        for when, key in ((f"first {ENDS}", "first"), (f"last {ENDS}", "last"))
    ]
    yield grid(["training rollouts", "iterations", *(_HEADINGS[k][0] for k in CURVES)], rows)
    closing = [
        [
            group_words(name),
            *(spread_words(v["held_out"][k], _HEADINGS[k][1]) for k in CLOSING),
            spread_words(v["held_out_alone"]["item_f1"], ".3f"),
        ]
        for name, v in ablations.items()
    ]
    yield grid(["held-out tasks", *(_HEADINGS[k][0] for k in CLOSING), "item-F1 without subagents"], closing)
    yield (
        f"Means over seeds (smallest–largest). *Collapsed*: fewer than {100 * COLLAPSED:.0f} % of the last {ENDS} "
        f"iterations' episodes spawn. *Spurious*: more than {100 * SPURIOUS:.0f} % of their assignments brought "
        "nothing needed."
    )
    yield "\n".join(f"- {cured(c, ablations)}" for c in results["cures"])
    yield picture("results-ablations.png", pictures, "The failures and their cures over training")


# --- how it was measured ---------------------------------------------------------------


def _measured_section(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## How it was measured"
    groups = results["groups"]
    rows = [
        [
            group_words(name),
            ", ".join(map(str, g["seeds"])),
            f"{g['fields']['iterations']} × {g['fields']['episodes']}",
            _range(g["fields"]["tasks"]["rows"]),
            _range(g["fields"]["tasks"]["budget"]),
            f"{g['fields']['parl']['lambda_parallel']:g}, {g['fields']['parl']['lambda_finish']:g} ({_annealed(g)})",
            ", ".join("–" if w is None else f"{w / 60:.1f}" for w in g["wall_seconds"]),
        ]
        for name, g in groups.items()
    ]
    heads = ["group", "seeds", "iterations × episodes", "rows in training", "budget in training", "λ1, λ2", "minutes"]
    yield grid(heads, rows)
    yield "\n".join(f"- {group_words(name)}: {_evaluated(g['fields'])}" for name, g in groups.items())
    frozen = [group_words(name) for name, g in groups.items() if not g["frozen_unchanged"]]
    yield (
        f"Weights of the frozen subagents before and after training: NOT known to be the same in {', '.join(frozen)}."
        if frozen
        else "Weights of the frozen subagents: the same after every run as before it."
    )
    failed = sum(g["failed_episodes"] for g in groups.values())
    yield f"{failed} episodes failed for reasons of the infrastructure and are in no mean." if failed else ""


def _annealed(group: Mapping[str, Any]) -> str:
    parl = group["fields"]["parl"]
    if not (parl["lambda_parallel"] or parl["lambda_finish"]):
        return "off"
    return f"to 0 in {parl['anneal_steps']} optimizer steps" if parl["anneal"] else "held"


def _evaluated(fields: Mapping[str, Any]) -> str:
    ev = fields["evaluation"]
    sweeps = [f"{', '.join(map(str, ev['sweep_single']))} (single agent)"]
    if fields["spawn"]:
        sweeps.append(f"{', '.join(map(str, ev['sweep_swarm']))} (swarm)")
    return (
        f"{ev['tasks']} held-out tasks of {_range(ev['rows'])} rows at {ev['budget']} critical steps; sweep on "
        f"{ev['wide_tasks']} tasks of {_range(ev['wide_rows'])} rows with budgets of {' and '.join(sweeps)}."
    )


def _range(pair: Sequence[int]) -> str:
    return f"{pair[0]}–{pair[1]}"


def _commands_section(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## To do it again"
    lines: list[str] = []
    compare = ["swarm-rl compare docs"]
    for name, g in results["groups"].items():
        folders = [f"runs/{g['recipe']}-{seed}" for seed in g["seeds"]]
        changes = "".join(f" --{key} {_value(value)}" for key, value in g["overrides"].items())
        lines += [
            f"swarm-rl train {g['recipe']} --seed {s} --out {f}{changes}"
            for s, f in zip(g["seeds"], folders, strict=True)
        ]
        compare.append(f"  --group {name}={','.join(folders)}")
    yield "\n".join(["```", *lines, " \\\n".join(compare), "```"])
    foreign = dict.fromkeys(f"`{field}`" for g in results["groups"].values() for field in g["foreign"])
    yield f"The runs had settings that the recipes no longer have: {', '.join(foreign)}." if foreign else ""


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(str(v) for v in value) if isinstance(value, list) else str(value)


# --- what falls short ------------------------------------------------------------------


def _short_section(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## What falls short"
    short = falls_short(results)
    yield "\n".join(f"- {line}" for line in short) if short else "Nothing of what was wanted above."
