"""Facts as a family gives them: entities, what is known of each, and the groups that lists are made of.

Plain values, the same for every world. Not pages: urls, letters, missing values and conflicts
belong to `envs.world`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

MIN_ROWS, MAX_ROWS = 3, 80
_FORBIDDEN = frozenset("|#[]*\\\n")
_LONGEST_TITLE = 60


@dataclass(frozen=True, slots=True)
class Fact:
    """`Fact("elevation", "4,023")`, or with the id of another entity: `Fact("capital", "Paris", "city/2988507")`."""

    name: str
    value: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing that gets a page: `Entity("airport/KCMH", "airport", "John Glenn ...", (Fact(...), ...))`."""

    id: str
    family: str
    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Entities that one list page names: `Group("airports in Ohio, United States", "airport", ids, "US/Ohio")`.

    `family` is also the name of the key column. Groups of equal `holdout` are always in the same split.
    """

    subject: str
    family: str
    members: tuple[str, ...]
    holdout: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the packages say: entities by id, and the groups of 3 to 80 of them."""

    entities: Mapping[str, Entity]
    groups: tuple[Group, ...]


def good_title(title: str) -> bool:
    """Whether a title can stand in a table cell and in a link (no pipe, no `#` that reads as a handle)."""
    return title == title.strip() and 0 < len(title) <= _LONGEST_TITLE and not _FORBIDDEN & set(title)


def groups_of(group: Group, entities: Mapping[str, Entity]) -> tuple[Group, ...]:
    """The group itself where it has 3 to 80 members, else its parts by first letter that have.

    Of members whose titles would be the same key, only the first is kept.
    """
    by_key: dict[str, str] = {}
    for member in (m for m in group.members if m in entities):
        by_key.setdefault(title_key(entities[member].title), member)
    group = replace(group, members=tuple(by_key.values()))
    parts = [group] if len(group.members) <= MAX_ROWS else _by_letter(group, entities)
    return tuple(g for g in parts if MIN_ROWS <= len(g.members) <= MAX_ROWS)


def title_key(title: str) -> str:
    """What a lenient reader compares: the title without its spaces, in one case."""
    return "".join(title.casefold().split())


def number(value: float) -> str:
    """`4023.0` as `"4,023"`."""
    return f"{round(value):,}"


def collect(entities: Iterable[Entity], groups: Iterable[Group]) -> Facts:
    """Facts from all families: those whose titles can be shown, and groups cut to size."""
    by_id = {e.id: e for e in entities if good_title(e.title)}
    kept = (part for g in groups if good_title(g.subject) for part in groups_of(g, by_id))
    return Facts(by_id, tuple(kept))


def _by_letter(group: Group, entities: Mapping[str, Entity]) -> list[Group]:
    parts: dict[str, list[str]] = {}
    for member in group.members:
        letter = entities[member].title[0].upper()
        if letter.isascii() and letter.isalpha():
            parts.setdefault(letter, []).append(member)
    return [
        replace(group, subject=f"{group.subject} beginning with {letter}", members=tuple(ids))
        for letter, ids in sorted(parts.items())
    ]
