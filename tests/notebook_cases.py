"""Runs notebooks in a kernel of their own, and keeps of their outputs what a reader wants.

    python -m tests.notebook_cases notebooks/1_first_swarm.ipynb …     runs them and writes their outputs

Kept: what was printed, shown and drawn. Not kept: times, the machine's metadata, and what goes to stderr.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run from top to bottom. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    asyncio.run(client.async_execute())
    return notebook


def kept(notebook: Any) -> Any:
    """The notebook as it is committed."""
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_plain(o) for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


def _plain(output: Any) -> Any:
    if "metadata" in output:
        output.metadata = {}
    return output


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        nbformat.write(kept(executed(path)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
