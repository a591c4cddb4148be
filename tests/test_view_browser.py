"""The viewer's page in a real browser: Chromium without a screen, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from swarm.records import write
from swarm.types import Rollout
from tests.view_cases import add_credit, add_iteration, example, rollouts, run_folder, served

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("no Chromium on PATH, want one: apt-get install chromium, or its path in CHROMIUM", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iteration 1 is the example alone, with its credit; iteration 2 has 30 rollouts, one of which failed."""
    path = run_folder(tmp_path_factory.mktemp("runs") / "seen", [example()], [*rollouts(29, 2), _failed()])
    add_credit(path, 1, [example()])
    return path


def _failed() -> Rollout:
    return replace(example(), trace=replace(example().trace, status="error", error="the engine died"), reward=None)


@pytest.fixture(scope="module")
def address(run: Path) -> Generator[str]:
    with served(run) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Generator[Page]:
    """A page on which anything in the console is a failure, and so is a request that goes elsewhere."""
    with browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce") as context:
        page = context.new_page()
        heard: list[str] = []
        page.on("console", lambda m: heard.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: heard.append(str(e)))
        page.on("request", lambda r: r.url.startswith("http://127.0.0.1:") or heard.append(r.url))
        yield page
        assert heard == []


def opened(page: Page, address: str, place: str = "") -> Page:
    page.goto(f"{address}#/{place}")
    page.wait_for_selector("html[data-ready]")
    return page


def rows(page: Page) -> Locator:
    return page.get_by_role("grid", name="Rollouts").locator(".row")


def texts(page: Page, column: int) -> list[str]:
    return [row.get_by_role("gridcell").nth(column).inner_text() for row in rows(page).all()]


def agents(page: Page) -> Locator:
    return page.get_by_role("listbox", name="Agents").get_by_role("option")


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.getAttribute('data-id') ?? document.activeElement.id")


def wait_for_rows(page: Page, n: int) -> None:
    expect(page.locator("#found")).to_contain_text(f"{n:,} rollout")


# --- the curves ----------------------------------------------------------------------------


def test_the_curves_of_a_run_are_shown(page: Page, address: str) -> None:
    opened(page, address)
    expect(page.locator("#run-name")).to_have_text("seen")
    expect(page.locator("#run-state")).to_have_text("stopped")
    expect(page.get_by_role("img", name="Item-F1. item-F1: 2 points, first 0.1, last 0.2")).to_be_visible()
    expect(page.get_by_role("img", name="Reward and its parts")).to_be_visible()
    expect(page.get_by_role("img", name="Drops and refusals")).to_be_visible()


def test_a_curve_is_read_with_the_arrow_keys_and_leads_to_its_rollouts(page: Page, address: str) -> None:
    curve = opened(page, address).get_by_role("img", name="Item-F1")
    curve.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#live")).to_have_text("Item-F1, iteration 1: item-F1 0.1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("searchbox")).to_have_value("iteration:1")
    wait_for_rows(page, 1)


# --- the list ------------------------------------------------------------------------------


def test_a_click_on_a_heading_sorts_and_another_turns_it_round(page: Page, address: str) -> None:
    opened(page, address, "rollouts?q=iteration:2")
    heading = page.get_by_role("columnheader").nth(5)
    page.get_by_role("button", name="Weighted sum of the parts").click()
    assert texts(page, 5)[:3] == ["0.966", "0.931", "0.897"]
    expect(heading).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Weighted sum of the parts").click()
    assert texts(page, 5)[:2] == ["0.000", "0.034"]
    expect(heading).to_have_attribute("aria-sort", "ascending")


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("place 7.", 3),
        ('"place 7."', 1),
        ("reward<0.1", 3),
        ("iteration:2 -reward>=0.1", 4),  # the one without a reward is not at 0.1 or above
        ("status:error", 1),
        ("engine died", 1),
        ("perf=0.5", 1),
        ("nothing-like-it", 0),
    ],
)
def test_a_search_finds_by_words_and_by_conditions(page: Page, address: str, text: str, n: int) -> None:
    opened(page, address, "rollouts")
    wait_for_rows(page, 31)
    page.keyboard.press("/")
    assert focused(page) == "search"
    page.keyboard.type(text)
    expect(page.locator("#found")).to_have_text(f"{n} of 31 rollouts")
    assert rows(page).count() == n


def test_a_search_may_be_typed_at_once_from_any_page(page: Page, address: str) -> None:
    opened(page, address)
    page.keyboard.type("/engine died")
    expect(page.get_by_role("searchbox")).to_have_value("engine died")
    expect(page.locator("#found")).to_have_text("1 of 31 rollouts")
    page.go_back()
    expect(page.get_by_role("img", name="Reward and its parts")).to_be_visible()


def test_the_list_is_walked_with_keys_and_comes_back_where_it_was(page: Page, address: str) -> None:
    opened(page, address, "rollouts?q=iteration:2")
    page.get_by_role("searchbox").focus()
    page.keyboard.press("ArrowDown")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert focused(page) == "iteration_0002:3"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("List the airports of place 3.")
    page.keyboard.press("]")
    expect(page.get_by_role("heading", level=1)).to_have_text("List the airports of place 4.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("searchbox")).to_have_value("iteration:2")
    page.get_by_role("searchbox").focus()
    page.keyboard.press("Tab")
    while not focused(page).startswith("iteration"):
        page.keyboard.press("Tab")
    assert focused(page) == "iteration_0002:3"
    page.keyboard.press("End")
    assert focused(page) == "iteration_0002:29"


def test_two_marked_rollouts_are_compared(page: Page, address: str) -> None:
    opened(page, address, "rollouts?q=iteration:2")
    page.get_by_role("searchbox").focus()
    for key in ("ArrowDown", "x", "ArrowDown", "x"):
        page.keyboard.press(key)
    page.get_by_role("link", name="Compare").click()
    expect(page.get_by_role("row", name="reward", exact=False).first).to_contain_text("+0.034")
    expect(page.get_by_text("token for token")).to_be_visible()
    assert page.get_by_role("listbox").count() == 2


# --- one rollout ---------------------------------------------------------------------------


def test_a_rollout_shows_its_agents_its_answer_and_its_reward(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0001:0")
    lanes = agents(page)
    expect(lanes).to_have_count(3)
    expect(lanes.nth(1)).to_have_attribute("aria-label", re.compile("on the critical path"))
    expect(page.get_by_role("region", name="Transcript of main")).to_contain_text("create_subagent")
    verdicts = page.locator(".answer tbody tr").evaluate_all("rows => rows.map((r) => r.dataset.verdict)")
    assert verdicts == ["right", "partial", "missing", "extra"]
    expect(page.locator(".answer .wrong ins")).to_have_text("1")
    expect(page.get_by_role("row", name="total 0.750")).to_be_visible()


def test_agents_and_turns_are_walked_with_keys(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0001:0")
    agents(page).and_(page.get_by_role("option", selected=True)).focus()
    page.keyboard.press("ArrowDown")
    transcript = page.get_by_role("complementary", name="Transcript")
    expect(transcript.get_by_role("heading", level=2)).to_have_text("main/2:a")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(transcript.locator(".turn-card[data-chosen]")).to_have_attribute("aria-label", "Turn 2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Transcript of main/2:a")).to_be_focused()


def test_a_finding_leads_to_the_turn_where_credit_was_lost(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0001:0")
    page.get_by_role("button", name="Credit lost in turn").click()
    chosen = page.locator(".turn-card[data-chosen]")
    expect(chosen).to_be_in_viewport()
    expect(chosen).to_contain_text("advantage −")


def test_tokens_are_coloured_by_each_signal_that_is_recorded(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0001:0")
    colours: list[list[str]] = []
    for signal in ("advantage", "value", "ratio"):
        page.get_by_label("colour").select_option(signal)
        expect(page.locator(".scale")).to_have_attribute("aria-label", re.compile(f"^{signal} from"))
        colours.append(page.locator(".token").evaluate_all("ts => ts.map((t) => t.style.background)"))
    assert all(any(c) for c in colours)
    assert len({tuple(c) for c in colours}) == 3
    assert "advantage 0.5000" in (page.locator(".token").first.get_attribute("title") or "")


def test_a_colour_may_be_chosen_before_the_transcript_is_there(page: Page, address: str) -> None:
    held: list[Route] = []
    page.route(re.compile("&lane=0$"), lambda route: held.append(route))
    opened(page, address, "rollout/iteration_0001:0")
    page.get_by_label("colour").select_option("value")
    expect(page.locator("aside.transcript")).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    expect(page.locator(".scale")).to_have_attribute("aria-label", re.compile("^value from"))


def test_who_goes_back_before_the_next_transcript_is_there_keeps_the_first(page: Page, address: str) -> None:
    held: list[Route] = []
    page.route(re.compile("&lane=1$"), lambda route: held.append(route))
    opened(page, address, "rollout/iteration_0001:0")
    aside, chosen = page.locator("aside.transcript"), agents(page).and_(page.get_by_role("option", selected=True))
    expect(aside.locator("h2")).to_have_text("main")
    chosen.press("ArrowDown")
    expect(aside).to_have_attribute("aria-busy", "true")
    chosen.press("ArrowUp")
    expect(aside).not_to_have_attribute("aria-busy", "true")
    with page.expect_response(re.compile("&lane=1$")):
        held[0].continue_()
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(aside.locator("h2")).to_have_text("main")


def test_where_no_credit_is_recorded_only_the_log_probability_is_offered(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0002:0")
    expect(page.get_by_text("where the trainer left its credit file")).to_be_visible()
    assert page.get_by_label("colour").count() == 0


def test_the_axis_turns_from_steps_to_seconds(page: Page, address: str) -> None:
    opened(page, address, "rollout/iteration_0001:0")
    before = page.locator(".lane .turn").first.get_attribute("style")
    page.keyboard.press("s")
    expect(page.get_by_label("axis")).to_have_value("seconds")
    assert page.locator(".lane .turn").first.get_attribute("style") != before


def test_a_rollout_that_is_not_there_says_so(browser: Browser, address: str) -> None:
    with browser.new_context() as context:
        other = context.new_page()
        opened(other, address, "rollout/iteration_0009:0")
        expect(other.get_by_role("alert")).to_contain_text("no rollout 'iteration_0009:0'")


def test_a_turn_is_forked_and_the_branch_stands_beside_its_parent(page: Page, tmp_path: Path) -> None:
    with served(run_folder(tmp_path / "forked", [example()])) as address:
        opened(page, address, "rollout/iteration_0001:0")
        page.get_by_role("article", name="Turn 2").get_by_role("button", name="Fork").click()
        page.get_by_label("What call 1 gives back").fill("nothing at all")
        page.get_by_role("button", name="Run the branch").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Two rollouts")
        expect(page.locator("mark", has_text="nothing at all")).to_be_visible()
        page.get_by_role("link", name="branches:0").first.click()
        expect(page.get_by_text("forked at turn 2 of main")).to_be_visible()


def test_a_fork_that_is_refused_says_why_and_can_be_changed(browser: Browser, address: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        opened(page, address, "rollout/iteration_0001:0")
        page.get_by_role("article", name="Turn 3").get_by_role("button", name="Fork").click()
        page.get_by_label("critical steps", exact=True).fill("1")
        page.get_by_role("button", name="Run the branch").click()
        expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("critical_steps = 1, want more than")
        expect(page.get_by_role("button", name="Run the branch")).to_be_enabled()


# --- live, large, and for everybody -----------------------------------------------------------


def test_a_run_that_trains_is_followed(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "live", rollouts(2))
    (run / "run.pid").write_text(f"{os.getpid()}\n")
    with served(run) as address:
        opened(page, address)
        expect(page.locator("#run-state")).to_have_text("training")
        add_iteration(run, 2, rollouts(3, 2))
        expect(page.locator("#run-count")).to_have_text("5")
        expect(page.get_by_role("img", name="Item-F1. item-F1: 2 points")).to_be_visible()
        page.keyboard.press("2")
        rows(page).nth(1).focus()
        write(run / "rollouts" / "iteration_0003.rollouts", rollouts(4, 3))
        wait_for_rows(page, 9)
        assert focused(page) == "iteration_0002:1"  # what was being read keeps the focus
        (run / "done.json").write_text("{}")
        expect(page.locator("#run-state")).to_have_text("done")


def test_ten_thousand_rollouts_are_smooth(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "large")
    for k in range(1, 21):
        write(run / "rollouts" / f"iteration_{k:04}.rollouts", rollouts(500, k))
    with served(run) as address:
        opened(page, address, "rollouts")
        expect(page.locator("#found")).to_have_text("10,000 rollouts", timeout=60_000)
        assert rows(page).count() < 80
        jump = page.evaluate(_MEDIAN_MS, ["scroll", 20])
        assert page.evaluate(_MEDIAN_MS, ["sort", 4]) < 2000
        opened(page, address, "rollouts?q=iteration:7")
        expect(page.locator("#found")).to_have_text("500 of 10,000 rollouts", timeout=60_000)
        assert jump < 4 * page.evaluate(_MEDIAN_MS, ["scroll", 20])


_MEDIAN_MS = """async ([what, times]) => {
  const body = document.querySelector(".body");
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const took = [];
  for (let k = 0; k < times; k++) {
    const begun = performance.now();
    if (what === "scroll") body.scrollTop = (k * 7919 * 34) % body.scrollHeight;
    else document.querySelectorAll("[role=columnheader] button")[k].click();
    await frame();
    took.push(performance.now() - begun);
  }
  return took.sort((a, b) => a - b)[Math.floor(times / 2)];
}"""


def test_a_hundred_subagents_are_smooth(page: Page, tmp_path: Path) -> None:
    child = example().children[0]
    children = tuple(replace(child, trace=replace(child.trace, agent=f"main/{k}:a")) for k in range(100))
    run = run_folder(
        tmp_path / "wide", [replace(example(), children=children, trace=replace(example().trace, acts=()))]
    )
    with served(run) as address:
        opened(page, address, "rollout/iteration_0001:0")
        expect(agents(page)).to_have_count(101)
        agents(page).and_(page.get_by_role("option", selected=True)).focus()
        page.keyboard.press("End")
        expect(page.get_by_role("complementary").get_by_role("heading", level=2)).to_have_text("main/99:a")
        expect(agents(page).and_(page.get_by_role("option", selected=True))).to_be_in_viewport()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "place", ["", "rollouts", "rollout/iteration_0001:0", "compare/iteration_0001:0/iteration_0002:3", "recipe"]
)
def test_nothing_on_a_page_keeps_anybody_out(page: Page, address: str, place: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened(page, address, place)
    page.wait_for_selector("main h1, main h2")
    found = Axe().run(page)
    problems = [(v["id"], n["target"]) for v in found.response["violations"] for n in v["nodes"]]
    assert problems == []


def test_a_narrow_window_has_no_sideways_scrolling_of_the_page(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    for place in ("", "rollout/iteration_0001:0", "recipe"):
        opened(page, address, place)
        page.wait_for_selector("main h1")
        assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_the_keys_are_told(page: Page, address: str) -> None:
    opened(page, address)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
