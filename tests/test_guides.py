"""Every command of docs/guide/ runs, in the order of its page, on small stand-ins; test_readme.py checks options."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_process import PATIENCE_S, REAL, REPOSITORY, default_signals
from guide_files import arguments_for, make_files

GUIDES = sorted((REPOSITORY / "docs" / "guide").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(page: Path) -> list[str]:
    """The lines that a reader types, in order; one that ends in a backslash goes on in the next."""
    blocks = [body for language, body in BLOCK.findall(page.read_text()) if language == "sh"]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if line.strip()]


def test_there_are_five_and_their_code_is_right() -> None:
    assert len(GUIDES) == 5
    for page in GUIDES:
        assert len(commands(page)) >= 4, page
        assert f"guide/{page.name}" in (REPOSITORY / "docs" / "guide.md").read_text(), "the guide leads to it"
        for language, body in BLOCK.findall(page.read_text()):
            if language == "python":
                exec(f"from penstock import *\n{body}", {})  # what it builds is checked as it is built


@pytest.mark.long
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_files(tmp_path)
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "penstock":
            line = line.replace("penstock", shlex.join(REAL), 1)
            verb, *rest = words[1:]
            more = shlex.join(arguments_for(verb, rest))
            line = line.replace(" || true", f" {more} || true") if " || true" in line else f"{line} {more}"
        process = subprocess.run(
            ["sh", "-c", line.replace("python ", f"{sys.executable} ") if words[0] == "python" else line],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=default_signals,
        )
        said = f"{page.name}: {line}\n{process.stdout[-2000:]}{process.stderr[-2000:]}"
        assert process.returncode == 0, said
        assert "Traceback" not in process.stderr, said


SHORTER = {"steps=60": "steps=6", "=20,": "=2,", "global_batch_size=8": "global_batch_size=2"}


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as it is"])
def test_the_notebook_runs(
    tmp_path: Path, short: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in order, in `make test` with fewer steps."""
    (notebook,) = (REPOSITORY / "docs" / "notebooks").glob("*.ipynb")
    assert f"notebooks/{notebook.name}" in (REPOSITORY / "docs" / "python.md").read_text(), "a page leads to it"
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
    assert f"samples kept: {[2, 4, 6] if short else [20, 40, 60]}" in said
    for part in (
        "fits: True",
        "trained to step",
        "best validation loss: {",
        "'After May comes' -> ",
        "After Friday comes",
    ):
        assert part in said
