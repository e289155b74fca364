"""What is known of a batch on the host, and that no op on a lane of the GPU asks the GPU for it."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.plan.problem import BYTES_PER_TOKEN
from penstock.engine.runtime.batch import pack, unpack
from penstock.engine.runtime.executor import GPU_LANES
from penstock.engine.schedule.actions import NORM
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step

ASKS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "is_nonzero", "equal", "item"}
"""Operators whose result, or its size, is only known once the device has computed it."""
FROM_HOST = {"lift_fresh"}
"""What torch.tensor(data) calls: on CUDA a copy from pageable memory."""


class Strict(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ASKS | FROM_HOST, f"{name} waits for the device"
        if name in ("index", "index_put_", "_index_put_impl_"):
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            assert all(i.dtype == torch.int64 for i in indices), "a boolean index waits for the device"
        return func(*args, **(kwargs or {}))


def watch_gpu_lanes(session: Session) -> set[str]:
    """Let ops of GPU lanes run in `Strict`; the actions that ran so."""
    perform, seen = session.runtime.perform, set()

    def strict(op: Op) -> Any:
        if op.lane not in GPU_LANES:
            return perform(op)
        seen.add(op.action.name)
        with Strict():
            return perform(op)

    session.executor._perform = strict
    return seen


@pytest.mark.parametrize(
    ("gpu", "model_type"),
    [
        (tiny.FLOOR, "qwen3_moe"),
        *(pytest.param(gpu, "gemma3_text", marks=pytest.mark.long) for gpu in (tiny.FLOOR, "1GiB")),
    ],
)
def test_no_op_of_a_gpu_lane_waits_for_the_gpu(tmp_path: Path, gpu: str, model_type: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    m = tiny.model(model_type=model_type, overrides={"pad_token_id": 3} | (experts if "moe" in model_type else {}))
    with tiny.session(tmp_path, m=m, gpu=gpu) as session:
        seen = watch_gpu_lanes(session)
        tiny.steps(session, 1)
    assert seen >= {"embed_forward", "layer_forward", "head", "layer_backward", "embed_backward", "norm"}


def test_the_watch_sees_what_waits(tmp_path: Path) -> None:
    with tiny.session(tmp_path) as session:
        norm, losses = session.runtime.handlers[NORM], session.runtime._block_ops._losses
        session.runtime.handlers[NORM] = lambda op: norm(op) if float(losses[0]) > 0 else None
        watch_gpu_lanes(session)
        with pytest.raises(AssertionError, match="_local_scalar_dense waits for the device"):
            train_step(session)


def test_chunk_tokens_are_those_of_the_labels_and_ids() -> None:
    ids, labels = torch.tensor([7, 2, 7, 9, 2]), torch.tensor([2, -100, 9, -100, -100])
    tokens = ChunkTokens.of(ids, labels, torch.tensor([0, 1, 0, 1, 2]))
    assert tokens.rows.tolist() == [0, 2]
    assert tokens.labels.tolist() == [2, 9]
    assert tokens.distinct.tolist() == [2, 7, 9]
    assert torch.equal(tokens.distinct[tokens.places], ids)
    assert tokens.weights.tolist() == [1.0, 1.0]
    weighted = ChunkTokens.of(ids, torch.tensor([2, 7, 9, 9, -100]), ids, torch.tensor([0.1, 0, 2, 0.5, 3]))
    assert weighted.rows.tolist() == [0, 2, 3], "a label of weight 0 is no target"
    assert torch.equal(weighted.weights, torch.tensor([0.1, 2, 0.5]).double())
    flat = torch.empty(100, dtype=torch.int64)
    used = pack(weighted.tensors(), flat)
    assert used * 8 == sum(t.numel() for t in weighted.tensors()) * 8 <= 5 * BYTES_PER_TOKEN
    there = unpack(flat, [t.numel() for t in weighted.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(there, weighted.tensors(), strict=True))
    assert all(t.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for t in there)
    back = ChunkTokens.of_tensors(there)
    assert torch.equal(back.weights, weighted.weights)
    assert torch.equal(back.labels, weighted.labels)
    empty = ChunkTokens.of(ids, torch.full((5,), -100), torch.arange(5))
    assert empty.rows.numel() == empty.labels.numel() == 0
