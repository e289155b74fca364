"""Imports go one way: tui -> app -> engine -> storage. What readers of a run need starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ORDER = ["storage", "engine", "app", "tui"]
HEAVY = {"torch", "transformers", "tensorstore", "tokenizers"}
LIGHT = [
    "app.cli",
    "app.recipe",
    "app.machines",
    "app.recipe_file",
    "app.rundir",
    "app.run_log",
    "app.control",
    "app.checkpoints",
    "app.launcher",
    "app.progress",
    "app.trace",
    "app.launch",
    "engine.config",
    "engine.events",
]


TUI = [
    ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
    for file in sorted((REPOSITORY / "tui").rglob("*.py"))
    if file.stem != "__init__"
]


def imported_packages(file: Path) -> set[str]:
    """First names of everything that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            found.add(node.module.split(".")[0])
    return found


def test_imports_go_one_way() -> None:
    files = [(package, file) for package in ORDER for file in sorted((REPOSITORY / package).rglob("*.py"))]
    assert {package for package, _ in files} == set(ORDER)
    assert len(files) > 15
    for package, file in files:
        above = set(ORDER[ORDER.index(package) + 1 :]) | {"recipes", "tests"}
        if package == "tui":
            above |= {"engine", "torch"}
        assert not imported_packages(file) & above, f"{file} imports {imported_packages(file) & above}"


@pytest.mark.parametrize("module", LIGHT)
def test_what_readers_need_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_data_is_prepared_without_what_takes_long_to_import() -> None:
    code = "import sys, engine.data.corpus; print(*({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_terminal_application_imports_nothing_heavy() -> None:
    assert len(TUI) > 20
    code = f"import sys, {', '.join(TUI)}; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("package", "below"), [("storage", {"engine", "app"}), ("engine", {"app"})])
def test_a_package_loads_alone(package: str, below: set[str]) -> None:
    modules = [
        f"{package}.{file.stem}" for file in sorted((REPOSITORY / package).glob("*.py")) if file.stem != "__init__"
    ]
    code = f"import sys, {', '.join(modules)}; print(*({below!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_package_is_installed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    files = [file for package in ORDER for file in (REPOSITORY / package).rglob("__init__.py")]
    folders = {".".join(file.parent.relative_to(REPOSITORY).parts) for file in files}
    with_code = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for package in ORDER
        for file in (REPOSITORY / package).rglob("*.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == folders == with_code
