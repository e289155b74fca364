"""The tools are executables on PATH that print what smartctl and nvme-cli print; the drives are named, not there."""

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.storage import wear
from penstock.storage.filesystem import Device
from penstock.storage.temperature import disk_temperature
from penstock.storage.wear import Wear, percentage_used, wear_of

NVME_LOG = {"critical_warning": 0, "percentage_used": 3, "data_units_read": 91234567, "data_units_written": 123456789}
SMARTCTL_NVME = {
    "device": {"name": "/dev/nvme0n1", "type": "nvme", "protocol": "NVMe"},
    "nvme_smart_health_information_log": NVME_LOG,
    "endurance_used": {"current_percent": 3},
}
SMARTCTL_SATA = {
    "device": {"name": "/dev/sda", "type": "sat", "protocol": "ATA"},
    "logical_block_size": 512,
    "endurance_used": {"current_percent": 12},
    "ata_smart_attributes": {
        "table": [
            {"id": 9, "name": "Power_On_Hours", "raw": {"value": 8123, "string": "8123"}},
            {"id": 241, "name": "Total_LBAs_Written", "raw": {"value": 2000000, "string": "2000000"}},
        ]
    },
}
SMARTCTL_REFUSED = {"smartctl": {"exit_status": 2, "messages": [{"string": "Smartctl open device: Permission denied"}]}}
NVME_CLI = {"critical_warning": 0, "temperature": 314, "percent_used": 104, "data_units_written": "1,000"}

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put an executable on an otherwise empty PATH that prints `answer`, after `seconds`, and exits with `code`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setattr(wear, "device_of", lambda folder: Device("fs", ("nvme0n1",), "ext4", False, None))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(wear, "_EXTRA_PATH", str(tools))

    def install(tool: str, answer: object, *, code: int = 0, seconds: float = 0) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        script = tools / tool
        calls = f'echo "$@" >> {tmp_path}/{tool}.calls'
        script.write_text(f"#!/bin/sh\n{calls}\n/bin/sleep {seconds}\necho {shlex.quote(text)}\nexit {code}\n")
        script.chmod(0o755)

    return install


REFUSED_BUT_NVME = {"smartctl": (SMARTCTL_REFUSED, 2), "nvme": (NVME_CLI, 0)}
PAST_ITS_LIFE = Wear("nvme0n1", 104.0, 1000 * 512_000)


@pytest.mark.parametrize(
    ("names", "answers", "expected"),
    [
        (["nvme0n1"], {}, []),
        ([], {"smartctl": (SMARTCTL_NVME, 0)}, []),
        (["nvme0n1"], {"smartctl": (SMARTCTL_NVME, 0)}, [Wear("nvme0n1", 3.0, 123456789 * 512_000)]),  # 63.2 TB
        (["nvme0n1"], {"smartctl": (SMARTCTL_NVME, 8)}, [Wear("nvme0n1", 3.0, 123456789 * 512_000)]),  # it is worn
        (["sda"], {"smartctl": (SMARTCTL_SATA, 0)}, [Wear("sda", 12.0, 2000000 * 512)]),
        (["nvme0n1"], REFUSED_BUT_NVME, [PAST_ITS_LIFE]),
        (["sda", "nvme0n1"], REFUSED_BUT_NVME, [PAST_ITS_LIFE]),
    ],
)
def test_what_the_tools_say(
    tmp_path: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    answers: dict[str, tuple[object, int]],
    expected: list[Wear],
) -> None:
    monkeypatch.setattr(wear, "device_of", lambda folder: Device("fs", tuple(names), "ext4", False, None))
    for tool, (answer, code) in answers.items():
        install(tool, answer, code=code)
    assert wear_of(tmp_path) == expected
    calls = {file.stem: file.read_text().splitlines() for file in tmp_path.glob("*.calls")}
    assert calls.get("smartctl", []) == ([f"-j -a /dev/{name}" for name in names] if answers else [])
    assert calls.get("nvme", []) == ["smart-log /dev/nvme0n1 -o json"] * ("nvme" in answers)
    assert percentage_used(tmp_path) == (expected[0].percentage_used if expected else None)


@pytest.mark.parametrize(
    "answer",
    ["", "not json", "[1]", "null", SMARTCTL_REFUSED, {"nvme_smart_health_information_log": "soon"}]
    + [{"nvme_smart_health_information_log": {"percentage_used": value}} for value in (None, "n/a", True, [3])]
    + [{"ata_smart_attributes": {"table": [7, {"name": "Total_LBAs_Written"}]}}],
)
def test_odd_answers_are_absent(tmp_path: Path, install: Install, answer: object) -> None:
    install("smartctl", answer, code=1)
    install("nvme", answer, code=1)
    assert wear_of(tmp_path) == []


def test_a_drive_that_hangs_costs_a_moment(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear, "_TIMEOUT_S", 0.2)
    install("smartctl", SMARTCTL_NVME, seconds=60)
    start = time.monotonic()
    assert percentage_used(tmp_path) is None
    assert time.monotonic() - start < 30


def sensor(sys: Path, place: str, text: str) -> None:
    path = sys / "block" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("place", ["hwmon3", "hwmon/hwmon3", "nvme0/hwmon3", "nvme0/hwmon/hwmon3"])
def test_the_composite_sensor_wherever_the_kernel_puts_it(tmp_path: Path, place: str) -> None:
    sensor(tmp_path, f"nvme0n1/device/{place}/temp1_input", "41850\n")
    sensor(tmp_path, f"nvme0n1/device/{place}/temp2_input", "99000\n")
    assert disk_temperature(["nvme0n1"], tmp_path) == 41.85


def test_the_warmest_of_several_and_none_where_none_tells(tmp_path: Path) -> None:
    for name, text in (("nvme0n1", "38000"), ("sda", "44000\n"), ("sdb", "warm"), ("vda", "")):
        sensor(tmp_path, f"{name}/device/hwmon/hwmon1/temp1_input", text)
    assert disk_temperature(["nvme0n1", "sda", "sdb", "sdc"], tmp_path) == 44.0
    assert disk_temperature(["sdb", "vda", "sdc"], tmp_path) is None
    assert disk_temperature([], tmp_path) is None
