"""Every input of the catalogue (bad_inputs.py) through the real command line: one message, exit 2, nothing lost."""

from pathlib import Path

import pytest
from bad_inputs import Bad, catalogue, faults, run

INPUTS = catalogue()


def test_the_catalogue_is_large() -> None:
    assert len(INPUTS) >= 300


def _case(bad: Bad) -> object:
    return pytest.param(bad, id=f"{bad.family}: {bad.name}".encode("unicode_escape").decode())


@pytest.mark.parametrize("bad", [_case(bad) for bad in INPUTS])
def test_a_bad_input_is_one_message(bad: Bad, tmp_path: Path) -> None:
    found = run(bad, tmp_path)
    assert faults(bad, found) == [], found
