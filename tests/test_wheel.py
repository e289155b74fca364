"""What is installed: one package, with all that it needs, which leaves nothing when it goes.

The wheel is built as pip builds it, and installed into an environment of its own, which sees the libraries of this one.
"""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import PATIENCE_S, REPOSITORY
from web_client import browser, served, shown, window

pytestmark = pytest.mark.long

SMALL = "model.num_layers=2 model.hidden_size=32 model.intermediate_size=64 model.head_dim=8 data.max_documents=20 "
SMALL += "data.validation_documents=none data.sequence_length=64 data.tokenizer_vocab_size=300 train.steps=2 "
SMALL += "train.chunk_tokens=32 train.validate_every=none train.validation_sequences=none train.validate_first=false "
SMALL += "train.decay_steps=none train.warmup_steps=0 train.compile=off train.device=cpu budgets.gpu=least "
SMALL += "budgets.ram=least storage.part_bytes=64KiB after.sample_tokens=4"
SETTINGS = [word for text in SMALL.split() for word in ("--set", text)]

OWN_CODE = ("app", "engine", "storage", "tui", "recipes", "torch")
"""Folders of the user's beside his recipe, each a package that ends whoever imports it."""

MINE = """
from penstock import DataConfig, ModelConfig, Recipe, run_recipe

recipe = Recipe(name="mine", model=ModelConfig(vocab_size=300), data=DataConfig(source="random"))
if __name__ == "__main__":
    run_recipe(__file__)
"""

LAUNCH = """
import asyncio
from pathlib import Path

from penstock.app.runs.directory import list_runs
from penstock.tui.app import PenstockApp

app = PenstockApp(Path.cwd())

def shown():
    return "\\n".join(strip.text for strip in app.screen._compositor.render_strips())

async def until(pilot, condition):
    for _ in range(600):
        if condition():
            return
        await pilot.pause(0.1)
    raise SystemExit(shown())

async def main():
    async with app.run_test(size=(120, 40)) as pilot:
        app.open("configure", Path("mine.json"))
        await until(pilot, lambda: "fits on this machine" in shown())
        await pilot.press("l")
        await until(pilot, lambda: "Launch (y)" in shown())
        await pilot.press("y")
        await until(pilot, lambda: any(run.state == "finished" for run in list_runs()))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows, as from a clean clone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, text=True)
    for name in names.splitlines():
        if (REPOSITORY / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to((REPOSITORY / name).readlink())
        elif (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of an environment into which the wheel is installed; uninstalling leaves nothing of it there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    added = {path.name for path in site.iterdir()} - {"libraries.pth"}
    assert {name for name in added if not name.endswith(".dist-info")} == {"penstock"}
    yield folder
    subprocess.run([*pip, "uninstall", "--yes", "penstock"], check=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user works: his recipe, and packages of his own named as ours are."""
    (tmp_path / "mine.py").write_text(MINE)
    for name in OWN_CODE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the user has a package {name}')\n")
    return tmp_path


def environment() -> dict[str, str]:
    """Without what leads to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_package_with_recipes_and_everything_that_is_read(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"penstock"}
    ours = [path for part in OWN_CODE[:-1] for path in (REPOSITORY / part).rglob("*.*")]
    expected = {path for path in ours if path.suffix in (".py", ".tcss", ".html", ".js", ".css")}
    assert {f"penstock/{path.relative_to(REPOSITORY)}" for path in expected} <= set(names)
    recipes = {name for name in names if name.startswith("penstock/recipes/")}
    assert recipes == {f"penstock/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "recipes").rglob("*.py")}


def test_commands_and_scripts_run_beside_packages_of_the_same_names(installed: Path, folder: Path) -> None:
    penstock, python = installed / "bin" / "penstock", installed / "bin" / "python"
    assert run(folder, penstock, "--version").startswith("penstock 0.")
    for command in ([penstock, "train", "quickstart"], [python, "mine.py"], [penstock, "train", "mine.py"]):
        assert "trained to step 2" in run(folder, *command, *SETTINGS)
    assert "trained to step 2" in run(folder, python, "-P", "-m", "penstock", "train", "mine.py", *SETTINGS)
    where = run(folder, python, "-c", "import penstock.engine; print(penstock.engine.__file__)")
    assert Path(where.strip()).is_relative_to(installed)


def test_the_terminal_application_launches_what_is_installed(installed: Path, folder: Path) -> None:
    code = "from penstock.app.recipes.recipe import *; from pathlib import Path; import sys;"
    code += "save_recipe(Path('mine.json'), apply_overrides(load_recipe('mine.py'), sys.argv[1:]))"
    run(folder, installed / "bin" / "python", "-c", code, *SETTINGS[1::2])
    run(folder, installed / "bin" / "python", "-P", "-c", LAUNCH)


async def test_browsers_are_served_what_is_installed(installed: Path, folder: Path) -> None:
    penstock = (str(installed / "bin" / "penstock"),)
    async with (
        served(folder, folder / "log", penstock=penstock, env=environment()) as server,
        browser(server.url) as session,
        window(session, server.base) as socket,
    ):
        await shown(socket, b"quickstart")


def test_a_tool_of_its_own_needs_no_environment_to_be_entered(installed: Path, folder: Path) -> None:
    """As pipx and `uv tool` install it: a link to the command, from another folder, with nothing else set."""
    (folder / "bin").mkdir()
    (folder / "bin" / "penstock").symlink_to(installed / "bin" / "penstock")
    bare = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    command = ["penstock", "plan", "quickstart", "--json"]
    found = subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, timeout=PATIENCE_S)
    assert json.loads(found.stdout)["fits"], found.stderr
