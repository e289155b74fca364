"""What a generation records of its run is looked at before a resumed run relies on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from storage.disk import publish
from storage.errors import UserError
from storage.manifest import FILE_NAME, Manifest


def run(folder: Path, *, resume: bool) -> tiny.Silent:
    observer = tiny.Silent(stop_after=None if resume else 2)
    tiny.train_run(folder, observer, resume=resume, train=tiny.training(steps=3), storage=tiny.storage())
    return observer


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    run(folder, resume=False)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": -1},
        {"step": "2"},
        {"step": True},
        {"step": 2.0},
        {"step": 10**30},
        {"tokens": None},
        {"tokens": [1]},
        {"recipe": 7},
        {"cursor": []},
        {"cursor": {}},
        {"cursor": {"piece": -1}},
        {"plan": {"chunk_tokens": "16"}},
        {"plan": {"chunk_tokens": 16, "of_a_later_version": 1}},
        {"plan": {"chunk_tokens": 16, "stages": True}},
        {"plan": {"chunk_tokens": 16, "gpu_first": 3}},
        {"plan": {"chunk_tokens": 16, "compiled": "no"}},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_one_message(stopped: Path, change: dict[str, Any]) -> None:
    """Its checksum is right: somebody made it, or a later version did."""
    root = stopped / "state"
    current = Manifest.read(root)
    meta = {name: value for name, value in (current.meta | change).items() if value is not None}
    publish(replace(current, meta=meta).prepare(root), root / FILE_NAME)
    try:
        with pytest.raises(UserError, match=r"does not say where|another version|record of the generation"):
            run(stopped, resume=True)
        assert Manifest.read(root).meta == meta
    finally:
        publish(current.prepare(root), root / FILE_NAME)


def test_the_record_as_it_was_is_gone_on_from(stopped: Path) -> None:
    assert [metrics.step for metrics in run(stopped, resume=True).metrics] == [3]
