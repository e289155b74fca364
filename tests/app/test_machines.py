"""The machines to choose from: this one first, with what is known of it, then every preset."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.app.machines import machine_infos, profile_info, this_machine_info
from penstock.engine.machine.presets import GENERIC, PRESETS, profile_path
from penstock.engine.machine.profile import Machine
from penstock.storage.errors import UserError


def write(path: Path, machine: Machine) -> None:
    path.write_text(json.dumps(machine.to_json()), encoding="utf-8")


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_every_preset_is_there_after_this_machine() -> None:
    infos = machine_infos()
    assert [info.name for info in infos] == ["", *PRESETS]
    assert infos[1].text == "GH200 480GB 94.1 GiB, 480 GiB RAM, 2 drives 25.1 TiB"
    assert all("data sheets" in info.source for info in infos[1:])


def test_this_machine_says_whether_it_was_measured_and_a_profile_file_is_one_too(tmp_path: Path) -> None:
    assert "penstock probe" in this_machine_info().source
    profile_path().parent.mkdir(parents=True)
    write(profile_path(), replace(GENERIC, name="mine", source="measured 2026-11-21"))
    info = this_machine_info()
    assert (info.name, info.title, info.source) == ("", "this machine", "measured 2026-11-21")
    assert info.text.startswith("no GPU, 11.0 GiB RAM")
    profile_path().write_text("{")
    assert "cannot be used" in this_machine_info().source
    path = tmp_path / "lab.json"
    write(path, replace(GENERIC, name="lab"))
    assert (profile_info(path).name, profile_info(path).title) == (str(path), "lab")
    with pytest.raises(UserError, match=r"nothing\.json"):
        profile_info(tmp_path / "nothing.json")
