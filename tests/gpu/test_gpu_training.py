"""Training on CUDA: lanes as streams give what the same steps give on CPU, on any tiers, however they are delayed."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from penstock.engine.machine.affinity import place_threads
from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.runtime.executor import GPU_LANES
from penstock.engine.runtime.failures import explain
from penstock.engine.schedule.actions import HEAD
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.tier.manifest import Manifest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")


def steps(session: Session, count: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `count` steps, then the commit."""
    metrics = tiny.steps(session, count)
    return [m.loss for m in metrics], [m.grad_norm for m in metrics]


@pytest.mark.parametrize(("gpu", "ram"), tiny.TIERS)
def test_float32_steps_are_those_of_the_cpu(tmp_path: Path, gpu: str | int, ram: str | int) -> None:
    with tiny.session(tmp_path / "cpu", gpu=gpu, ram=ram) as session:
        losses, norms = steps(session, 4)
    with tiny.session(tmp_path / "cuda", gpu=gpu, ram=ram, device=CUDA) as session:
        cuda_losses, cuda_norms = steps(session, 4)
        assert session.ram.arena.pinned
    assert cuda_losses == pytest.approx(losses, rel=1e-4)
    assert cuda_norms == pytest.approx(norms, rel=1e-3)


def delay(session: Session, chance: random.Random) -> None:
    """Idle time in front of ops: on the host for host lanes, on the stream for GPU lanes."""

    def idle(op: Op) -> None:
        if chance.random() < 0.2:
            if op.lane in GPU_LANES:
                torch.cuda._sleep(int(chance.random() * 5_000_000))
            else:
                time.sleep(chance.random() * 2e-3)

    tiny.before_ops(session, idle)


@pytest.mark.parametrize(("gpu", "ram"), tiny.TIERS)
def test_delays_on_streams_and_hosts_change_nothing(tmp_path: Path, gpu: str | int, ram: str | int) -> None:
    """Not to the bit: without deterministic kernels a gradient may differ in its last one."""
    results = []
    for seed in range(10):
        with tiny.session(tmp_path / "run", gpu=gpu, ram=ram, device=CUDA) as session:
            if seed:
                delay(session, random.Random(seed))
            metrics = [train_step(session) for _ in range(2)]
            results.append([m.loss for m in metrics] + [m.grad_norm for m in metrics])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_layers_of_different_widths_share_a_window(tmp_path: Path) -> None:
    """A chunk's keys and values lie elsewhere in it for each width; a micro-batch of one chunk fills it alone."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    overrides = {"layer_types": kinds, "sliding_window": 20, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    sections = {"m": tiny.model(model_type="gemma4_text", num_layers=4, overrides=overrides)}
    sections |= {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
    with tiny.session(tmp_path / "cpu", t=tiny.training(chunk_tokens=4096), **sections) as session:
        assert session.plan.window_chunks == 1
        losses, norms = steps(session, 2)
    for seed in range(3):
        with tiny.session(tmp_path / "run", t=tiny.training(chunk_tokens=16), device=CUDA, **sections) as session:
            assert session.plan.window_chunks > 1
            assert len({block.kv_bytes_per_token for block in session.plan.blocks if block.attends}) == 2
            delay(session, random.Random(seed))
            cuda_losses, cuda_norms = steps(session, 2)
        assert cuda_losses == pytest.approx(losses, rel=1e-4)
        assert cuda_norms == pytest.approx(norms, rel=1e-3)
        shutil.rmtree(tmp_path / "run")


def test_bfloat16_steps_are_float32s_but_for_rounding(tmp_path: Path) -> None:
    with tiny.session(tmp_path / "cpu", gpu=tiny.FLOOR, ram="1GiB") as session:
        losses, norms = steps(session, 4)
    t = tiny.training(compute_dtype="bfloat16")
    with tiny.session(tmp_path / "cuda", t=t, gpu=tiny.FLOOR, ram="1GiB", device=CUDA) as session:
        cuda_losses, cuda_norms = steps(session, 4)
        spans = session.executor.take_spans()
    assert cuda_losses == pytest.approx(losses, rel=2**-8)
    # Later ones are of other weights: AdamW's first updates follow the signs of gradients.
    assert cuda_norms[0] == pytest.approx(norms[0], rel=2**-8)
    assert {span.lane for span in spans} >= {"h2d", "compute", "d2h", "optimizer"}
    assert all(span.end_s >= span.start_s for span in spans)


def final_state(folder: Path, dtype: str, *, overlapped: bool = True) -> tuple[str, list[float]]:
    """A digest of the state after four steps on CUDA, and the losses."""
    t = tiny.training(deterministic=True, compute_dtype=dtype)
    losses = []
    with tiny.session(folder, t=t, gpu=tiny.FLOOR, device=CUDA) as session:
        for step in range(4):
            losses.append(train_step(session).loss)
            if not overlapped and step < 3:
                tiny.settle(session)
        session.finish()
        return tiny.digest(session.store), losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_runs_are_equal_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """The optimizer under the next forward changes none either."""
    first = final_state(tmp_path / "first", dtype)
    assert final_state(tmp_path / "second", dtype) == first
    assert not torch.are_deterministic_algorithms_enabled()
    if dtype == "float32":
        assert final_state(tmp_path / "settled", dtype, overlapped=False)[0] == first[0]


def test_a_run_that_goes_on_twice_takes_up_the_same_kernels(tmp_path: Path) -> None:
    """Which were timed once; nothing is chosen in its steps."""
    records = []
    for part, stop in (("first", 1), ("again", None), ("copy", None)):
        folder = tmp_path / ("copy" if part == "copy" else "run")
        observer = tiny.Silent(stop)
        tiny.train_run(
            folder,
            observer,
            resume=part != "first",
            model=tiny.model(num_layers=1),
            train=tiny.training(steps=3, device="cuda", compute_dtype="bfloat16"),
        )
        records.append(Manifest.read(folder / "state").meta["kernels"])
        assert not [line for line in observer.messages if "chosen anew" in line]
        if part == "first":
            assert any(kind["tflops"] for kind in observer.plan["attention"])
            shutil.copytree(folder, tmp_path / "copy")
        else:
            assert not any(kind["tflops"] for kind in observer.plan["attention"])
    first, *others = records
    assert first["rankings"]
    assert first["products"]
    assert others == [first, first]


def test_no_compute_op_waits_for_the_gpu(tmp_path: Path) -> None:
    """Once everything is warm."""
    with tiny.session(tmp_path, t=tiny.training(steps=1), gpu=tiny.FLOOR, device=CUDA) as session:
        train_step(session)
        tiny.refuse_waits(session)
        for _ in range(2):
            train_step(session)


def test_the_budget_is_enforced_and_what_breaks_it_is_explained(tmp_path: Path) -> None:
    """A kernel that asks for more than the plan foresaw: named, with its bytes, and nothing is lost."""
    with tiny.session(tmp_path, gpu="1GiB", device=CUDA) as session:
        tiny.steps(session, 1)
        before = tiny.digest(session.store)
        head = session.runtime.handlers[HEAD]

        def greedy(op: Op) -> Any:
            torch.empty(2**30, dtype=torch.uint8, device=CUDA)
            return head(op)

        session.runtime.handlers[HEAD] = greedy
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train_step(session)
        text = str(explain(caught.value, session.executor.failed_op, session.plan))
        assert "out of GPU memory despite the plan: op head head[5] (micro-batch 1, tokens 32 to 48) of step 2" in text
        assert "asked for 1024.00 MiB more" in text or "asked for 1.00 GiB more" in text
    assert tiny.digest_of(tmp_path) == before


def test_a_batch_arrives_whole(tmp_path: Path) -> None:
    with tiny.session(tmp_path, device=CUDA) as session:
        data = session.fetch()
        assert data.chunks.keys() == data.cut.keys() == {chunk.index for chunk in session.plan.chunks}
        for index, chunk in data.cut.items():
            there = data.chunks[index]
            batch, tokens = data.micro_batches[chunk.micro_batch], slice(chunk.start, chunk.end)
            here = ChunkTokens.of(batch.ids[tokens], batch.labels[tokens], batch.positions[tokens])
            for a, b in zip(there.tensors(), here.tensors(), strict=True):
                assert a.device.type == "cuda"
                assert torch.equal(a.cpu(), b)


def test_lanes_are_bound_near_the_gpu(tmp_path: Path) -> None:
    where = place_threads(CUDA)
    if where is None:
        pytest.skip("too few CPUs to share out")
    seen: dict[str, set[int]] = {}
    with tiny.session(tmp_path, gpu=tiny.FLOOR, device=CUDA) as session:

        def look(op: Op) -> None:
            seen[op.lane] = os.sched_getaffinity(0)

        tiny.before_ops(session, look)
        tiny.steps(session, 1)
    assert seen["compute"] == seen["h2d"] == where.lanes
    assert seen["optimizer"] == where.optimizer
