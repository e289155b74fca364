"""`penstock probe`: keeps the profile where plans look for it, and prints it."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_process import refusal

from penstock.app.cli import main
from penstock.app.probe import machine_table
from penstock.engine.machine import probe as engine_probe
from penstock.engine.machine.presets import PRESETS, profile_path, stored_machine
from penstock.engine.machine.probe_compute import Sizes
from penstock.engine.machine.profile import load_machine

TINY = Sizes(
    rows=16, matrices=((32, 16),), heads=2, kv_heads=1, head_dims=(16,), chunks=(16,), earlier_tokens=16,
    copy_bytes=1 << 16, pass_bytes=1 << 16, state_numel=1 << 12, compiled=False,
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small operands, and a home of its own."""
    monkeypatch.setattr(engine_probe, "CPU_SIZES", TINY)
    monkeypatch.setattr(engine_probe, "GPU_SIZES", TINY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "drive"
    folder.mkdir()
    return folder


def test_keeps_the_profile_and_prints_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(tiny), "--seconds", "1", "--json"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    stored = stored_machine()
    assert stored is not None
    assert json.loads(json.dumps(stored.to_json())) == printed
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
    output = capsys.readouterr().out
    assert "TFLOP/s" in output
    assert "saved to" in output
    for name, machine in PRESETS.items():  # the table shows any machine
        assert machine_table(machine).row_count >= 11 + len(machine.drives), name


def test_bad_input(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    for arguments, message in (
        (["missing"], "no such folder"),
        ([".", "."], "listed twice"),
        ([".", "--save", "."], "is a folder"),
    ):
        assert message in refusal(capsys, "probe", *arguments)
    assert list(tiny.iterdir()) == []
    assert not profile_path().exists()
