"""Preference training on the emulated GPU: the losses of the CPU, no races, and the same bits whatever the delays."""

from pathlib import Path
from typing import Any

import comparisons
import pytest
import tiny
from computes import emulator

STEPS, SEEDS, DELAY_US = 3, range(1, 7), 200


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_it_trains_as_on_the_cpu(tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = comparisons.verdicts(12) if objective == "kto" else comparisons.pairs(12)
    path = comparisons.write(tmp_path / "rows.jsonl", rows)

    def train(device: str, seed: int = 0) -> tuple[list[tuple[float, float, float]], str]:
        options: dict[str, Any] = {"objective": objective, "steps": STEPS, "micro_batch_size": 2, "device": device}
        t = tiny.training(**options, global_batch_size=4, deterministic=True)
        folder, observer = tmp_path / f"{device}-{seed}", tiny.Silent()
        monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}-cache")  # each makes the reference's passes
        with emulator.delays(seed, DELAY_US if seed else 0):
            tiny.train_run(
                folder,
                observer,
                model=tiny.model(vocab_size=None),
                data=comparisons.data(path, sequence_length=192),
                train=t,
            )
        steps = [(m.loss, m.measured["rewards/chosen"], m.measured["entropy"]) for m in observer.metrics]
        return steps, tiny.digest_of(folder)

    expected, _ = train("cpu")
    with emulator.races() as races:
        found = train("cuda")
    assert races == []
    for step, (loss, reward, entropy) in zip(found[0], expected, strict=True):
        assert step[0] == pytest.approx(loss, rel=1e-5)
        assert step[1] == pytest.approx(reward, rel=1e-3, abs=1e-4)
        assert step[2] == pytest.approx(entropy, rel=1e-4)
    assert all(train("cuda", seed) == found for seed in SEEDS)
