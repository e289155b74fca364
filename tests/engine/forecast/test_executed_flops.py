"""What a step really computes, counted op by op, is what the formula says: attention once forward and once backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from engine.attention import chunk as attention
from engine.forecast.flops import attention_flops, executed_flops, model_flops
from engine.schedule.ops import Op
from engine.session import Session
from engine.train import train_step

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted_step(session: Session) -> tuple[int, list[int]]:
    """FLOPs of the matrix products of one step, as torch counts them, and the lengths of its documents."""
    perform, counter = session.runtime.perform, ProductCounter()

    def counting(op: Op) -> Any:
        if op.lane != "compute":
            return perform(op)
        with counter:
            return perform(op)

    session.executor._perform = counting
    lengths = [n for m in session.loader.next_step() for n in m.lengths]
    session.loader.seek(session.store.meta["cursor"])
    train_step(session)
    return counter.flops, lengths


@pytest.mark.parametrize("kv_window", ["whole", "streamed"])
@pytest.mark.parametrize("checkpointing", ["full", "selective", "none"])
def test_a_step_computes_what_the_formula_says(tmp_path: Path, checkpointing: str, kv_window: str) -> None:
    t = tiny.training(steps=1, chunk_tokens=20, activation_checkpointing=checkpointing, kv_window=kv_window)
    with tiny.session(tmp_path, d=tiny.data(sequence_length=192), t=t) as session:
        attention.COUNTS.reset()
        products, lengths = counted_step(session)
        expected = executed_flops(session.spec, session.plan, lengths)
        spec = session.spec
    # The head's products count only tokens with a label, one fewer a document.
    head = expected.head_matmul * (sum(lengths) - len(lengths)) // sum(lengths)
    assert products == pytest.approx(expected.layer_matmul + head, rel=0.01)
    counts, forward = attention.COUNTS, attention_flops(spec, lengths)
    assert counts.forward_flops == forward * (2 if checkpointing == "full" else 1) == expected.attention_forward
    assert counts.backward_flops == expected.attention_backward == forward * 5 // 2
    if checkpointing == "none" and kv_window == "whole":
        whole = model_flops(spec, lengths) + forward // 2  # a flash backward computes q.k again
        assert products + counts.forward_flops + counts.backward_flops == pytest.approx(whole, rel=0.02)
