from __future__ import annotations

from pathlib import Path

import pytest

from penstock.storage.temperature import disk_temperature


def sensor(sys: Path, place: str, text: str) -> None:
    path = sys / "block" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "place",
    [
        "nvme0n1/device/hwmon3/temp1_input",
        "nvme0n1/device/hwmon/hwmon3/temp1_input",
        "nvme0n1/device/nvme0/hwmon3/temp1_input",
        "nvme0n1/device/nvme0/hwmon/hwmon3/temp1_input",
    ],
)
def test_the_composite_sensor_wherever_the_kernel_puts_it(tmp_path: Path, place: str) -> None:
    sensor(tmp_path, place, "41850\n")
    sensor(tmp_path, place.replace("temp1", "temp2"), "99000\n")
    assert disk_temperature(["nvme0n1"], tmp_path) == 41.85


def test_the_warmest_of_several_and_none_where_none_tells(tmp_path: Path) -> None:
    for name, text in (("nvme0n1", "38000"), ("sda", "44000\n"), ("sdb", "warm"), ("vda", "")):
        sensor(tmp_path, f"{name}/device/hwmon/hwmon1/temp1_input", text)
    assert disk_temperature(["nvme0n1", "sda", "sdb", "sdc"], tmp_path) == 44.0
    assert disk_temperature(["sdb", "vda", "sdc"], tmp_path) is None
    assert disk_temperature([], tmp_path) is None
