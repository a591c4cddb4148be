"""Worlds made of hand-made facts: pages, urls, and what each knob does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envs.cache import load_facts
from envs.facts import Entity, Facts, Group, collect, good_title
from envs.pages import EntityPage, ListPage
from envs.world import ARCHIVED, Listed, World, WorldConfig, build_world, world_of
from tests.island import NAMES, SUBJECT, island


def _list(world: World, subject: str = SUBJECT) -> Listed:
    return next(x for x in world.lists if x.group.subject == subject)


def _towns(world: World) -> list[EntityPage]:
    return [p for p in world.pages.values() if isinstance(p, EntityPage) and p.family == "city"]


def test_a_page_has_a_short_unique_url() -> None:
    world = world_of(island(), WorldConfig(distractors=1.0))
    assert len(world.pages) == 24  # ten towns, ten airfields, two lists and their two stale copies
    assert all(re.fullmatch(r"w/\d{6}", url) for url in world.pages)


def test_another_seed_gives_other_urls_for_the_same_towns() -> None:
    a, b = (world_of(island(), WorldConfig(seed=s)) for s in (1, 2))
    assert not set(a.pages) & set(b.pages)
    assert {p.title for p in _towns(a)} == {p.title for p in _towns(b)} == set(NAMES)


def test_the_same_seed_gives_the_same_pages() -> None:
    config = WorldConfig(seed=3, missing=0.2, conflicts=0.3)
    assert world_of(island(), config).pages == world_of(island(), config).pages


def test_a_list_page_holds_every_member_once_and_no_attribute() -> None:
    world = world_of(island(), WorldConfig(list_page_size=4))
    page = world.pages[_list(world).url]
    assert isinstance(page, ListPage)
    assert page.pages == 3
    assert [len(page.page(k)) for k in (1, 2, 3)] == [4, 4, 2]
    assert sorted(page.entries) == sorted(_list(world).members)


def test_links_lead_to_pages_of_the_world() -> None:
    world = world_of(island(), WorldConfig())
    links = [f.link for p in _towns(world) for f in p.fields if f.name == "nearest airport"]
    assert len(links) == 10
    assert all(link in world.pages for link in links)


def test_fields_are_in_another_order_on_another_page() -> None:
    world = world_of(island(), WorldConfig())
    assert len({tuple(f.name for f in p.fields) for p in _towns(world)}) > 1


def test_a_stale_copy_misses_three_tenths_of_the_entries() -> None:
    world = world_of(island(), WorldConfig(distractors=1.0))
    (stale,) = [p for p in world.pages.values() if p.title == f"{SUBJECT} (archived 2019)"]
    assert isinstance(stale, ListPage)
    assert len(set(stale.entries) & set(_list(world).members)) == 7


def test_without_distractors_there_is_no_stale_copy() -> None:
    world = world_of(island(), WorldConfig(distractors=0.0))
    assert not [p for p in world.pages.values() if "archived" in p.title]


def test_a_conflict_gives_an_old_wrong_value_and_a_new_right_one() -> None:
    world = world_of(island(), WorldConfig(conflicts=1.0))
    page = next(p for p in _towns(world) if p.title == "Ash")
    found = {f.name: f.value for f in page.fields}
    assert found["population (2024)"] == "1,000"
    assert found["population (2019)"] not in ("1,000", "")
    latest = page.latest("population")
    assert latest == next(f for f in page.fields if f.name == "population (2024)")
    assert latest.letter in "cC"
    assert len({f.letter for f in page.fields}) == len(page.fields)


def test_a_field_has_the_same_letter_on_every_page_of_its_family_in_every_world() -> None:
    worlds = [world_of(island(), WorldConfig(seed=seed)) for seed in (0, 1)]
    letters = {(f.name, f.letter) for world in worlds for p in _towns(world) for f in p.fields}
    assert len(letters) == len({name for name, _ in letters}) == len({letter for _, letter in letters})


def test_missing_fields_are_absent_from_the_page() -> None:
    assert all(not p.fields for p in _towns(world_of(island(), WorldConfig(missing=1.0))))


def test_a_perturbed_world_permutes_values_and_leaves_links_and_titles() -> None:
    plain, swapped = (_towns(world_of(island(), WorldConfig(perturbed=p))) for p in (False, True))
    populations = [
        [(p.title, f.value) for p in ps for f in p.fields if f.name == "population"] for ps in (plain, swapped)
    ]
    links = [[(p.title, f.link) for p in ps for f in p.fields if f.link] for ps in (plain, swapped)]
    assert sorted(v for _, v in populations[0]) == sorted(v for _, v in populations[1])
    assert sum(a == b for a, b in zip(*populations, strict=True)) <= 3
    assert links[0] == links[1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"missing": 1.5}, r"missing = 1.5, want a share from 0 to 1"),
        ({"list_page_size": 0}, r"list_page_size = 0, want at least 1"),
        ({"families": ("planet",)}, r"families = \['planet'\], want some of airport, city"),
    ],
)
def test_a_bad_configuration_says_what_it_saw_and_wants(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldConfig(**bad)  # pyright: ignore[reportArgumentType]


def test_titles_that_would_break_a_table_or_read_as_a_handle_are_refused() -> None:
    assert not any(good_title(t) for t in ("a|b", "No. #3", "x\ny", "[x]", ""))


def test_equal_titles_in_a_group_become_one_member() -> None:
    entities = [Entity(f"city/{k}", "city", t, ()) for k, t in enumerate(("Bath", "bath", "Cork", "Dale"))]
    facts = collect(entities, [Group("cities in X", "city", tuple(e.id for e in entities), "x")])
    assert facts.groups[0].members == ("city/0", "city/2", "city/3")


def test_a_large_group_is_listed_by_first_letter() -> None:
    entities = [Entity(f"city/{k}", "city", f"{'AB'[k % 2]}{k}", ()) for k in range(90)]
    facts = collect(entities, [Group("cities in X", "city", tuple(e.id for e in entities), "x")])
    assert [(g.subject, len(g.members)) for g in facts.groups] == [
        ("cities in X beginning with A", 45),
        ("cities in X beginning with B", 45),
    ]


def test_cached_facts_are_the_extracted_ones_and_a_broken_cache_is_rebuilt(tmp_path: Path) -> None:
    runs: list[int] = []

    def extract() -> Facts:
        runs.append(1)
        return island()

    first, again = load_facts(tmp_path, extract), load_facts(tmp_path, extract)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    assert first == again == load_facts(tmp_path, extract) == load_facts(tmp_path, extract)
    assert len(runs) == 2


@pytest.mark.slow
def test_the_real_world_finds_each_list_by_its_subject_and_has_only_clean_titles() -> None:
    world = build_world(WorldConfig(groups_per_band=20))
    found = [x.url in world.searcher.search(x.group.subject, 3) for x in world.lists]
    assert sum(found) >= 0.99 * len(found)
    assert all(good_title(p.title.removesuffix(f" {ARCHIVED}")) for p in world.pages.values())
    values = [f.value for p in world.pages.values() if isinstance(p, EntityPage) for f in p.fields]
    assert not [v for v in values if "|" in v or "\n" in v or v != v.strip()]
