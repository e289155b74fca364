"""The notebooks' cells run in order, in make test with fewer steps; they are committed without output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_process import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))
SHORTER = {"steps=60": "steps=6", "=20,": "=2,", "global_batch_size=8": "global_batch_size=2"}


def test_there_are_as_many_as_expected_and_a_page_leads_to_them() -> None:
    assert [path.name for path in NOTEBOOKS] == ["training.ipynb"]
    page = (REPOSITORY / "docs" / "python.md").read_text()
    assert all(f"notebooks/{path.name}" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as it is"])
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    tmp_path: Path, notebook: Path, short: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "committed without output"
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = "".join(cell["source"])
        for text, instead in SHORTER.items() if short else ():
            code = code.replace(text, instead)
        if cell["cell_type"] == "code":
            exec(compile(code, f"cell {number}", "exec"), space)
    said = capsys.readouterr().out
    assert "\x1b" not in said, "plain output"
    for part in (
        "fits: True",
        "trained to step",
        "best validation loss: {",
        "'After May comes' -> ",
        f"samples kept: {[2, 4, 6] if short else [20, 40, 60]}",
        "After Friday comes",
    ):
        assert part in said
