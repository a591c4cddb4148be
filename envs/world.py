"""A world to search: pages by url, the groups that tasks ask for, and a search index over the pages.

The same facts give many worlds: the seed decides urls, the order of fields and entries, which groups
are in, and, through the knobs of `WorldConfig`, what is missing, contradicted, stale or swapped.
Not here: tasks (`envs.tasks`), and what an agent sees of a page (`envs.tools`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase

from envs.cache import load_facts
from envs.facts import Entity, Fact, Facts, Group
from envs.pages import EntityPage, Field, ListPage, Page
from envs.search import Bm25Searcher, Searcher

FAMILIES = ("airport", "city", "country", "holiday", "isotope", "subdivision")
BANDS = ((3, 4), (5, 9), (10, 24), (25, 49), (50, 80))
"""Row counts, both ends included, by which groups are balanced and tasks are counted."""
OLD, NEW, ARCHIVED = "2019", "2024", "(archived 2019)"
_STALE_DROP, _STALE_ADD = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What a world is like: `WorldConfig(seed=1, missing=0.05, perturbed=True)`.

    Rates are shares from 0 to 1: `distractors` of lists with a stale copy, `conflicts` of plain fields
    given in two revisions, `missing` of fields left out, `tool_failures` of calls that fail.
    `snippet` is the most characters of field names shown with a search hit. `groups_per_band` bounds
    the lists of each family in each band of row counts, and so the size of the world.
    """

    seed: int = 0
    families: tuple[str, ...] = FAMILIES
    list_page_size: int = 5
    snippet: int = 0
    distractors: float = 0.25
    conflicts: float = 0.0
    missing: float = 0.0
    tool_failures: float = 0.0
    perturbed: bool = False
    groups_per_band: int = 80

    def __post_init__(self) -> None:
        for name in ("distractors", "conflicts", "missing", "tool_failures"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"world: {name} = {value}, want a share from 0 to 1")
        for name, least in (("list_page_size", 1), ("snippet", 0), ("groups_per_band", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"world: {name} = {getattr(self, name)}, want at least {least}")
        unknown = sorted(set(self.families) - set(FAMILIES))
        if unknown or not self.families:
            raise ValueError(f"world: families = {unknown or '()'}, want some of {', '.join(FAMILIES)}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A group as the world shows it: its list page (`url`) names exactly `group.members`, at `members`."""

    group: Group
    url: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """Pages by url, the lists that tasks may ask for, and the index. Nothing in it changes."""

    config: WorldConfig
    pages: Mapping[str, Page]
    lists: tuple[Listed, ...]
    searcher: Searcher

    def entity(self, url: str) -> EntityPage | None:
        page = self.pages.get(url)
        return page if isinstance(page, EntityPage) else None


def build_world(config: WorldConfig, cache: Path | None = None) -> World:
    """The world of a configuration; `cache` is a folder in which extracted facts are kept between runs."""
    return world_of(load_facts(cache), config)


def world_of(facts: Facts, config: WorldConfig) -> World:
    """The world that a configuration makes of given facts."""
    groups = _chosen(facts.groups, config)
    ids = _universe(groups, facts.entities)
    stale = [g for g in groups if _uniform(config.seed, "stale", g.subject) < config.distractors]
    urls = _urls(config.seed, [*ids, *(f"list/{g.subject}" for g in groups), *(f"stale/{g.subject}" for g in stale)])
    entities = [facts.entities[i] for i in ids]
    donors = _donors(entities)
    swaps = _swaps(config.seed, donors) if config.perturbed else {}
    letters = _letters(entities)
    pages: list[Page] = [_entity_page(e, urls, letters[e.family], donors, swaps, config) for e in entities]
    lists = tuple(Listed(g, urls[f"list/{g.subject}"], tuple(urls[m] for m in g.members)) for g in groups)
    pages += [_list_page(listed, config) for listed in lists]
    by_family = {f: [m for g in groups if g.family == f for m in g.members] for f in config.families}
    pages += [_stale_page(g, by_family[g.family], urls, config) for g in stale]
    pages.sort(key=lambda p: p.url)
    searcher = Bm25Searcher([p.url for p in pages], [_search_text(p) for p in pages])
    return World(config, {p.url: p for p in pages}, lists, searcher)


def stable_hash(*parts: object) -> int:
    """A 64-bit number from the parts' text, the same in every process."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def band(rows: int) -> str:
    """The band of a row count: `band(60)` is `"50-80"`."""
    return next((f"{lo}-{hi}" for lo, hi in BANDS if lo <= rows <= hi), "other")


def _uniform(*parts: object) -> float:
    return stable_hash(*parts) / 2**64


def _chosen(groups: Iterable[Group], config: WorldConfig) -> list[Group]:
    """At most `groups_per_band` groups of each family and band, in an order that only the seed decides."""
    ranked = sorted(groups, key=lambda g: (stable_hash(config.seed, g.subject), g.subject))
    taken: dict[tuple[str, str], int] = defaultdict(int)
    chosen: dict[str, Group] = {}
    for g in ranked:
        slot = g.family, band(len(g.members))
        if g.family in config.families and taken[slot] < config.groups_per_band and g.subject not in chosen:
            taken[slot] += 1
            chosen[g.subject] = g
    return list(chosen.values())


def _universe(groups: Iterable[Group], entities: Mapping[str, Entity]) -> list[str]:
    """The ids of all members and of what they link to."""
    members = dict.fromkeys(m for g in groups for m in g.members)
    linked = dict.fromkeys(f.link for m in members for f in entities[m].facts if f.link in entities)
    return list(members | linked)


def _urls(seed: int, ids: Iterable[str]) -> dict[str, str]:
    """A six-digit address for each id, by hash; one that is taken is hashed again."""
    urls: dict[str, str] = {}
    taken: set[str] = set()
    for i in ids:
        url = next(u for attempt in itertools.count() if (u := _url(seed, i, attempt)) not in taken)
        taken.add(url)
        urls[i] = url
    return urls


def _url(seed: int, i: str, attempt: int) -> str:
    return f"w/{stable_hash(seed, 'url', i, attempt) % 1_000_000:06d}"


def _donors(entities: Iterable[Entity]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(family, field) → the (entity id, value) of all that have the field as plain text."""
    donors: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for e in entities:
        for f in e.facts:
            if not f.link:
                donors[e.family, f.name].append((e.id, f.value))
    return donors


def _swaps(seed: int, donors: Mapping[tuple[str, str], list[tuple[str, str]]]) -> dict[tuple[str, str], str]:
    """(entity id, field) → the value that it has in the perturbed world: a permutation of each field's values."""
    swaps: dict[tuple[str, str], str] = {}
    for (family, name), have in donors.items():
        values = [v for _, v in have]
        Random(stable_hash(seed, "swap", family, name)).shuffle(values)
        swaps.update({(i, name): v for (i, _), v in zip(have, values, strict=True)})
    return swaps


def _entity_page(
    e: Entity,
    urls: Mapping[str, str],
    letters: Mapping[str, str],
    donors: Mapping[tuple[str, str], list[tuple[str, str]]],
    swaps: Mapping[tuple[str, str], str],
    config: WorldConfig,
) -> EntityPage:
    rng = Random(stable_hash(config.seed, "page", e.id))
    fields: list[Field] = []
    for f in e.facts:
        value = swaps.get((e.id, f.name), f.value)
        if rng.random() < config.missing:
            continue
        if not f.link and rng.random() < config.conflicts:
            fields += _revisions(f, value, letters[f.name], donors[e.family, f.name], rng)
            continue
        fields.append(Field(f.name, value, letters[f.name], urls.get(f.link, "")))
    rng.shuffle(fields)
    return EntityPage(urls[e.id], e.title, e.family, tuple(fields))


def _letters(entities: Iterable[Entity]) -> dict[str, dict[str, str]]:
    """family → field → its letter, the same in every world that has the family's fields."""
    names: dict[str, set[str]] = defaultdict(set)
    for e in entities:
        names[e.family].update(f.name for f in e.facts)
    return {family: dict(zip(sorted(found), ascii_lowercase, strict=False)) for family, found in names.items()}


def _revisions(f: Fact, value: str, letter: str, donors: list[tuple[str, str]], rng: Random) -> list[Field]:
    """The value under the new year and somebody else's under the old one; one of them has the capital letter."""
    others = [v for _, v in rng.choices(donors, k=8) if v != value]
    old_letter, new_letter = rng.sample((letter, letter.upper()), 2)
    new = Field(f"{f.name} ({NEW})", value, new_letter)
    return [Field(f"{f.name} ({OLD})", others[0], old_letter), new] if others else [new]


def _list_page(listed: Listed, config: WorldConfig) -> ListPage:
    entries = list(listed.members)
    Random(stable_hash(config.seed, "order", listed.url)).shuffle(entries)
    return ListPage(listed.url, listed.group.subject, tuple(entries), config.list_page_size)


def _stale_page(g: Group, family: list[str], urls: Mapping[str, str], config: WorldConfig) -> ListPage:
    """An archived copy of a list: some entries gone, and a few of the family that do not belong."""
    rng = Random(stable_hash(config.seed, "stale page", g.subject))
    kept = rng.sample(g.members, max(1, round(len(g.members) * (1 - _STALE_DROP))))
    strangers = set(rng.choices(family, k=round(len(g.members) * _STALE_ADD))) - set(g.members)
    entries = [urls[m] for m in (*kept, *sorted(strangers))]
    rng.shuffle(entries)
    return ListPage(urls[f"stale/{g.subject}"], f"{g.subject} {ARCHIVED}", tuple(entries), config.list_page_size)


def _search_text(page: Page) -> str:
    if isinstance(page, ListPage):
        return page.title
    return " ".join([page.title, *dict.fromkeys(f.plain_name for f in page.fields)])
