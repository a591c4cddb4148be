"""Public holidays, listed by country and year (computed by the holidays package). Not regional ones.

A holiday is a name in a year; where a name falls on several days, its first day counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import holidays

from envs.facts import Entity, Fact, Group, good_title
from envs.families.geo import Row

YEARS = (2022, 2023, 2024)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def holiday_facts(countries: Mapping[str, Row]) -> tuple[list[Entity], list[Group]]:
    """Entities and groups: date, weekday, week (both by ISO 8601), and the same holiday a year before."""
    entities: list[Entity] = []
    groups: list[Group] = []
    for code in sorted(holidays.list_supported_countries(include_aliases=False)):
        if code not in countries:
            continue
        days = {year: _days(code, year) for year in (YEARS[0] - 1, *YEARS)}
        entities += [_holiday(code, year, name, days) for year in days for name in days[year]]
        groups += [
            Group(
                f"public holidays in {countries[code]['name']} in {year}",
                "holiday",
                tuple(_id(code, year, name) for name in days[year]),
                code,
            )
            for year in YEARS
        ]
    return entities, groups


def _days(code: str, year: int) -> dict[str, date]:
    """Name → first day; days with two names count for both."""
    calendar = holidays.country_holidays(code, years=year, language="en_US")
    found: dict[str, date] = {}
    for day in sorted(calendar):
        for name in calendar.get_list(day):
            if good_title(name):
                found.setdefault(name, day)
    return found


def _holiday(code: str, year: int, name: str, days: dict[int, dict[str, date]]) -> Entity:
    day = days[year][name]
    facts = [
        Fact("date", day.isoformat()),
        Fact("weekday", _WEEKDAYS[day.weekday()]),
        Fact("week", str(day.isocalendar().week)),
    ]
    if name in days.get(year - 1, {}):
        facts.append(Fact("last year", name, _id(code, year - 1, name)))
    return Entity(_id(code, year, name), "holiday", name, tuple(facts))


def _id(code: str, year: int, name: str) -> str:
    return f"holiday/{code}/{year}/{name}"
