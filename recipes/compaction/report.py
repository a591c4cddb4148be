"""The report of a study of compaction: a pure function of its folder, so that it can be rebuilt at any time.

    recipe.json  start/SYSTEM.jsonl  FORM-SEED/{trails,metrics}.jsonl   →   report/report.json, report.md, *.png

Runs that are not finished are left out and named. Equal input gives equal files. Not here: the numbers
(`recipes.compaction.numbers`), the pictures (`recipes.compaction.charts`), the report of a single run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes.compaction import charts
from recipes.compaction.charts import STYLES
from recipes.compaction.episodes import FILE, TrailEpisode, read
from recipes.compaction.numbers import FORMS, START, Finished, build
from recipes.report import ReportError, grid, picture, replace
from swarm.rundir import read_done, read_metrics, read_recipe

FIELDS: tuple[tuple[str, str, str], ...] = (
    ("score", "score", ".3f"),
    ("success", "success", ".3f"),
    ("compactions", "rewrites", ".1f"),
    ("steps", "critical steps", ".1f"),
    ("tokens", "tokens", ".0f"),
    ("transcript", "transcript", ".0f"),
)


def run_folder(out: Path, form: str, seed: int) -> Path:
    """Where the study in `out` trains one form with one seed: `OUT/chained-0`."""
    return out / f"{form}-{seed}"


def start_file(out: Path, system: str) -> Path:
    """Where the study in `out` keeps the episodes of a system that is not trained."""
    return out / "start" / f"{system}.jsonl"


def is_study(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe.json is that of a study of compaction."""
    return {"run", "seeds", "forms"} <= recipe.keys()


def write_report(out: Path) -> dict[str, Any]:
    """Builds `out/report/` and returns what report.json holds.

    Raises ReportError, EpisodesError, RunDirError or OSError where the folder is no study, or does not read.
    """
    recipe = read_recipe(out)
    if not is_study(recipe):
        raise ReportError(f"{out}: recipe.json has no run, seeds and forms, want that of a study of compaction")
    report = build(*load(out, recipe))
    folder = out / "report"
    folder.mkdir(exist_ok=True)
    pictures = charts.draw_all(report, folder)
    replace(folder / "report.md", markdown(report, recipe, pictures).encode())
    replace(folder / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def report_study(out: Path, console: Console) -> dict[str, Any]:
    """Builds the report and shows its table and its answer; raises what `write_report` raises."""
    report = write_report(out)
    print_table(report, console)
    console.print(f"report: {escape(str(out / 'report' / 'report.md'))}", highlight=False)
    return report


def load(out: Path, recipe: Mapping[str, Any]) -> tuple[list[TrailEpisode], list[Finished], list[str]]:
    """The episodes without training, the finished runs, and the names of what is missing."""
    start = [e for system in START for e in read(start_file(out, system))]
    runs: list[Finished] = []
    missing = [s for s in START if all(e.system != s for e in start)]
    for form in [f for f in FORMS if f in recipe["forms"]]:
        for seed in recipe["seeds"]:
            path = run_folder(out, form, seed)
            done = read_done(path)
            if done is None:
                missing.append(path.name)
            else:
                episodes, metrics = read(path / FILE), read_metrics(path)
                runs.append(Finished(form, seed, episodes, metrics, done.get("wall_seconds")))
    return start, runs, missing


# --- the terminal ----------------------------------------------------------------------


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """A line a system, and the answer in sentences."""
    table = Table(title="Held-out tasks", title_justify="left", title_style="bold", header_style="bold", box=None)
    for k, heading in enumerate(_HEADS):
        table.add_column(heading, justify="right" if k else "left")
    for system, cells in _rows(report):
        table.add_row(*cells, style="bold" if system == "chained" else None)
    console.print(table)
    for line in answer(report):
        console.print(escape(line), highlight=False)


_HEADS = ("system", *(heading for _, heading, _ in FIELDS), "score, 95 %", "over", "tasks")


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for system, values in report["systems"].items():
        over = f"{len(values['seeds'])} seeds" if values["ci_over"] == "seeds" else "tasks"
        numbers = [number(values[key]["mean"], form) for key, _, form in FIELDS]
        yield (
            system,
            [STYLES[system][0], *numbers, ends(values["score"]["ci"], ".3f"), over, str(values["tasks"])],
        )


# --- sentences -------------------------------------------------------------------------


def answer(report: Mapping[str, Any]) -> list[str]:
    """What came out, for the page and the terminal."""
    minus = {s: found for s, found in report["minus_untrained"].items() if found["difference"] is not None}
    between = {s: found for s, found in report["between_forms"].items() if found["difference"] is not None}
    lines = [f"Still missing: {', '.join(report['missing'])}."] if report["missing"] else []
    lines += [f"{_sentence(s)} minus untrained compaction: {gain(found)}." for s, found in minus.items()]
    lines += [line for form in minus if form in FORMS and (line := _closed(form, minus))]
    for name, found in between.items():
        ours, _, base = name.partition("_minus_")
        lines.append(f"{_sentence(ours)} minus trained ({base}): {gain(found)}.")
    return lines


def _sentence(system: str) -> str:
    name = STYLES[system][0]
    return name[0].upper() + name[1:]


def _closed(form: str, minus: Mapping[str, Any]) -> str:
    """How much of the way from untrained compaction to the full window training went."""
    ours, most = minus[form]["difference"], minus.get("full_window", {}).get("difference", 0.0)
    if most <= 0:
        return ""
    if ours > most:
        return f"{_sentence(form)}: above the full window with the weights that training starts from."
    share = f"{100 * ours / most:.0f} %"
    return f"{_sentence(form)}: {share} of the way from untrained compaction to the full window."


def gain(found: Mapping[str, Any]) -> str:
    """`+12.3 points, clear (seeds +11.9, +12.7; 95 % over 200 tasks +9.8 to +14.9, over seeds +7.2 to +17.4)`."""
    points = f"{100 * found['difference']:+.1f} points"
    over = f"95 % over {found['tasks']} tasks {ends(found['ci'], '+.1f', 100)}"
    if found["ci_seeds"]:
        over += f", over seeds {ends(found['ci_seeds'], '+.1f', 100)}"
    if found["seeds"]:
        over = f"seeds {', '.join(number(v, '+.1f', 100) for v in found['values'])}; {over}"
    return f"{points}, {'clear' if found['clear'] else 'not clear'} ({over})"


def number(value: float | None, form: str, times: float = 1.0) -> str:
    """The number, `–` where there is none."""
    return "–" if value is None else format(times * value, form)


def ends(ci: Sequence[float] | None, form: str, times: float = 1.0) -> str:
    """`0.512 to 0.604`."""
    return "–" if ci is None else f"{times * ci[0]:{form}} to {times * ci[1]:{form}}"


# --- the page --------------------------------------------------------------------------


def markdown(report: Mapping[str, Any], recipe: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """report.md: what was measured, in tables and plain words; shows the pictures that exist."""
    parts = ["# Report", picture("overview.png", pictures, "The study on one page")]
    if report["systems"]:
        parts += [*_answer_section(report), *_systems_section(report, pictures), *_bands_section(report, pictures)]
    else:
        parts.append("This study has no evaluation yet.")
    parts += [*_learning_section(report, pictures), *_measured_section(report, recipe)]
    return "\n\n".join(p for p in parts if p) + "\n"


def _answer_section(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## The question and the answer"
    yield (
        "Does training make an agent better at tasks that do not fit into its context, where it has to write "
        "summaries of what it found and go on from them? And which form of the advantage trains best?"
    )
    yield "\n".join(f"- {line}" for line in answer(report))
    yield (
        "Differences are of the score, in points of 100, by task. *Clear*: every seed's difference and both "
        "intervals, over tasks and over seeds, lie on one side of 0."
    )


def _systems_section(report: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    yield "## Held-out tasks"
    yield grid(_HEADS, [cells for _, cells in _rows(report)])
    yield (
        "All systems saw the same tasks, none of them in training. *truncation*: the oldest steps are dropped when "
        "the context is full. *compaction (untrained)*: the policy writes a summary then, with the weights that "
        "training starts from. *trained*: the same after PPO, with the advantage chained through the summaries, the "
        "reward copied to every context, or copied and decayed. *full window*: the first weights with a context "
        "that holds everything. *score*: share of a task's trails whose value is right; *success*: tasks with all "
        "right; *rewrites*: how often the context was rewritten, by a summary or by dropping; *tokens*: sampled an "
        "episode; *transcript*: tokens seen or said in all contexts, copies not counted again."
    )
    yield (
        "Intervals: of a trained system Student's t over the means of its seeds; of the others, which have one set "
        "of weights and no seeds, the bootstrap over tasks (so too for a trained one with one seed). The two measure "
        "different things: how much training varies, and how much tasks do."
    )
    failed = sum(v["failed"] for v in report["systems"].values())
    yield f"{failed} episodes failed for reasons of the infrastructure and are in no mean." if failed else ""
    yield picture("systems.png", pictures, "Score, success and tokens of each system")
    yield grid(["system", "seed", *(h for _, h, _ in FIELDS)], list(_seed_rows(report)))


def _seed_rows(report: Mapping[str, Any]) -> Iterator[list[str]]:
    for system, values in report["systems"].items():
        for k, seed in enumerate(values["seeds"]):
            yield [
                STYLES[system][0],
                str(seed),
                *(number(values[key]["values"][k], form) for key, _, form in FIELDS),
            ]


def _bands_section(report: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    yield "## Where it matters"
    for key, heading in (("by_trails", "score, trails of a task:"), ("by_compactions", "score, rewrites:")):
        rows = [
            [STYLES[s][0], *(number(b[s]["score"], ".3f") if s in b else "–" for b in report[key].values())]
            for s in report["systems"]
        ]
        yield grid([heading, *report[key]], rows)
    yield (
        "More trails mean more to carry through the summaries. How often the context is rewritten is up to the "
        "agent, too: an agent that gives up early rewrites it less often, so the second table compares episodes, not "
        "tasks."
    )
    yield picture("by_difficulty.png", pictures, "Score by trails and by rewrites")


def _learning_section(report: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    if "learning.png" in pictures:
        yield "## Training"
        yield picture("learning.png", pictures, "Learning curves of each form")
        yield (
            "Lines are means over seeds on training tasks, running means of three iterations; bands reach from the "
            "smallest seed to the largest. Dots are held-out tasks."
        )


def _measured_section(report: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[str]:
    run = recipe["run"]
    yield "## How it was measured"
    main, kept = run["main"], run["main"]["rewriting"]
    lines = [
        f"Training: {run['iterations']} iterations of {run['episodes']} episodes, seeds "
        f"{', '.join(map(str, recipe['seeds']))}, from `{Path(run['start']).name}`.",
        f"Context: {main['context']} tokens, rewritten from {kept['threshold']} on, summaries of at most "
        f"{kept['summary_tokens']} tokens, the last {kept['keep']} steps kept, {main['steps']} critical steps.",
    ]
    for system in ("untrained", "full_window"):
        if system in report["systems"] and (length := report["systems"][system]["transcript"]["mean"]):
            name = STYLES[system][0]
            lines.append(f"Transcript of {name}: {length / main['context']:.1f} times the context.")
    minutes = [f"{name} {s / 60:.1f}" for name, s in report["wall_seconds"].items() if s is not None]
    if minutes:
        lines.append(f"Minutes of each run: {', '.join(minutes)}.")
    yield "\n".join(f"- {line}" for line in lines)
