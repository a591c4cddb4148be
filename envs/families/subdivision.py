"""First-order and lower subdivisions of countries (ISO 3166-2), listed by country. Not their borders."""

from __future__ import annotations

from collections import Counter, defaultdict

import pycountry

from envs.facts import Entity, Fact, Group, good_title, number
from envs.families.geo import Geo, Row, city_id, label


def subdivision_facts(geo: Geo) -> tuple[list[Entity], list[Group]]:
    """Entities and groups: code, type, and where the tables join its largest city and number of airports."""
    largest, airports = _largest(geo), Counter(label(a) for a in geo.airports)
    entities: list[Entity] = []
    members: dict[str, list[str]] = defaultdict(list)
    for s in sorted(pycountry.subdivisions, key=lambda s: s.code):
        if s.country_code not in geo.countries or not good_title(s.name):
            continue
        place = s.country_code, s.name
        facts = [Fact("code", s.code), Fact("type", s.type.lower())]
        if place in geo.trusted:
            facts.append(Fact("airports", number(airports[place])))
        if place in largest:
            facts.append(Fact("largest city", largest[place]["name"], city_id(largest[place])))
        entities.append(Entity(f"subdivision/{s.code}", "subdivision", s.name, tuple(facts)))
        members[s.country_code].append(entities[-1].id)
    groups = [
        Group(f"subdivisions of {geo.countries[code]['name']}", "subdivision", tuple(ids), code)
        for code, ids in members.items()
    ]
    return entities, groups


def _largest(geo: Geo) -> dict[tuple[str, str], Row]:
    """(country, division name) → its most populous city."""
    found: dict[tuple[str, str], Row] = {}
    for city, division in zip(geo.cities, geo.division, strict=True):
        place = city["countrycode"], division
        if division and (place not in found or found[place]["population"] < city["population"]):
            found[place] = city
    return found
