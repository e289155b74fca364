"""Folders that appear whole or not at all, whatever is in their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from obstacles import plant

from penstock.storage.disk import build_folder
from penstock.storage.errors import UserError


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for content in ("old", "new"):
        with build_folder(folder) as temporary:
            (temporary / content).write_text("")
    assert os.listdir(folder) == ["new"]
    with pytest.raises(KeyError), build_folder(folder):
        raise KeyError
    assert os.listdir(tmp_path) == ["made"]
    assert os.listdir(folder) == ["new"]


@pytest.mark.parametrize("where", ["made", "made.building-PID"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path, where: str, kind: str) -> None:
    where = where.replace("PID", str(os.getpid()))
    target, place = tmp_path / "target", tmp_path / "run" / where
    place.parent.mkdir()
    target.mkdir()
    (target / "thesis.tex").write_text("not ours")
    plant(place, kind, target)
    refusal = f"{where}: is where a folder has to be made; move it away"
    with pytest.raises(UserError, match=refusal), build_folder(place.with_name("made")):
        pass
    assert os.path.lexists(place)
    assert os.listdir(target) == ["thesis.tex"]
    assert not (tmp_path / "nothing").exists()
