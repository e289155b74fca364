"""Imports go one way: between packages, between the rooms of the engine, and never in a circle."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from cli_process import REPOSITORY, done, started

PACKAGES = ["storage", "engine", "app", "tui"]
"""From the ground up; a package imports itself and those before it."""
FLOORS = {
    "storage": ["files", "tier", "generations", "offsite"],
    "app": [
        *("console", "hub", "recipes", "runs", "trackers", "planning", "finetune", "sampling", "evaluation"),
        *("launch", "bench", "cli"),
    ],
}
"""Their rooms from the ground up; a room imports itself and those before it."""
GROUND = ["config", "events", "clock", "preparing"]
"""Modules of the engine below its rooms, and the recipe's; its other modules are above them all."""
ROOMS = ["branches", "plan", "attention", "optim", "objectives", "schedule", "model"]
ROOMS += ["machine", "ranks", "rewards", "data", "hf", "forecast", "generate", "runtime"]
"""From the ground up; a room imports itself and those before it."""
DATA = ["files", "text", "needles", "formats", "corpus"]
"""Rooms of engine/data from the ground up, above its samples and position; its other modules are above them."""
ABOVE = "cluster"
"""The room above engine's own files, which are above all others."""
PLANNING = ("engine.plan", "engine.schedule", "engine.forecast")
HEAVY = {"torch", "transformers", "tensorstore", "tokenizers"}
READERS = "cli.main recipes.recipe recipes.fields planning.machines runs.directory runs.log runs.control "
READERS += "runs.checkpoints launch.launcher launch.progress runs.trace launch.run"
LIGHT = [*(f"penstock.app.{name}" for name in READERS.split()), "penstock.engine.config", "penstock.engine.events"]


def name_of(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(("penstock", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {name_of(file): file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))}
"""All but the public API, src/penstock/, which is above them and imported by none."""


def imported(file: Path) -> set[str]:
    """Modules that a file imports, of ours by their full name: inside functions too, and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in inner}
    return found


@cache
def imports() -> dict[str, set[str]]:
    """What every module imports."""
    return {name: imported(file) for name, file in MODULES.items()}


def floor(module: str) -> int:
    """How high in the engine a module is."""
    _, _, room, *inner = module.split(".")
    if room in GROUND:
        return 0
    if room == ABOVE:
        return len(ROOMS) + 2
    return 1 + (ROOMS.index(room) if inner or room in ROOMS else len(ROOMS))


def loaded(modules: list[str], names: set[str]) -> list[str]:
    """Which of `names` a new interpreter has loaded behind `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*({names!r} & set(sys.modules)))"
    return done(started(REPOSITORY, sys.executable, "-c", code)).stdout.split()


def inside(*packages: str) -> list[str]:
    found = [name for name in MODULES if name.startswith(tuple(f"penstock.{package}." for package in packages))]
    assert len(found) > 10
    return found


def test_packages_import_one_way() -> None:
    for module, names in imports().items():
        package = module.split(".")[1]
        above = {*PACKAGES[PACKAGES.index(package) + 1 :], "recipes", "tests"}
        if package == "tui":
            above |= {"engine"}
            assert "torch" not in {name.partition(".")[0] for name in names}, module
        assert not {name.split(".")[1] for name in names if name.startswith("penstock.")} & above, module
        assert not {name.partition(".")[0] for name in names} & {*PACKAGES, "benchmarks", "tests"}, module


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_of_a_package_import_one_way(package: str) -> None:
    floors = FLOORS[package]
    assert {name.split(".")[2] for name in inside(package)} == {*floors}
    for module in inside(package):
        below = floors[: floors.index(module.split(".")[2]) + 1]
        used = {name.split(".")[2] for name in imports()[module] if name.startswith(f"penstock.{package}.")}
        assert used <= {*below}, f"{module} imports {used - {*below}}"


def test_rooms_of_the_engine_import_one_way() -> None:
    assert {name.split(".")[2] for name in inside("engine") if name.count(".") == 3} == {"config", ABOVE, *ROOMS}
    for module in inside("engine"):
        ours = [name for name in imports()[module] if name.startswith("penstock.engine.")]
        upward = [name for name in ours if floor(name) > floor(module)]
        assert not upward, f"{module} imports {upward}"


def test_rooms_of_the_data_import_one_way() -> None:
    def data_floor(module: str) -> int:
        room = module.split(".")[3]
        if room in ("samples", "position"):
            return 0
        return 1 + (DATA.index(room) if room in DATA else len(DATA))

    for module in inside("engine.data"):
        ours = [name for name in imports()[module] if name.startswith("penstock.engine.data.")]
        upward = [name for name in ours if data_floor(name) > data_floor(module)]
        assert not upward, f"{module} imports {upward}"


def test_no_circle() -> None:
    try:
        TopologicalSorter({module: names - {module} for module, names in imports().items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_readers_planning_screens_help_and_preparing_data_load_no_torch() -> None:
    """Planning imports none of it within functions either."""
    for module in inside(*PLANNING):
        assert not {name.partition(".")[0] for name in imports()[module]} & HEAVY, module
    assert loaded([*LIGHT, *inside("tui", *PLANNING)], HEAVY) == []
    assert loaded(["penstock.engine.data.corpus.prepare"], {"torch", "transformers"}) == []
    code = f"import sys; from penstock.app.cli.main import main; main(['--help']); print({HEAVY!r} & set(sys.modules))"
    assert done(started(REPOSITORY, sys.executable, "-c", code)).stdout.endswith("set()\n")


def test_every_package_is_installed() -> None:
    """The links in src/penstock are the parts of the package, and each of their folders is one of its packages."""
    linked = {link.name: link.resolve() for link in (REPOSITORY / "src" / "penstock").iterdir() if link.is_symlink()}
    assert linked == {name: REPOSITORY / name for name in (*PACKAGES, "recipes")}
    folders = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    assert folders == {name_of(file.parent / "__init__.py") for file in MODULES.values()}
