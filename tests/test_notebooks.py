"""The notebooks as they are committed, and as they run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebook_cases import NOTEBOOKS, executed

NAMES = ("1_first_swarm", "2_inside_ppo", "3_failure_modes", "4_swapping", "5_compaction", "6_what_if")
RUN = "test_a_notebook_runs_from_top_to_bottom"
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
_PATH = re.compile(r"(?<![\w/.<])/(?:home|root|work|tmp|usr|Users|var|opt)/|\b[A-Z]:\\\\")
_TIME = re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\b20\d\d-\d\d-\d\dT")


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def outputs(path: Path) -> list[Any]:
    return [o for cell in cells(path, "code") for o in cell.outputs]


def test_the_notebooks_are_numbered_and_all_there():
    assert tuple(p.stem for p in NOTEBOOKS) == NAMES


@each
def test_a_notebook_is_kept_with_its_outputs_none_of_them_an_error(path: Path):
    kinds = [o.output_type for o in outputs(path)]
    assert len(kinds) >= 5
    assert "error" not in kinds
    numbers = [cell.execution_count for cell in cells(path, "code")]
    assert numbers == list(range(1, len(numbers) + 1))


@each
def test_a_notebook_is_small_and_holds_no_path_no_time_and_no_metadata(path: Path):
    text = path.read_text()
    assert len(text.encode()) < 300_000
    for output in outputs(path):
        shown = [output.get("text", ""), *(str(v) for k, v in output.get("data", {}).items() if k.startswith("text"))]
        assert not any(_PATH.search(t) or _TIME.search(t) for t in shown)
        assert not output.get("metadata")
    assert set(nbformat.read(path, as_version=4).metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for kind in ("code", "markdown") for cell in cells(path, kind))


@each
def test_a_notebook_says_what_one_learns_and_what_to_try_next(path: Path):
    words = [cell.source for cell in cells(path, "markdown")]
    assert words[0].startswith(f"# {path.stem[0]} · ")
    assert "**You learn**" in words[0]
    assert words[-1].startswith("## Try next")


@each
def test_every_figure_of_a_notebook_has_labelled_axes(path: Path):
    for cell in cells(path, "code"):
        if "plt.subplots" in cell.source:
            assert "xlabel" in cell.source
            assert "ylabel" in cell.source


@each
def test_what_a_notebook_links_to_is_there(path: Path):
    links = re.findall(r"\]\(([^)#]+)", "".join(cell.source for cell in cells(path, "markdown")))
    assert all((path.parent / link).exists() for link in links)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Mapping[Path, Future[Any]]]:
    """Those notebooks that are to be run, two at a time, each in a process of its own."""
    wanted = [p for p in NOTEBOOKS if any(f"[{p.stem}]" in t.name for t in request.session.items if RUN in t.name)]
    with ThreadPoolExecutor(2) as pool:
        yield {path: pool.submit(executed, path) for path in wanted}


@pytest.mark.slow
@pytest.mark.timeout(900)
@each
def test_a_notebook_runs_from_top_to_bottom(path: Path, runs: Mapping[Path, Future[Any]]):
    notebook = runs[path].result()
    assert any(cell.get("outputs") for cell in notebook.cells)
