"""The slices of the long tests: each test runs within so many commits, and a run says which slice it had."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from long_slice import is_due, slice_of

TESTS = Path(__file__).parent


@given(nodeid=st.text(), commits=st.integers(0), slices=st.integers(1, 20))
def test_every_test_runs_once_in_so_many_commits(nodeid: str, commits: int, slices: int) -> None:
    assert sum(is_due(nodeid, at, slices) for at in range(commits, commits + slices)) == 1


def test_a_run_has_one_slice_and_says_which(tmp_path: Path) -> None:
    """With a worker: the process that reports does not collect the tests itself."""
    many = "import pytest\n@pytest.mark.parametrize('case', range(40))\ndef test_one(case): ...\n"
    (tmp_path / "test_many.py").write_text(many)
    due = [case for case in range(40) if slice_of(f"test_many.py::test_one[{case}]", 5) == 2]
    assert 0 < len(due) < 40
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1", "-v", "--long-slice", "7", "--slices", "5"]
    command += ["--basetemp", "base"]  # where it has none it deletes the old folders of this suite, for minutes
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "support")))}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=True)
    passed = {int(line.split("[")[-1][:-2]) for line in done.stdout.splitlines() if " PASSED test_many.py::" in line}
    assert passed == set(due)
    *_, says, last = done.stdout.splitlines()
    assert says == f"slice 3 of 5: {len(due)} tests; every test runs within 5 commits"
    assert f"{len(due)} passed" in last
