"""Airports, listed by country and subdivision. Not flights, runways or airlines."""

from __future__ import annotations

from envs.facts import Entity, Fact, Group, number
from envs.families.geo import Geo, airport_id, city_id, label, place_groups


def airport_facts(geo: Geo) -> tuple[list[Entity], list[Group]]:
    """Entities and groups: elevation in feet, ICAO or else local code, latitude, and the nearest city."""
    entities: list[Entity] = []
    for airport, i in zip(geo.airports, geo.nearest_city, strict=True):
        city = geo.cities[i]
        facts = (
            Fact("elevation", number(airport["elevation"])),
            Fact("code", airport["icao"]),
            Fact("latitude", f"{airport['lat']:.2f}"),
            Fact("nearest city", city["name"], city_id(city)),
        )
        entities.append(Entity(airport_id(airport), "airport", airport["name"], facts))
    places = [(airport_id(a), a["country"], label(a)[1] if label(a) in geo.trusted else "") for a in geo.airports]
    return entities, place_groups("airport", "airports", places, geo.countries)
