"""Deep search: tasks of several trails through the pages, each to be followed link by link to one value.

    query     Find all: largest city | nearest airport | elevation
              a: Ohio, United States
              b: Utah
              The latest revision wins. Write N/A if a page does not say.
    gold      ("a", "4,023"), ("b", "4,227")      a row a trail, known by its letter
    names     `#0.a` is "Ohio, United States", so that it need not be spelt out to be searched for

The question is short and each trail is too, but all of them together are far longer than a small context:
what was found early has to be carried along. Held-out tasks start at pages at which no training task does, and
some follow links to a field that no training task asks for by them. Gold values are exactly the strings on
the pages. Not here: wide tasks (`envs.tasks`), and how a policy keeps what it found.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from random import Random
from string import ascii_lowercase

from envs.pages import EntityPage
from envs.tasks import HELDOUT_GROUPS, MAX_SHARE, RULE, Column, Split, value
from envs.tools import DEFAULT_TOPK
from envs.world import World, stable_hash
from swarm.types import Task

DOMAIN = "trails"
QUESTION = "Find all: "
SEPARATOR = " | "
HELDOUT_SHAPES = 0.15
ROOM = 3
"""A shape is asked for where a split has this many times the walks of its longest task, so that tasks differ."""
_PATIENCE = 200


@dataclass(frozen=True, slots=True)
class TrailConfig:
    """How many trails a task has and how many links each of them: `TrailConfig(trails=(5, 8), links=(2, 4))`.

    Both ends are included; each number between is equally likely. Without `repeats` no trail follows the same
    link twice, so that the next one is known from its name. Raises ValueError for bounds out of range.
    """

    trails: tuple[int, int] = (5, 8)
    links: tuple[int, int] = (2, 4)
    repeats: bool = True

    def __post_init__(self) -> None:
        _want("trails", self.trails, 1, len(ascii_lowercase))
        _want("links", self.links, 1, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the trails of a task have in common: `Shape("subdivision", ("largest city",), "population")`."""

    family: str
    links: tuple[str, ...]
    field: str

    @property
    def path(self) -> tuple[str, ...]:
        return (self.family, *self.links)

    @property
    def text(self) -> str:
        """`"largest city | population"`."""
        return SEPARATOR.join((*self.links, self.field))

    @property
    def heldout(self) -> bool:
        """Whether only held-out tasks have it; never one of a single link, of which there are few."""
        return len(self.links) > 1 and stable_hash("trail", *self.path, self.field) / 2**64 < HELDOUT_SHAPES


Walk = tuple[EntityPage, ...]


@dataclass(frozen=True)
class TrailSet:
    """All deep-search tasks that a world can pose, drawn at will: `TrailSet(world).draw("train", 100, seed=0)`."""

    world: World
    config: TrailConfig = field(default_factory=TrailConfig)

    @cached_property
    def walks(self) -> Mapping[tuple[str, ...], list[Walk]]:
        """(family of the start, link, link, …) → the walks along those links over pages that are all different.

        They start at pages whose title is theirs alone; a walk ends where a page lacks the link.
        """
        level: dict[tuple[str, ...], list[Walk]] = defaultdict(list)
        for page in _namesakes_left_out(self.world):
            level[page.family,].append((page,))
        found: dict[tuple[str, ...], list[Walk]] = {}
        for _ in range(self.config.links[1]):
            level = self._further(level)
            found.update({path: walks for path, walks in level.items() if len(path) > self.config.links[0]})
        return found

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes that may be asked for: those whose value no constant guesses.

        A field is left out where one value, "N/A" included, ends too many of the walks (`envs.tasks.MAX_SHARE`);
        so is every field where there are few walks.
        """
        links = {
            f.plain_name for p in self.world.pages.values() if isinstance(p, EntityPage) for f in p.fields if f.link
        }
        return tuple(
            Shape(path[0], path[1:], name)
            for path, walks in sorted(self.walks.items())
            if self.config.repeats or len(set(path[1:])) == len(path[1:])
            for name in sorted({f.plain_name for walk in walks for f in walk[-1].fields} - links)
            if _askable(Counter(value(self.world, walk[-1].url, Column(name)) for walk in walks))
        )

    def draw(self, split: Split, n: int, seed: int) -> list[Task]:
        """n distinct tasks, the same ones for the same arguments.

        Numbers of links are equally likely; then a shape's chance grows with the root of the number of its walks,
        so that neither do a few starts come up all the time nor only the largest family. In a task no two
        trails start or end at the same page. Raises ValueError where the world has fewer than n such tasks.
        """
        rng = Random(stable_hash(seed, "trails", split))
        choices = self._choices(split)
        drawn: dict[str, Task] = {}
        misses = 0
        while len(drawn) < n:
            task = self._candidate(rng, choices, split) if choices else None
            if task and task.id not in drawn:
                drawn[task.id] = task
                misses = 0
                continue
            misses += 1
            if misses > _PATIENCE or not choices:
                bounds = f"{split}, trails {self.config.trails}, links {self.config.links}"
                raise ValueError(f"trails: {len(drawn)} found, want {n} ({bounds})")
        return list(drawn.values())

    def _further(self, level: Mapping[tuple[str, ...], list[Walk]]) -> dict[tuple[str, ...], list[Walk]]:
        """All walks of one level, one link longer."""
        longer: dict[tuple[str, ...], list[Walk]] = defaultdict(list)
        for path, walks in level.items():
            for walk in walks:
                for name in dict.fromkeys(f.plain_name for f in walk[-1].fields if f.link):
                    link = walk[-1].latest(name)
                    page = self.world.entity(link.link) if link else None
                    if page and page not in walk:
                        longer[*path, name].append((*walk, page))
        return longer

    @cached_property
    def _by_split(self) -> Mapping[tuple[Split, tuple[str, ...]], list[Walk]]:
        walks: dict[tuple[Split, tuple[str, ...]], list[Walk]] = defaultdict(list)
        for path, found in self.walks.items():
            for walk in found:
                walks[split_of(walk[0]), path].append(walk)
        return walks

    def _choices(self, split: Split) -> list[Mapping[Shape, float]]:
        """The shapes of a split with their weights, for each number of links that has any."""
        choices: dict[int, dict[Shape, float]] = defaultdict(dict)
        for shape in self.shapes:
            walks = self._by_split.get((split, shape.path), [])
            if len(walks) >= ROOM * self.config.trails[1] and not (split == "train" and shape.heldout):
                choices[len(shape.links)][shape] = math.sqrt(len(walks))
        return [weights for _, weights in sorted(choices.items())]

    def _candidate(self, rng: Random, choices: list[Mapping[Shape, float]], split: Split) -> Task | None:
        weights = rng.choice(choices)
        (shape,) = rng.choices(list(weights), list(weights.values()))
        walks = self._by_split[split, shape.path]
        wanted = rng.randint(*self.config.trails)
        chosen: list[Walk] = []
        for walk in rng.sample(walks, len(walks)):
            met = {w[k].url for w in chosen for k in (0, -1)}
            if not met & {walk[0].url, walk[-1].url} and self._findable(walk[0].url):
                chosen.append(walk)
            if len(chosen) == wanted:
                return make_task(self.world, shape, chosen, split)
        return None

    @cached_property
    def _findable(self) -> Callable[[str], bool]:
        return cache(lambda url: findable(self.world, url))


def split_of(start: EntityPage) -> Split:
    """The split of a page as a start, by a hash of its family and title; the same in every world."""
    return "heldout" if stable_hash("trail", start.family, start.title) / 2**64 < HELDOUT_GROUPS else "train"


def findable(world: World, url: str) -> bool:
    """Whether a search for the page's title finds it before any other page that is no list."""
    hits = world.searcher.search(world.pages[url].title, DEFAULT_TOPK)
    return next((hit for hit in hits if world.entity(hit)), "") == url


def make_task(world: World, shape: Shape, walks: Iterable[Walk], split: Split) -> Task:
    """The task that asks for a shape along these walks, lettered from a.

    `meta["steps"]` is what one agent needs: a search and 1 + links pages a trail, and the answer.
    """
    walks = tuple(walks)
    letters = tuple(ascii_lowercase[: len(walks)])
    names = tuple(walk[0].title for walk in walks)
    starts = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=True)]
    query = "\n".join([f"{QUESTION}{shape.text}", *starts, RULE])
    values = [value(world, walk[-1].url, Column(shape.field)) for walk in walks]
    gold = tuple(zip(letters, values, strict=True))
    meta = {
        "trails": len(walks),
        "links": len(shape.links),
        "family": shape.family,
        "steps": len(walks) * (len(shape.links) + 2) + 1,
        "heldout_shape": shape.heldout,
        "split": split,
    }
    digest = stable_hash(query, gold)
    return Task(
        f"{DOMAIN}-{digest:016x}", query, shape.text, DOMAIN, ("trail", shape.field), gold, meta=meta, names=names
    )


def _namesakes_left_out(world: World) -> list[EntityPage]:
    pages = [page for page in world.pages.values() if isinstance(page, EntityPage)]
    times = Counter(page.title.casefold() for page in pages)
    return [page for page in pages if times[page.title.casefold()] == 1]


def _askable(values: Counter[str]) -> bool:
    """No value is found in too many of the walks."""
    return max(values.values()) <= MAX_SHARE * values.total()


def _want(name: str, bounds: tuple[int, int], least: int, most: int) -> None:
    low, high = bounds
    if not least <= low <= high <= most:
        raise ValueError(f"trails: {name} = ({low}, {high}), want {least} <= low <= high <= {most}")
