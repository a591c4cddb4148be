"""Deep-search tasks: what they ask, how they are split, and which are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from envs.facts import Fact, Facts
from envs.pages import EntityPage, ListPage
from envs.trails import Shape, TrailConfig, TrailSet, findable, make_task
from envs.world import World, WorldConfig, build_world, world_of
from tests.island import island
from tests.ring import ring

TWO_LINKS = Shape("city", ("nearest airport", "nearest city"), "population")


def _world(facts: Facts, **knobs: float) -> World:
    return world_of(facts, WorldConfig(distractors=0.0, **knobs))  # pyright: ignore[reportArgumentType]


def _walks(trails: TrailSet, shape: Shape, *starts: str):
    return [walk for start in starts for walk in trails.walks[shape.path] if walk[0].title == start]


def test_a_query_names_the_links_the_starts_and_the_rules() -> None:
    trails = TrailSet(_world(ring(12)))
    task = make_task(trails.world, TWO_LINKS, _walks(trails, TWO_LINKS, "Town 3", "Town 11"), "train")
    assert task.query == (
        "Find all: nearest airport | nearest city | population\n"
        "a: Town 3\n"
        "b: Town 11\n"
        "The latest revision wins. Write N/A if a page does not say."
    )
    assert (task.columns, task.names, task.domain) == (("trail", "population"), ("Town 3", "Town 11"), "trails")
    assert task.meta["steps"] == 2 * (1 + 3) + 1  # a search and three pages a trail, and the answer


def test_gold_is_what_stands_at_the_ends_beside_the_letter_of_its_trail() -> None:
    trails = TrailSet(_world(ring(12)))
    task = make_task(trails.world, TWO_LINKS, _walks(trails, TWO_LINKS, "Town 3", "Town 11"), "train")
    assert task.gold == (("a", "1,004"), ("b", "1,000"))  # Town 3 → Field 3 → Town 4; Town 11 → Field 11 → Town 0


def test_the_latest_revision_is_gold() -> None:
    trails = TrailSet(_world(ring(12), conflicts=1.0))
    task = make_task(trails.world, TWO_LINKS, _walks(trails, TWO_LINKS, "Town 3"), "train")
    assert task.gold == (("a", "1,004"),)


def test_gold_is_not_available_where_the_last_page_is_silent() -> None:
    trails = TrailSet(_world(ring(12)))
    shape = replace(TWO_LINKS, field="longitude")
    assert make_task(trails.world, shape, _walks(trails, shape, "Town 3"), "train").gold == (("a", "N/A"),)


def test_a_trail_that_breaks_on_a_missing_link_is_not_served() -> None:
    world = _world(ring(40), missing=0.3)
    walks = TrailSet(world).walks[TWO_LINKS.path]
    assert 0 < len(walks) < 40
    assert all(walk[k].latest(TWO_LINKS.links[k]) for walk in walks for k in (0, 1))


def test_a_trail_never_comes_back_to_a_page() -> None:
    trails = TrailSet(_world(island(20)))  # the field nearest a town is nearest to that town
    assert {len(path) - 1 for path in replace(trails, config=TrailConfig(links=(1, 4))).walks} == {1}


def test_draws_are_alike_for_alike_arguments_and_distinct() -> None:
    config = TrailConfig(trails=(2, 3), links=(1, 2))
    one, two = (TrailSet(_world(ring(40)), config).draw("train", 20, seed=4) for _ in range(2))
    assert one == two
    assert len({t.id for t in one}) == 20
    assert TrailSet(_world(ring(40)), config).draw("train", 20, seed=5) != one


def test_bounds_of_a_draw_are_kept() -> None:
    drawn = TrailSet(_world(ring(40)), TrailConfig(trails=(2, 3), links=(3, 3))).draw("train", 20, 0)
    assert {len(t.names) for t in drawn} == {2, 3}
    assert {t.meta["links"] for t in drawn} == {3}


def test_the_trails_of_a_task_start_and_end_at_different_pages() -> None:
    drawn = TrailSet(_world(ring(40)), TrailConfig(trails=(4, 4), links=(2, 2))).draw("train", 20, 0)
    assert all(len(set(t.names)) == len({v for _, v in t.gold}) == 4 for t in drawn)


def test_training_and_held_out_tasks_start_at_different_pages() -> None:
    trails = TrailSet(_world(ring(80)), TrailConfig(trails=(2, 3), links=(1, 2)))
    train, heldout = ({name for t in trails.draw(s, 30, 0) for name in t.names} for s in ("train", "heldout"))
    assert min(len(train), len(heldout)) > 0
    assert not train & heldout


def test_pages_of_one_title_are_no_starts() -> None:
    facts = ring(12)
    twin = replace(facts.entities["city/5"], id="city/twin", title="town 3")
    group = replace(facts.groups[0], members=(*facts.groups[0].members, "city/twin"))
    trails = TrailSet(_world(Facts({**facts.entities, "city/twin": twin}, (group,))))
    assert not _walks(trails, TWO_LINKS, "Town 3", "town 3")
    assert _walks(trails, TWO_LINKS, "Town 5")


@dataclass(frozen=True)
class _Hits:
    """A searcher that answers always the same."""

    urls: tuple[str, ...]

    def search(self, query: str, topk: int) -> tuple[str, ...]:
        return self.urls[:topk]


@pytest.mark.parametrize(
    ("hits", "found"),
    [
        (("list", "town"), True),
        (("town", "other"), True),
        (("other", "town"), False),
        (("list", "list", "list", "town"), False),  # a search shows three
        ((), False),
    ],
)
def test_a_start_can_be_found_if_only_lists_come_before_it(hits: tuple[str, ...], found: bool) -> None:
    pages = {
        "list": ListPage("list", "Towns", (), 5),
        "town": EntityPage("town", "Town", "city", ()),
        "other": EntityPage("other", "Other Town", "city", ()),
    }
    assert findable(World(WorldConfig(), pages, (), _Hits(hits)), "town") == found


def test_a_start_that_is_not_found_is_not_served() -> None:
    world = replace(_world(ring(40)), searcher=_Hits(()))
    with pytest.raises(ValueError, match="trails: 0 found, want 1 "):
        TrailSet(world, TrailConfig(trails=(2, 2), links=(1, 1))).draw("train", 1, 0)


def test_a_field_that_a_constant_answers_is_not_asked_for() -> None:
    facts = ring(40)
    flat = {i: replace(e, facts=tuple(map(_same_code, e.facts))) for i, e in facts.entities.items()}
    shapes = TrailSet(_world(Facts(flat, facts.groups)), TrailConfig(links=(1, 1))).shapes
    assert [(s.family, s.field) for s in shapes] == [
        ("airport", "latitude"),
        ("airport", "population"),
        ("city", "elevation"),
    ]


def _same_code(fact: Fact) -> Fact:
    return replace(fact, value="X") if fact.name == "code" else fact


def test_a_field_that_links_is_not_asked_for() -> None:
    shapes = TrailSet(_world(ring(40)), TrailConfig(links=(2, 2))).shapes
    assert not {s.field for s in shapes} & {"nearest airport", "nearest city"}


def test_shapes_of_few_walks_are_not_asked_for() -> None:
    with pytest.raises(ValueError, match="trails: 0 found, want 1 "):
        TrailSet(_world(ring(12)), TrailConfig(trails=(5, 5), links=(1, 1))).draw("train", 1, 0)


def test_a_shape_of_one_link_is_never_held_out() -> None:
    assert not any(Shape("city", ("x",), str(k)).heldout for k in range(100))
    assert 5 <= sum(Shape("city", ("x", "y"), str(k)).heldout for k in range(100)) <= 30  # about 15


def test_asking_for_more_tasks_than_there_are_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"found, want 9 \(train, trails \(5, 8\), links \(6, 7\)\)"):
        TrailSet(_world(island()), TrailConfig(links=(6, 7))).draw("train", 9, 0)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"trails": (8, 5)}, r"trails: trails = \(8, 5\), want 1 <= low <= high <= 26"),
        ({"trails": (0, 5)}, r"trails: trails = \(0, 5\), want 1 <="),
        ({"trails": (1, 27)}, r"trails: trails = \(1, 27\), want 1 <="),
        ({"links": (0, 2)}, r"trails: links = \(0, 2\), want 1 <= low <= high <= 8"),
    ],
)
def test_bounds_out_of_range_are_refused(bounds: dict[str, tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrailConfig(**bounds)


@pytest.mark.slow
def test_the_real_world_has_thousands_of_tasks_split_by_start_and_shape() -> None:
    trails = TrailSet(build_world(WorldConfig(missing=0.05, conflicts=0.1)))
    train, heldout = trails.draw("train", 1000, 0), trails.draw("heldout", 400, 0)
    assert not {n for t in train for n in t.names} & {n for t in heldout for n in t.names}
    assert not any(t.meta["heldout_shape"] for t in train)
    assert sum(t.meta["heldout_shape"] for t in heldout) >= 20
    assert {t.meta["links"] for t in train} == {t.meta["links"] for t in heldout} == {2, 3, 4}
    assert len({t.meta["family"] for t in train}) == 5
    absent = sum(v == "N/A" for t in train for _, v in t.gold) / sum(len(t.names) for t in train)
    assert 0.02 <= absent <= 0.08  # a field in twenty is missing


def test_without_repeats_no_trail_follows_the_same_link_twice() -> None:
    config = TrailConfig(trails=(2, 3), links=(2, 3))
    lengths = {len(shape.links) for shape in TrailSet(_world(ring(40)), config).shapes}
    distinct = TrailSet(_world(ring(40)), replace(config, repeats=False)).shapes
    assert lengths == {2, 3}
    assert {len(shape.links) for shape in distinct} == {2}
