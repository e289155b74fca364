"""Learning rates over the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers.optimization import get_wsd_schedule

from penstock.engine.config import TrainConfig
from penstock.engine.optim.lr import learning_rate
from penstock.storage.errors import UserError


def rates(**changes: Any) -> list[float]:
    train = TrainConfig(lr=1.0, **changes)
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_wsd_by_hand() -> None:
    settings = {"warmup_steps": 2, "lr_schedule": "wsd", "decay_steps": 4, "min_lr_ratio": 0.2}
    found = rates(steps=8, **settings)
    falling = [0.2 + 0.8 * (1 - share**0.5) for share in (0.25, 0.5, 0.75, 1)]
    assert found == pytest.approx([0.5, 1, 1, 1, *falling])
    assert rates(steps=20, **settings)[:4] == found[:4], "a run that is made longer goes on"


@pytest.mark.parametrize(
    ("changes", "peaks"),
    [
        ({"steps": 100}, 90),
        ({"steps": 5}, 4),
        ({"steps": 100, "warmup_steps": 100}, 1),
        ({"steps": 100, "warmup_steps": 4, "decay_steps": 96}, 1),
    ],
    ids=str,
)
def test_how_long_wsd_stays_at_the_peak(changes: dict[str, int], peaks: int) -> None:
    found = rates(lr_schedule="wsd", min_lr_ratio=0.0, **changes)
    assert found.count(1.0) == peaks
    assert found[-1] == (1.0 if changes.get("warmup_steps") == 100 else 0.0)


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_wsd_is_that_of_transformers(least: float) -> None:
    """Whose steps are counted from 0, and whose warm-up begins at the least rate."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    expected = get_wsd_schedule(
        optimizer, num_warmup_steps=5, num_decay_steps=7, num_training_steps=30, decay_type="1-sqrt", min_lr_ratio=least
    ).lr_lambdas[0]
    found = rates(steps=30, warmup_steps=5, lr_schedule="wsd", decay_steps=7, min_lr_ratio=least)
    first = 6 if least else 1
    assert found[first - 1 :] == pytest.approx([expected(step) for step in range(first, 31)])


@pytest.mark.long
def test_a_wsd_run_goes_on_as_if_it_had_been_longer_from_the_start(tmp_path: Path) -> None:
    def run(folder: str, steps: int, *, stop: int | None = None, resume: bool = False) -> list[tuple[float, float]]:
        observer = tiny.Silent(stop_after=stop)
        train = tiny.training(steps=steps, lr_schedule="wsd", decay_steps=2, warmup_steps=1)
        sections = {"train": train, "model": tiny.model(num_layers=1), "storage": tiny.storage()}
        tiny.train_run(tmp_path / folder, observer, resume=resume, **sections)
        return [(m.loss, m.lr) for m in observer.metrics]

    whole = run("whole", 5)
    assert [lr for _, lr in whole[:3]] == [1e-2] * 3
    assert whole[4][1] < whole[3][1] < 1e-2
    assert run("made longer", 4, stop=2) + run("made longer", 5, resume=True) == whole
    assert tiny.digest_of(tmp_path / "made longer") == tiny.digest_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decay_steps": 5}, r"train\.decay_steps: 5 is only used with train\.lr_schedule=wsd, but that is cosine"),
        ({"decay_steps": 0, "lr_schedule": "wsd"}, r"train\.decay_steps: 0 must be at least 1"),
        (
            {"decay_steps": 96, "lr_schedule": "wsd", "warmup_steps": 5},
            r"train\.decay_steps: 96 exceeds the 95 steps that remain of train\.steps after",
        ),
        ({"layer_lr_decay": 0.0}, r"train\.layer_lr_decay: 0\.0 must be above 0, at most 1"),
        ({"layer_lr_decay": 1.1}, r"train\.layer_lr_decay: 1\.1 must be above 0"),
        ({"lr_groups": {"*norm*": -1.0}}, r"train\.lr_groups: the factor of '\*norm\*' is -1\.0; give 0 or more"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TrainConfig(**changes)
