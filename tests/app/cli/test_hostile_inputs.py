"""Files as strangers hand them over, spoilt by a fuzzer that knows their grammar: one message, in seconds and little
memory, and nothing written but the run directory."""

import random
from pathlib import Path

import hostile
import pytest
from hostile_kinds import KINDS, Spoil, kind_of
from hostile_sweep import Sweep
from samples import cases, samples

MANY, CASE = 2000, 60


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return Sweep(tmp_path_factory.mktemp("sweep"))


@pytest.mark.sampled
@pytest.mark.parametrize("first", cases(range(0, MANY, CASE), 0))
def test_spoilt_files_are_taken_or_refused_in_one_message(sweep: Sweep, first: int) -> None:
    numbers = range(first, min(first + CASE, MANY), CASE // samples(20, CASE))
    assert [found for number in numbers if (found := sweep.faults(number))] == []


def test_inputs_are_of_every_kind_and_depend_on_their_number_only(tmp_path: Path) -> None:
    counts = {name: sum(kind_of(number) == name for number in range(MANY)) for name in KINDS}
    assert min(counts.values()) > 50
    spoilt = {Spoil(seed).json({"a": [1, 2.5, "text"], "b": {"c": None}}) for seed in range(200)}
    assert len(spoilt) > 100
    assert all(Spoil(5).bytes(bytes(range(200))) == Spoil(5).bytes(bytes(range(200))) for _ in range(3))
    made = [hostile.template("{{ a }}", random.Random(seed)) for seed in range(200)]
    assert len(set(made)) > 150
    assert made == [hostile.template("{{ a }}", random.Random(seed)) for seed in range(200)]
