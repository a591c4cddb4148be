"""A hand-made world for tests of trails: towns on a ring road, from each a field, from each field the next town.

Town k has population "1,00k" and latitude "k.50", its airfield elevation "20k" and code "Xk"; so
Town 3 → nearest airport → Field 3 → nearest city → Town 4 → … and the last leads to Town 0.
"""

from __future__ import annotations

from envs.facts import Entity, Fact, Facts, Group

SUBJECT = "cities on Ring Road"


def ring(towns: int) -> Facts:
    """A ring of so many towns, all in one list."""
    entities: list[Entity] = []
    for k in range(towns):
        after = (k + 1) % towns
        road = Fact("nearest airport", f"Field {k}", f"airport/{k}")
        entities.append(
            Entity(
                f"city/{k}",
                "city",
                f"Town {k}",
                (Fact("population", f"{1000 + k:,}"), Fact("latitude", f"{k}.50"), road),
            )
        )
        back = Fact("nearest city", f"Town {after}", f"city/{after}")
        entities.append(
            Entity(
                f"airport/{k}", "airport", f"Field {k}", (Fact("elevation", str(200 + k)), Fact("code", f"X{k}"), back)
            )
        )
    members = tuple(e.id for e in entities if e.family == "city")
    return Facts({e.id: e for e in entities}, (Group(SUBJECT, "city", members, "ring"),))
