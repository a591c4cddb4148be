"""Cities of 15,000 people and more, listed by country and first-order division. Not their history or area."""

from __future__ import annotations

from envs.facts import Entity, Fact, Group, number
from envs.families.geo import Geo, airport_id, city_id, place_groups


def city_facts(geo: Geo) -> tuple[list[Entity], list[Group]]:
    """Entities and groups: population, latitude, longitude, and the nearest airport."""
    entities: list[Entity] = []
    for city, j in zip(geo.cities, geo.nearest_airport, strict=True):
        airport = geo.airports[j]
        facts = (
            Fact("population", number(city["population"])),
            Fact("latitude", f"{city['latitude']:.2f}"),
            Fact("longitude", f"{city['longitude']:.2f}"),
            Fact("nearest airport", airport["name"], airport_id(airport)),
        )
        entities.append(Entity(city_id(city), "city", city["name"], facts))
    places = [(city_id(c), c["countrycode"], d) for c, d in zip(geo.cities, geo.division, strict=True)]
    return entities, place_groups("city", "cities", places, geo.countries)
