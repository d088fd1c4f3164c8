"""The notebook of docs/examples runs from the first cell to the last."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
from nbformat import read

import slurmllm

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "examples" / "first_run.ipynb"


def test_it_uses_public_names_and_holds_no_output() -> None:
    cells = read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    names = {name for cell in code for name in re.findall(r"slurmllm\.(\w+)", cell.source)}
    assert {"load_recipe", "plan_run", "submit_run"} <= names <= {*slurmllm.__all__}
    assert [cell.outputs for cell in code] == [[]] * len(code)


@pytest.mark.long
def test_it_runs(tmp_path: Path, stdlib: tuple[Path, Path]) -> None:
    shutil.copytree(stdlib[0].parent, tmp_path / "runs" / ".data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own packages
        from nbclient import NotebookClient

        notebook = read(NOTEBOOK, as_version=4)
        place = {"metadata": {"path": str(tmp_path)}}
        done = NotebookClient(notebook, timeout=900, resources=place).execute()
    texts = [
        output.get("text") or output["data"]["text/plain"]
        for cell in done.cells
        for output in cell.get("outputs", [])
    ]
    assert "#!/bin/bash" in texts[1]
    assert texts[2] == "'done'"
    assert any(re.match("(differ|equivalent): .*seed", text) for text in texts)
    assert re.search(r"first +done +60", texts[-1])
    assert any("image/png" in o.get("data", {}) for c in done.cells for o in c.get("outputs", []))
