"""The notebooks' cells run in order, as they are committed: without output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_process import REPOSITORY, done, started

NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))
RUNNER = """
import json, sys
space = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
"""


def test_there_are_as_many_as_expected_and_a_page_leads_to_them() -> None:
    assert [path.name for path in NOTEBOOKS] == ["training.ipynb"]
    page = (REPOSITORY / "docs" / "python.md").read_text()
    assert all(f"notebooks/{path.name}" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(tmp_path: Path, notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "committed without output"
    monkeypatch.setenv("MPLBACKEND", "Agg")
    said = done(started(tmp_path, sys.executable, "-c", RUNNER, str(notebook))).stdout
    assert "\x1b" not in said, "plain output"
    for part in (
        "fits: True",
        "trained to step",
        "best validation loss: {",
        "'After May comes' -> ",
        "samples kept: [20, 40, 60]",
        "After Friday comes",
    ):
        assert part in said
