"""What stops a run says what failed and where, and leaves the last generation as it was."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from engine.ops import Op
from engine.runtime import DivergedError, first_not_finite
from engine.train import train_step
from storage.nvme import NvmeStore

NAN = float("nan")


@pytest.mark.parametrize(
    ("action", "block", "index", "message"),
    [
        ("embed_forward", "embed", 2, "the output of block embed of chunk 2"),
        ("layer_forward", "layers.1", 4, r"the output of block layers.1 of chunk 4 \(micro-batch 1, tokens 16 to 32\)"),
        ("head", "head", 3, "the gradient of the input of block head of chunk 3"),
        ("layer_backward", "layers.2", 1, "the gradient of the input of block layers.2 of chunk 1"),
    ],
)
def test_a_kernel_that_returns_nan_is_named(tmp_path: Path, action: str, block: str, index: int, message: str) -> None:
    """NaN in one element of one op's result, which then spreads; clip names where it came up."""
    with tiny.session(tmp_path) as session:
        train_step(session)
        session.finish()
        before = tiny.digest(session.store)
        method = session.runtime._actions[action]

        def poisoned(op: Op) -> None:
            method(op)
            if (op.block, op.index) == (block, index):
                session.gpu.hidden[op.slots["out"]][3, 5] = NAN

        session.runtime._actions[action] = poisoned
        with pytest.raises(DivergedError, match=rf"step 2: {message}.* is not finite; the last committed"):
            train_step(session)
    with closing(NvmeStore.open(tmp_path / "state")) as store:
        assert tiny.digest(store) == before


def test_the_first_in_the_order_of_the_passes_is_named(tmp_path: Path) -> None:
    with tiny.session(tmp_path) as session:
        plan = session.plan

    def name(**places: tuple[int, ...]) -> str | None:
        parts = {
            "losses": torch.zeros(len(plan.chunks)),
            "squares": torch.zeros(len(plan.buffers)),
            "marks": torch.zeros(2, len(plan.blocks), len(plan.chunks)),
        }
        for part, place in places.items():
            target: Tensor = parts[part]
            target[place] = float("inf")
        found = first_not_finite(plan, **parts)
        return found and found.split(" (")[0]

    assert name() is None
    assert name(squares=(1,)) == "the gradient of block layers.0"
    assert name(squares=(1,), marks=(1, 2, 0)) == "the gradient of the input of block layers.1 of chunk 0"
    assert name(losses=(2,), marks=(1, 2, 0)) == "the loss of chunk 2"
    assert name(losses=(2,), marks=(0, 3, 1)) == "the output of block layers.2 of chunk 1"
    both = torch.zeros(2, len(plan.blocks), len(plan.chunks))
    both[0, 1, 3] = both[0, 2, 0] = both[1, 1, 0] = both[1, 2, 1] = both[1, 2, 4] = NAN
    zeros = torch.zeros(len(plan.chunks)), torch.zeros(len(plan.buffers))
    assert str(first_not_finite(plan, *zeros, both)).startswith("the output of block layers.0 of chunk 3 ")
    both[0] = 0
    assert str(first_not_finite(plan, *zeros, both)).startswith(
        "the gradient of the input of block layers.1 of chunk 4 "
    )
