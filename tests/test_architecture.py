"""What docs/ARCHITECTURE.md names is there: files, functions, ops, and the lines of the step that it quotes."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from penstock.engine.schedule.actions import ACTIONS

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("app", "engine", "storage", "tui")
PAGES = {name: (REPOSITORY / "docs" / name).read_text() for name in ("ARCHITECTURE.md", "EXTENDING.md")}
PAGE = PAGES["ARCHITECTURE.md"]
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
OPS = re.compile(r"(embed|layer|head|load|store|spill|unspill|read|write|attend|norm|clip|commit|update)(_[a-z_]+)?")


@cache
def names(file: Path) -> set[str]:
    """Everything that a file defines: functions, classes and their members as `Class.member`, and assignments."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(file.read_text()).body, "")
    return found


def find(name: str) -> Path:
    """The one file that a page means: a path from the root, or the end of one."""
    if (REPOSITORY / name).exists():
        return REPOSITORY / name
    matches = [file for top in (*PACKAGES, "tests") for file in (REPOSITORY / top).rglob(name)]
    assert len(matches) == 1, f"{name} is {len(matches)} files"
    return matches[0]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_every_name_in_it_exists(page: str) -> None:
    quoted = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGES[page])
    made = set(re.findall(r"^New file `([\w/]+\.py)`", PAGES[page], re.MULTILINE))
    assert len(quoted) > 15
    for file, name in quoted:
        if file not in made:
            assert not name or name in names(find(file)), f"{file} has no {name}"


def test_every_method_and_every_op_exists() -> None:
    members = {name for top in PACKAGES for file in (REPOSITORY / top).rglob("*.py") for name in names(file)}
    quoted = {text for text in QUOTED if re.fullmatch(r"[A-Z]\w+\.[a-z_]\w+", text)}
    assert len(quoted) > 15
    assert quoted <= members, quoted - members
    ops = {text for text in QUOTED if OPS.fullmatch(text)} - {"embed", "head"}
    assert len(ops) > 20
    assert ops <= set(ACTIONS), ops - set(ACTIONS)


def test_the_step_is_quoted_as_it_stands() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    source = (REPOSITORY / "engine" / "model" / "reference.py").read_text()
    lines = [line.strip() for line in source.splitlines()]
    quoted = [line.strip() for line in block.splitlines()]
    start = lines.index(quoted[0])
    assert lines[start : start + len(quoted)] == quoted
