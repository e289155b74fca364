"""docs/EXTENDING.md and tests/walks/*.md, followed to the letter in a copy of the source: what they add is trained,
planned and shown (tests/walks/*.py)."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WALKS = REPOSITORY / "tests" / "walks"
PAGES = [page.read_text() for page in (REPOSITORY / "docs" / "EXTENDING.md", *sorted(WALKS.glob("*.md")))]
TESTS = sorted(WALKS.glob("*.py"))
STEP = re.compile(r"^(New file|In) `([\w/]+\.py)`:\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^#+ ((?:An?|Optimizers) .*)\n((?:(?!^## ).*\n)*)", re.MULTILINE)
TOUCHED = {
    "An optimizer": (1, 1),
    "An objective": (1, 1),
    "A kind of block": (1, 1),
    "A pass": (1, 0),
    "A data format": (1, 2),
    "A tracker": (1, 1),
    "A screen": (1, 1),
    "An optimizer that sees parameters whole": (1, 1),
    "A container of rows": (1, 1),
    "An attention kernel": (1, 1),
    "A pane of the Run screen": (1, 2),
    "An action of the schedule": (0, 3),
}
"""Walk -> new files, and files that get a line."""


def follow(page: str, root: Path) -> list[str]:
    """Do what a page says, to the source in `root`; the files that were made or changed."""
    done = []
    for how, name, code in STEP.findall(page):
        file = root / name
        if how == "New file":
            assert not file.exists(), f"{name} is there already"
            file.write_text(code)
        else:
            anchor, _, new = code.partition("\n")
            text = file.read_text()
            assert text.count(f"{anchor}\n") == 1, f"{name} has not one line {anchor!r}"
            file.write_text(text.replace(f"{anchor}\n", f"{anchor}\n{new}"))
        done.append(name)
    return done


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the repository in which the pages were followed."""
    root = tmp_path / "copy"
    for name in ("app", "engine", "src", "storage", "tui", "tests"):
        shutil.copytree(REPOSITORY / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    for page in PAGES:
        assert len(follow(page, root)) == page.count("```python") > 0
    return root


def test_what_the_pages_add_has_its_places(root: Path) -> None:
    steps = {title: STEP.findall(body) for page in PAGES for title, body in SECTION.findall(page)}
    files = {title: Counter({(how, name): 1 for how, name, _ in found}) for title, found in steps.items() if found}
    counted = {title: Counter(how for how, _ in found) for title, found in files.items()}
    assert {title: (found["New file"], found["In"]) for title, found in counted.items()} == TOUCHED
    for page in PAGES:
        for _, name, _ in STEP.findall(page):
            compile((root / name).read_text(), name, "exec")


@pytest.mark.long
def test_what_the_pages_add_works(root: Path) -> None:
    names = [f"tests/walks/{file.name}" for file in TESTS]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in TESTS:
        wanted = re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
        assert wanted
        for name in wanted:
            assert re.search(rf"{file.name}::{name}(\[.*\])? PASSED", done.stdout), done.stdout
    assert len(TESTS) == 10
