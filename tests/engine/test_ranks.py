"""Several ranks train one run together: the same bits on any number of them, on all tiers, whatever the delays; and a
run goes on with another number."""

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
from ranked import ranked

from penstock.engine.ranks.ranks import Ranks
from penstock.storage.generations.store import NvmeStore

TIERS = tiny.TIERS[1:]
"""What is trained is not on the GPU."""


def training(**changes: Any) -> tiny.TrainConfig:
    return tiny.training(**{"global_batch_size": 6, "replicas": 6, "steps": 8, "chunk_tokens": 48} | changes)


def trained(ranks: Ranks, folder: Path, steps: int, seed: str, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of so many steps, the last of which is committed; ops are delayed at random."""
    with tiny.session(folder, ranks=ranks, **settings) as session:
        tiny.delay(session, random.Random(f"{seed} {ranks.rank}"))
        metrics = tiny.steps(session, steps)
        ranks.meet()  # nobody leaves while others need it
        return [(m.loss, m.grad_norm) for m in metrics]


def run(folder: Path, count: int, steps: int = 3, **settings: Any) -> tuple[str, list[tuple[float, float]]]:
    """The digest of the generation behind so many steps on `count` ranks, and what they report, all the same."""
    first, *others = ranked(count, trained, folder, steps, f"{count} {steps}", settings)
    assert all(each == first for each in others), "every rank knows loss and norm of the whole step"
    store = NvmeStore.open(folder / "state", read_only=True)
    try:
        return tiny.digest(store), first
    finally:
        store.close()


@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, tiers: tuple[Any, Any]) -> None:
    gpu, ram = tiers
    found = {run(tmp_path / str(n), n, t=training(), gpu=gpu, ram=ram)[0] for n in (1, 2, 3, 6)}
    assert len(found) == 1


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    straight, _ = run(tmp_path / "straight", 1, 8, t=training())
    for count in (1, 2, 3, 1):
        digest, _ = run(tmp_path / "run", count, 2, t=training())
    assert digest == straight
