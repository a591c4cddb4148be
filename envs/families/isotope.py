"""Isotopes, listed by element (mendeleev's database, from NUBASE and AME). Not nuclear isomers."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from importlib.resources import as_file, files
from typing import Any

from envs.facts import Entity, Fact, Group

_DAUGHTER = {
    "B-": (1, 0),
    "B+": (-1, 0),
    "EC": (-1, 0),
    "e+": (-1, 0),
    "A": (-2, -4),
    "p": (-1, -1),
    "2p": (-2, -2),
    "n": (0, -1),
    "2n": (0, -2),
    "2B-": (2, 0),
    "2B+": (-2, 0),
}
"""Decay mode → change of (atomic number, mass number)."""
_UNITS = {
    "sec": "s",
    "msec": "ms",
    "usec": "us",
    "nsec": "ns",
    "psec": "ps",
    "asec": "as",
    "zsec": "zs",
    "ysec": "ys",
    "minute": "min",
    "hour": "h",
    "day": "d",
    "year": "y",
    "kyear": "ky",
    "Myear": "My",
    "Gyear": "Gy",
    "Tyear": "Ty",
    "Pyear": "Py",
    "Eyear": "Ey",
    "Zyear": "Zy",
    "Yyear": "Yy",
}
_ISOTOPES = """
    SELECT i.id, i.atomic_number, e.name, i.mass_number, i.mass, i.abundance, i.is_radioactive,
           i.half_life, i.half_life_unit, i.spin, i.parity, i.discovery_year
    FROM isotopes i JOIN elements e ON e.atomic_number = i.atomic_number ORDER BY i.atomic_number, i.mass_number
"""
_DECAYS = "SELECT isotope_id, mode FROM isotopedecaymodes WHERE intensity IS NOT NULL ORDER BY intensity, mode"


def isotope_facts() -> tuple[list[Entity], list[Group]]:
    """Entities and groups: mass in daltons, half life, spin and parity, discovery year, decay product or abundance."""
    with as_file(files("mendeleev") / "elements.db") as path:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        rows = database.execute(_ISOTOPES).fetchall()
        main_mode = dict(database.execute(_DECAYS).fetchall())  # the last one, of highest intensity, stays
        database.close()
    titles = {(z, a): f"{name}-{a}" for _, z, name, a, *_ in rows}
    entities = [_isotope(row, main_mode.get(row[0], ""), titles) for row in rows]
    members: dict[str, list[str]] = defaultdict(list)
    for row, entity in zip(rows, entities, strict=True):
        members[row[2]].append(entity.id)
    groups = [Group(f"isotopes of {name}", "isotope", tuple(ids), name) for name, ids in members.items()]
    return entities, groups


def _isotope(row: tuple[Any, ...], mode: str, titles: dict[tuple[int, int], str]) -> Entity:
    _, z, name, a, mass, abundance, radioactive, half_life, unit, spin, parity, year = row
    facts = [Fact("mass", f"{mass:.6f}")]
    if not radioactive:
        facts.append(Fact("half life", "stable"))
    elif half_life is not None and unit in _UNITS:
        facts.append(Fact("half life", f"{half_life:g} {_UNITS[unit]}"))
    if spin and parity:
        facts.append(Fact("spin", f"{spin}{parity}"))
    if year:
        facts.append(Fact("discovered", f"{int(year)}"))
    dz, da = _DAUGHTER.get(mode, (0, 0))
    if (dz or da) and (z + dz, a + da) in titles:
        facts.append(Fact("decay product", titles[z + dz, a + da], f"isotope/{z + dz}-{a + da}"))
    elif abundance:
        facts.append(Fact("abundance", f"{abundance:g}%"))
    return Entity(f"isotope/{z}-{a}", "isotope", f"{name}-{a}", tuple(facts))
