"""Tasks over a world: find every row of a list, and the wanted attributes of each.

    query     List all airports in Ohio, United States.
              Columns: airport | elevation | population of nearest city
              The latest revision wins. Write N/A if a page does not say.
    subject   airports in Ohio, United States

Held-out tasks are about groups, use sentences and (of three columns and more) combinations of columns
that no training task has. Gold values are exactly the strings on the pages. Not here: whether a task is
worth serving (`envs.accept`).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Literal

from envs.pages import MISSING, EntityPage
from envs.world import Listed, World, band, stable_hash
from swarm.types import Task

Split = Literal["train", "heldout"]
RULE = f"The latest revision wins. Write {MISSING} if a page does not say."
TEMPLATES: Mapping[Split, tuple[str, ...]] = {
    "train": (
        "List all {}.",
        "Find all {}.",
        "Make a table of all {}.",
        "Which are the {}? List them all.",
        "Give the full list of {}.",
        "I need a table of the {}.",
    ),
    "heldout": ("Name every one of the {}.", "Collect the {}, all of them.", "Tabulate the {}, leaving none out."),
}
HELDOUT_GROUPS, HELDOUT_COMBINATIONS = 0.2, 0.15
MAX_SHARE = 0.12
"""A column is offered where no constant is right in more than this share of rows: with five such
columns a constant gains at most 0.12 · 5 / 6 = 0.1 over the keys alone."""
_SELF_EVIDENT = frozenset({"last year"})
"""Fields whose value repeats the key, so that only what they link to is worth asking."""
_ROW_STEPS = 8
_PATIENCE = 200


@dataclass(frozen=True, slots=True)
class Column:
    """What is asked of each row: field `name`, of the row's page or of the page that field `via` links to."""

    name: str
    via: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} of {self.via}" if self.via else self.name

    @staticmethod
    def parse(text: str) -> Column:
        """`"population of nearest city"` → `Column("population", "nearest city")`; no field's name has an "of"."""
        name, _, via = text.partition(" of ")
        return Column(name, via)


@dataclass(frozen=True)
class TaskSet:
    """All tasks that a world can pose, drawn at will: `TaskSet(world).draw("train", 100, seed=0)`.

    `keep` decides which are served (see `envs.accept.accepted`); without one, all are.
    """

    world: World
    keep: Callable[[Task], bool] | None = None

    @cached_property
    def options(self) -> Mapping[str, tuple[Column, ...]]:
        """List url → the columns that may be asked there; lists with none are left out."""
        found = ((listed.url, _columns(self.world, listed)) for listed in self.world.lists)
        return {url: columns for url, columns in found if columns}

    def lists(self, split: Split) -> list[Listed]:
        """The lists of a split that some task can be about."""
        return [x for x in self.world.lists if x.url in self.options and split_of(x.group.holdout) == split]

    def draw(
        self,
        split: Split,
        n: int,
        seed: int,
        *,
        rows: tuple[int, int] = (3, 80),
        columns: tuple[int, int] = (2, 6),
        hops: tuple[int, int] = (0, 2),
        families: tuple[str, ...] = (),
    ) -> list[Task]:
        """n distinct tasks, the same ones for the same arguments. Bounds are inclusive.

        `rows` is log-uniform over the bands that have lists; then families, then lists are equally likely.
        `columns` counts the key, `hops` the columns read from a linked page. Raises ValueError where
        the world has fewer than n such tasks.
        """
        _check_bounds(rows, columns, hops)
        strata = _strata([x for x in self.lists(split) if not families or x.group.family in families], rows)
        rng = Random(stable_hash(seed, "tasks", split))
        drawn: dict[str, Task] = {}
        refused: set[str] = set()
        misses = 0
        while len(drawn) < n:
            task = self._candidate(rng, strata, split, columns, hops) if strata else None
            if task and task.id not in drawn and task.id not in refused and self._kept(task, refused):
                drawn[task.id] = task
                misses = 0
                continue
            misses += 1
            if misses > _PATIENCE or not strata:
                raise ValueError(f"tasks: {len(drawn)} found, want {n} ({split}, rows {rows}, columns {columns})")
        return list(drawn.values())

    def _kept(self, task: Task, refused: set[str]) -> bool:
        if self.keep is None or self.keep(task):
            return True
        refused.add(task.id)
        return False

    def _candidate(
        self,
        rng: Random,
        strata: list[list[list[Listed]]],
        split: Split,
        columns: tuple[int, int],
        hops: tuple[int, int],
    ) -> Task | None:
        listed = rng.choice(rng.choice(rng.choice(strata)))
        options = self.options[listed.url]
        chosen = rng.sample(options, min(len(options), rng.randint(columns[0], columns[1]) - 1))
        fits = columns[0] <= len(chosen) + 1 and hops[0] <= sum(bool(c.via) for c in chosen) <= hops[1]
        if not fits or (split == "train" and heldout_combination(listed.group.family, chosen)):
            return None
        return make_task(self.world, listed, tuple(chosen), split, rng.randrange(len(TEMPLATES[split])))


def tasks(
    world: World,
    split: Split,
    n: int,
    seed: int,
    rows: tuple[int, int] = (3, 80),
    keep: Callable[[Task], bool] | None = None,
) -> list[Task]:
    """n tasks of a world; see `TaskSet.draw`, which is quicker when drawing more than once."""
    return TaskSet(world, keep).draw(split, n, seed, rows=rows)


def split_of(holdout: str) -> Split:
    """The split of a group, by a hash of its place, element or subject; the same in every world."""
    return "heldout" if stable_hash("holdout", holdout) / 2**64 < HELDOUT_GROUPS else "train"


def heldout_combination(family: str, columns: Iterable[Column]) -> bool:
    """Whether these columns (two attributes and more) are asked together in held-out tasks only."""
    names = sorted(c.text for c in columns)
    return len(names) > 1 and stable_hash("columns", family, *names) / 2**64 < HELDOUT_COMBINATIONS


def make_task(world: World, listed: Listed, columns: tuple[Column, ...], split: Split, template: int) -> Task:
    """The task that asks these columns of this list, in the words of a template of the split.

    Columns stand in a fixed order: those of the row's own page by name, then those of linked pages.
    """
    columns = tuple(sorted(columns, key=lambda c: (c.via, c.name)))
    subject, family = listed.group.subject, listed.group.family
    names = (family, *(c.text for c in columns))
    query = f"{TEMPLATES[split][template].format(subject)}\nColumns: {' | '.join(names)}\n{RULE}"
    gold = tuple((_page(world, url).title, *(value(world, url, c) for c in columns)) for url in listed.members)
    digest = stable_hash(query, gold, listed.url)
    hops = [c.via for c in columns if c.via]
    meta = {
        "rows": len(gold),
        "hops": len(hops),
        "pages": -(-len(gold) // world.config.list_page_size),
        "group": listed.group.holdout,
        "split": split,
        "template": f"{split}-{template}",
        "steps_per_row": 1 + len(set(hops)),
        "list_url": listed.url,
    }
    return Task(f"{family}-{digest:016x}", query, subject, family, names, gold, meta=meta)


def value(world: World, url: str, column: Column) -> str:
    """What the pages say of an entity in a column; "N/A" where they do not."""
    page = world.entity(url)
    if page and column.via:
        link = page.latest(column.via)
        page = world.entity(link.link) if link and link.link else None
    found = page.latest(column.name) if page else None
    return found.value if found else MISSING


def constant_guess(values: Iterable[str], usual: str) -> str:
    """The constant that a guesser would write down a column: a value seen twice in it, else the usual one."""
    ((best, times),) = Counter(values).most_common(1)
    return best if times > 1 else usual


def usual_values(world: World) -> Mapping[tuple[str, str], str]:
    """(family, field) → the most common value over the whole world: the best guess without looking."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for page in world.pages.values():
        if isinstance(page, EntityPage):
            for name in {f.plain_name for f in page.fields}:
                counts[page.family, name][value(world, page.url, Column(name))] += 1
    return {key: c.most_common(1)[0][0] for key, c in counts.items()}


def count(chosen: Iterable[Task]) -> dict[tuple[str, str, str], int]:
    """How many tasks there are of each (split, family, band of rows)."""
    return dict(sorted(Counter((t.meta["split"], t.domain, band(t.meta["rows"])) for t in chosen).items()))


def export(chosen: Iterable[Task], path: Path) -> int:
    """Writes tasks as JSON lines, gold included, and returns how many."""
    lines = [json.dumps(asdict(t), ensure_ascii=False) for t in chosen]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def possible(task_set: TaskSet, split: Split) -> Iterator[tuple[Listed, int]]:
    """Each list of a split with how many distinct tasks it allows (sets of 1 to 5 columns times wordings)."""
    for listed in task_set.lists(split):
        n = len(task_set.options[listed.url])
        yield listed, sum(math.comb(n, k) for k in range(1, min(5, n) + 1)) * len(TEMPLATES[split])


def _page(world: World, url: str) -> EntityPage:
    page = world.entity(url)
    if page is None:
        raise KeyError(f"no entity page at {url}")
    return page


def _columns(world: World, listed: Listed) -> tuple[Column, ...]:
    """The columns of a list that its pages answer and that no constant does."""
    pages = [_page(world, url) for url in listed.members]
    names = dict.fromkeys(sorted({f.plain_name for p in pages for f in p.fields}))
    candidates = [Column(n) for n in names if n not in _SELF_EVIDENT]
    for via in names:
        links = [f.link for p in pages if (f := p.latest(via)) and f.link]
        targets = [_page(world, link) for link in links]
        candidates += [
            Column(n, via)
            for n in sorted({f.plain_name for t in targets for f in t.fields if not f.link} - _SELF_EVIDENT)
        ]
    return tuple(c for c in candidates if _askable(world, listed, c))


def _askable(world: World, listed: Listed, column: Column) -> bool:
    """No value, "N/A" included, is found in too many rows; a world without missing values has no "N/A" at all."""
    values = Counter(value(world, url, column) for url in listed.members)
    most = MAX_SHARE * len(listed.members)
    absent = values.pop(MISSING, 0)
    repeated = max((n for n in values.values() if n > 1), default=0)
    return absent <= (most if world.config.missing else 0) and repeated <= most


def _strata(lists: list[Listed], rows: tuple[int, int]) -> list[list[list[Listed]]]:
    """Lists by band of rows (equal in log rows), then by family; empty bands are left out."""
    step = math.log(rows[1] / rows[0] + 1e-9) / _ROW_STEPS or 1.0
    bands: dict[int, dict[str, list[Listed]]] = defaultdict(lambda: defaultdict(list))
    for listed in lists:
        n = len(listed.members)
        if rows[0] <= n <= rows[1]:
            k = min(_ROW_STEPS - 1, max(0, int(math.log(n / rows[0]) / step)))
            bands[k][listed.group.family].append(listed)
    return [[bands[k][f] for f in sorted(bands[k])] for k in sorted(bands)]


def _check_bounds(rows: tuple[int, int], columns: tuple[int, int], hops: tuple[int, int]) -> None:
    for name, (lo, hi), least in (("rows", rows, 1), ("columns", columns, 2), ("hops", hops, 0)):
        if not least <= lo <= hi:
            raise ValueError(f"tasks: {name} = ({lo}, {hi}), want {least} <= low <= high")
