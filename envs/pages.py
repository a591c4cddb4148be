"""Pages as an agent can read them: entity pages with lettered fields, and paginated lists of links.

Not here: how a page is made from facts (`envs.world`) or written out for an agent (`envs.tools`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MISSING = "N/A"
_REVISION = re.compile(r"(.+) \((\d{4})\)")


@dataclass(frozen=True, slots=True)
class Field:
    """A line of an entity page: `Field("capital", "Paris", "c", link="w/204831")`; `link` is "" for plain text.

    `letter` is short for the field on every page of the family, as a property id is in a knowledge base.
    """

    name: str
    value: str
    letter: str
    link: str = ""

    @property
    def plain_name(self) -> str:
        """The name without a revision: `"elevation (2019)"` is `"elevation"`."""
        return _revision(self.name)[0]


@dataclass(frozen=True, slots=True)
class EntityPage:
    """What the world says of one entity."""

    url: str
    title: str
    family: str
    fields: tuple[Field, ...]

    def latest(self, name: str) -> Field | None:
        """The field of that name, the latest revision where there are several; None where the page has none."""
        found = [f for f in self.fields if f.plain_name == name]
        return max(found, key=lambda f: _revision(f.name)[1], default=None)


@dataclass(frozen=True, slots=True)
class ListPage:
    """A list of links, `size` to a page. It holds no attribute of what it lists."""

    url: str
    title: str
    entries: tuple[str, ...]
    size: int

    @property
    def pages(self) -> int:
        return max(1, -(-len(self.entries) // self.size))

    def page(self, k: int) -> tuple[str, ...]:
        """The urls on page k, counted from 1."""
        return self.entries[(k - 1) * self.size : k * self.size]


Page = EntityPage | ListPage


def _revision(name: str) -> tuple[str, int]:
    m = _REVISION.fullmatch(name) if name.endswith(")") else None
    return (m[1], int(m[2])) if m else (name, 0)
