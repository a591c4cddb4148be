"""Countries, listed by currency, language, continent and neighbour; and currencies, which have no lists.

Languages are those that GeoNames names for a country, official or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import pycountry

from envs.facts import Entity, Fact, Group, number
from envs.families.geo import Geo, Row, city_id

_CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def country_facts(geo: Geo) -> tuple[list[Entity], list[Group]]:
    """Entities and groups: capital, currency, area in square kilometres, population, telephone code."""
    currencies = _currencies(geo.countries.values())
    names = {e.id: e.title for e in currencies}
    capitals = _capitals(geo)
    entities = [_country(c, capitals.get(code, ""), names) for code, c in sorted(geo.countries.items())]
    return entities + currencies, _groups(geo, names)


def country_id(code: str) -> str:
    return f"country/{code}"


def _country(c: Row, capital: str, currencies: dict[str, str]) -> Entity:
    currency = f"currency/{c['currencycode']}"
    facts = (
        Fact("capital", c["capital"].strip(), capital),
        Fact("currency", currencies.get(currency, ""), currency),
        Fact("area", number(c["areakm2"])),
        Fact("population", number(c["population"])),
        Fact("phone", c["phone"].strip()),
    )
    return Entity(country_id(c["iso"]), "country", c["name"], tuple(f for f in facts if f.value not in ("", "0")))


def _capitals(geo: Geo) -> dict[str, str]:
    """Country code → the id of its capital, where GeoNames has a city of that name in it (the largest)."""
    found: dict[str, Row] = {}
    for city in geo.cities:
        code = city["countrycode"]
        is_capital = (
            code in geo.countries and city["name"].casefold() == geo.countries[code]["capital"].strip().casefold()
        )
        if is_capital and (code not in found or found[code]["population"] < city["population"]):
            found[code] = city
    return {code: city_id(city) for code, city in found.items()}


def _currencies(countries: Iterable[Row]) -> list[Entity]:
    """Currencies in use: code, ISO 4217 number, and how many countries and territories use them."""
    users: dict[str, int] = defaultdict(int)
    for c in countries:
        users[c["currencycode"]] += 1
    return [
        Entity(
            f"currency/{c.alpha_3}",
            "currency",
            c.name,
            (Fact("code", c.alpha_3), Fact("number", c.numeric), Fact("users", number(users[c.alpha_3]))),
        )
        for c in pycountry.currencies
        if c.alpha_3 in users
    ]


def _groups(geo: Geo, currencies: dict[str, str]) -> list[Group]:
    languages = {x.alpha_2: x.name for x in pycountry.languages if hasattr(x, "alpha_2")}
    return [
        *_grouped(geo, lambda c: [currencies.get(f"currency/{c['currencycode']}", "")], "countries using the {}"),
        *_grouped(geo, lambda c: [languages.get(x, "") for x in _languages(c)], "countries speaking {}"),
        *_grouped(geo, lambda c: [_CONTINENTS[c["continentcode"]]], "countries in {}"),
        *_grouped(
            geo,
            lambda c: [geo.countries[x]["name"] for x in c["neighbours"].split(",") if x in geo.countries],
            "countries bordering {}",
        ),
    ]


def _languages(c: Row) -> list[str]:
    return list(dict.fromkeys(tag.split("-")[0] for tag in c["languages"].split(",")))


def _grouped(geo: Geo, keys: Callable[[Row], list[str]], subject: str) -> list[Group]:
    members: dict[str, list[str]] = defaultdict(list)
    for code, c in sorted(geo.countries.items()):
        for key in keys(c):
            members[key].append(country_id(code))
    texts = {key: subject.format(key) for key in sorted(members) if key}
    return [Group(text, "country", tuple(members[key]), text) for key, text in texts.items()]
