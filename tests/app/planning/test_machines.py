"""The machines to choose from: this one first, with what is known of it, then every preset; and `penstock probe`, which
keeps this one's profile where plans look for it, and prints it."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_process import refusal
from msgspec.structs import replace

from penstock.app.cli.main import main
from penstock.app.planning.machines import machine_infos, profile_info, this_machine_info
from penstock.app.planning.probe import machine_table
from penstock.engine.machine import probe as engine_probe
from penstock.engine.machine.presets import GENERIC, PRESETS, profile_path, stored_machine
from penstock.engine.machine.probe_compute import Sizes
from penstock.engine.machine.profile import load_machine
from penstock.storage.files.errors import UserError

TINY = Sizes(
    rows=16, matrices=((32, 16),), heads=2, kv_heads=1, head_dims=(16,), chunks=(16,), earlier_tokens=16,
    copy_bytes=1 << 16, pass_bytes=1 << 16, state_numel=1 << 12, compiled=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to probe, with small operands."""
    monkeypatch.setattr(engine_probe, "CPU_SIZES", TINY)
    monkeypatch.setattr(engine_probe, "GPU_SIZES", TINY)
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def test_every_preset_is_there_after_this_machine() -> None:
    infos = machine_infos()
    assert [info.name for info in infos] == ["", *PRESETS]
    assert infos[1].text == "GH200 480GB 94.1 GiB, 480 GiB RAM, 2 drives 25.1 TiB"
    assert all("data sheets" in info.source for info in infos[1:])


def test_this_machine_says_whether_it_was_measured_and_a_profile_file_is_one_too(tmp_path: Path) -> None:
    assert "penstock probe" in this_machine_info().source
    profile_path().parent.mkdir(parents=True)
    mine, lab = replace(GENERIC, name="mine", source="measured 2026-11-21"), replace(GENERIC, name="lab")
    profile_path().write_text(json.dumps(mine.to_json()))
    info = this_machine_info()
    assert (info.name, info.title, info.source) == ("", "this machine", "measured 2026-11-21")
    assert info.text.startswith("no GPU, 11.0 GiB RAM")
    profile_path().write_text("{")
    assert "cannot be used" in this_machine_info().source
    path = tmp_path / "lab.json"
    path.write_text(json.dumps(lab.to_json()))
    assert (profile_info(path).name, profile_info(path).title) == (str(path), "lab")
    with pytest.raises(UserError, match=r"nothing\.json"):
        profile_info(tmp_path / "nothing.json")


def test_keeps_the_profile_and_prints_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(tiny), "--seconds", "1", "--json"]) == 0
    captured, stored = capsys.readouterr(), stored_machine()
    assert stored is not None
    assert json.loads(json.dumps(stored.to_json())) == json.loads(captured.out)
    assert stored.drives[0].path == str(tiny)
    assert f"writes up to 1.07 GB to {tiny}" in captured.err
    assert "measuring" in captured.err
    assert list(tiny.iterdir()) == []


def test_a_terminal_is_asked(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Mock(return_value=False)
    monkeypatch.setattr("typer.confirm", asks)
    monkeypatch.setattr(engine_probe, "probe_drives", lambda *args, **options: pytest.fail("measured"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["probe", str(tiny), "--size", "2GB"]) == 1
    assert f"measuring takes about 50s and writes up to 2 GB to {tiny}" in asks.call_args.args[0]
    assert not profile_path().exists()
    for size in ("1MB", "much"):
        assert "--size" in refusal(capsys, "probe", str(tiny), "--yes", "--size", size)
    asks.assert_called_once()


def test_save_keeps_it_elsewhere(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "mine.json"
    assert main(["probe", str(tiny), "--seconds", "1", "--save", str(file)]) == 0
    assert load_machine(file).drives[0].path == str(tiny)
    assert not profile_path().exists()
    printed = capsys.readouterr().out
    assert "TFLOP/s" in printed
    assert "saved to" in printed
    for name, machine in PRESETS.items():  # the table shows any machine
        assert machine_table(machine).row_count >= 11 + len(machine.drives), name


def test_bad_input(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    assert "listed twice" in refusal(capsys, "probe", ".", ".")
    assert "is a folder" in refusal(capsys, "probe", ".", "--save", ".")
    assert list(tiny.iterdir()) == []
    assert not profile_path().exists()
