"""The notebooks run from their first cell to their last, each in an empty folder, and leave no bars and no errors."""

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def kept(outputs: list[Any]) -> list[Any]:
    """What a reader is shown: the text of results, without what is said on the way."""
    results = [output for output in outputs if output.output_type == "execute_result"]
    for output in results:
        output.data = {"text/plain": output.data["text/plain"]}
    return results


def outline(cells: list[Any]) -> list[tuple[str, int]]:
    """Of each result: its first line without numbers and spaces, such as the columns of a table, and how many lines."""
    results = [output for cell in cells for output in cell.outputs if output.output_type == "execute_result"]
    lines = [output.data["text/plain"].splitlines() for output in results]
    return [(re.sub(r"-?\d+(\.\d+)?|\s", "", first), len(rest)) for first, *rest in lines]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, update_golden: bool) -> None:
    """What the repository has of their results has the form of those of today; `--update-golden` writes them anew."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    before = outline(cells)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output for cell in cells for output in cell.outputs]
    told = [output.data["text/plain"] for output in said if output.output_type == "display_data"]
    assert "" in told and not any("steps/s" in text for text in told)  # the line that changed meanwhile is gone
    assert not any(output.output_type == "stream" and "steps/s" in output.text for output in said)
    assert update_golden or outline(cells) == before
    if update_golden:
        for cell in cells:
            cell.outputs = kept(cell.outputs)
            cell.metadata = {}
        nbformat.write(notebook, path)
