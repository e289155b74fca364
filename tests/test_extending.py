"""docs/EXTENDING.md, followed to the letter in a copy of the source: what it adds is trained, planned and shown."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "EXTENDING.md").read_text()
WALKS = (REPOSITORY / "tests" / "walks.py").read_text()
"""Its tests, section by section."""
STEP = re.compile(r"^(New file|In) `([\w/]+\.py)`:\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(page: str, root: Path) -> list[str]:
    """Do what the page says, to the source in `root`; the files that were made or changed."""
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
    """A copy of the repository in which the page was followed."""
    root = tmp_path / "copy"
    for name in ("app", "engine", "src", "storage", "tui", "tests"):
        shutil.copytree(REPOSITORY / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    assert len(follow(PAGE, root)) == PAGE.count("```python") > 6
    return root


def test_what_the_page_adds_has_its_places(root: Path) -> None:
    assert PAGE.count("\n## ") == WALKS.count("\n# -----") == 8
    for _, name, _ in STEP.findall(PAGE):
        compile((root / name).read_text(), name, "exec")


@pytest.mark.long
def test_what_the_page_adds_works(root: Path) -> None:
    arguments = ["-m", "pytest", "-vv", "-p", "no:cacheprovider", "tests/walks.py"]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = re.findall(r"^(?:async )?def (test_\w+)", WALKS, re.MULTILINE)
    assert len(wanted) > 6
    for name in wanted:
        assert re.search(rf"walks\.py::{name}(\[.*\])? PASSED", done.stdout), done.stdout
