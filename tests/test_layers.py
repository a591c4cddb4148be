"""The layering: who may import whom, and whose the six import names are."""

import ast
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
PACKAGES = ("swarm", "orchestrator", "subagents", "rewards", "envs", "recipes")


def imported(source: str) -> set[str]:
    """Top-level packages that a module imports anywhere, inside its functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@cache
def imports() -> dict[str, set[str]]:
    """What each of the project's files imports."""
    files = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {str(path.relative_to(ROOT)): imported(path.read_text()) for path in files}


def test_no_layer_imports_one_above_it_or_beside_it():
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


def test_imports_are_found_wherever_they_stand():
    assert imported("import a.b as c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i, j\n") == set("adij")


@pytest.mark.parametrize("package", ["ray", "vllm", "langchain_core", "langgraph", "wandb"])
def test_a_heavy_package_is_imported_by_one_file_at_most(package: str):
    importers = [path for path, packages in imports().items() if package in packages]
    assert len(importers) <= 1, importers


def test_no_other_distribution_owns_an_import_name():
    owners = packages_distributions()
    assert {name: set(owners.get(name, ())) - {"swarm-rl"} for name in PACKAGES} == {name: set() for name in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_name_leads_to_this_project(package: str):
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package / "__init__.py")
