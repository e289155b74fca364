"""A vision tower that is trained, on the emulated GPU: the losses of the CPU, no races, and the same bits whatever the
delays."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from computes import emulator
from image_models import make_image_model
from image_runs import rows, sections

STEPS, SEEDS, DELAY_US = 3, range(1, 7), 200


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_it_trains_as_on_the_cpu(tmp_path: Path, family: str) -> None:
    origin, path = make_image_model(tmp_path / family, family), rows(tmp_path)

    def train(device: str, seed: int = 0) -> tuple[list[float], str]:
        run, folder = sections(origin, path, STEPS, "all"), tmp_path / f"{device}-{seed}"
        run["train"].device, run["train"].deterministic = device, True
        observer: Any = tiny.Silent()
        with emulator.delays(seed, DELAY_US if seed else 0):
            tiny.train_run(folder, observer, **run)
        return [m.loss for m in observer.metrics], tiny.digest_of(folder)

    losses, _ = train("cpu")
    with emulator.races() as races:
        found = train("cuda")
    assert races == []
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert all(train("cuda", seed) == found for seed in SEEDS)
