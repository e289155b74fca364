"""Each wait of the engine and the storage is needed: without it, delays of streams and lanes make another result.

And enough: with all of them no seed does.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_waits import REPOSITORY, WAITS, Wait

from penstock.storage.files.disk import atomic_write

SEEDS = 20
HERE = Path(__file__).parent


def run(scenario: str, folder: Path, package: Path, expected: str, seeds: int) -> list[str]:
    """Results of the seeds, of a process that finds the package in `package`."""
    folder.mkdir()
    path = (package / "src", REPOSITORY / "tests" / "support", *os.environ["PYTHONPATH"].split(os.pathsep))
    done = subprocess.run(
        [sys.executable, str(HERE / "scenarios.py"), scenario, str(folder), expected, str(seeds)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line.partition("\t")[2] for line in done.stdout.splitlines() if "\t" in line]
    return found if done.returncode == 0 else [*found, f"exit code {done.returncode}: {done.stderr[-2000:]}"]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Scenario -> its result with all waits, which no seed's delays change; found once by all of pytest's workers."""
    folder = tmp_path_factory.mktemp("right")
    kept = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def find(scenario: str) -> str:
        file = kept / f"right-{scenario}"
        if not file.exists():
            found = run(scenario, folder / scenario, REPOSITORY, "", 4)
            assert len(set(found)) == 1, found
            assert "Error" not in found[0]
            atomic_write(file, found[0])
        return file.read_text()

    return find


def without(wait: Wait, folder: Path) -> Path:
    """The package's sources without the wait."""
    for name in ("app", "engine", "storage", "tui", "recipes", "src"):
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / wait.file
    text = path.read_text()
    assert text.count(wait.code) == 1, f"{wait.name}: not once in {wait.file}"
    path.write_text(text.replace(wait.code, wait.without))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("wait", WAITS, ids=[wait.name for wait in WAITS])
def test_without_it_a_seed_gives_another_result(wait: Wait, right, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    expected = right(wait.scenario)
    found = run(wait.scenario, tmp_path / "run", without(wait, tmp_path / "package"), expected, SEEDS)
    assert found[-1] != expected, f"nothing noticed in {len(found)} seeds"
    print(f"{wait.name}: noticed by seed {len(found) - 1}: {found[-1][:200]}")
