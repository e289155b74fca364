"""Files as strangers hand them over, spoilt by a fuzzer that knows their grammar: one message, in seconds and little
memory, and nothing written but the run directory."""

import random
from pathlib import Path

import hostile
import pytest
from hostile_kinds import KINDS, Spoil, kind_of
from hostile_sweep import Sweep
from samples import samples

MANY = 2000


@pytest.mark.sampled
def test_spoilt_files_are_taken_or_refused_in_one_message(tmp_path: Path) -> None:
    sweep, number = Sweep(tmp_path), samples(20, MANY)
    assert [found for at in range(0, MANY, MANY // number) if (found := sweep.faults(at))] == []
    assert sum(codes.total() for codes in sweep.codes.values()) == number


def test_inputs_are_of_every_kind_and_depend_on_their_number_only(tmp_path: Path) -> None:
    counts = {name: sum(kind_of(number) == name for number in range(MANY)) for name in KINDS}
    assert min(counts.values()) > 50
    spoilt = {Spoil(seed).json({"a": [1, 2.5, "text"], "b": {"c": None}}) for seed in range(200)}
    assert len(spoilt) > 100
    assert all(Spoil(5).bytes(bytes(range(200))) == Spoil(5).bytes(bytes(range(200))) for _ in range(3))
    made = [hostile.template("{{ a }}", random.Random(seed)) for seed in range(200)]
    assert len(set(made)) > 150
    assert made == [hostile.template("{{ a }}", random.Random(seed)) for seed in range(200)]
