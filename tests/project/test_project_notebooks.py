"""Every notebook is committed without outputs and runs from top to bottom in a kernel of its own."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 120

nbformat = pytest.importorskip("nbformat", reason="the test extra is not installed")


def test_there_is_a_notebook_to_start_with():
    assert "01-quickstart.ipynb" in {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            assert not cell.outputs, f"cell {number} has outputs"
            assert cell.execution_count is None, f"cell {number} has an execution count"


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="the test extra is not installed")
    monkeypatch.setenv(
        "PYTHONPATH", str(path.parents[1])
    )  # the kernel starts in tmp_path, so that nothing is written here
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
