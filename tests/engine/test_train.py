"""Training end to end on tiny models: equal to plain PyTorch, to itself under any placement, delay or interruption."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain import plain_training
from samples import samples

from penstock.engine.forecast.extrapolate import estimate
from penstock.engine.machine.presets import GENERIC
from penstock.engine.schedule.ops import Op
from penstock.engine.train import train_step
from penstock.storage.errors import UserError


@pytest.mark.parametrize(
    ("tied", "policy", "gpu"),
    [
        (True, {"activation_checkpointing": "none"}, "1GiB"),
        (True, {"kv_window": "streamed", "chunk_tokens": 20, "activation_checkpointing": "full"}, tiny.FLOOR),
        (False, {"kv_window": "auto", "activation_checkpointing": "auto"}, 1_100_000),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_ten_steps_equal_plain_pytorch(tmp_path: Path, tied: bool, policy: dict[str, Any], gpu: str | int) -> None:
    settings: dict[str, Any] = {
        "m": tiny.model(tie_embeddings=tied),
        "t": tiny.training(**({"steps": 10, "warmup_steps": 3, "clip_norm": 0.5, "lr": 3e-3} | policy)),
        "gpu": gpu,
        "ram": tiny.FLOOR,
    }
    with tiny.session(tmp_path / "plain", **settings) as reference:
        expected_losses, expected, _ = plain_training(reference, 10)
    with tiny.session(tmp_path / "run", **settings) as session:
        losses = [m.loss for m in tiny.steps(session)]
        weights = tiny.parameters(session.store, session.spec)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        error = (tensor - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_placement_changes_no_bit(tmp_path: Path, gradient_dtype: str) -> None:
    """GPU-resident buffers keep float32 gradients, so with bfloat16 waiting gradients only RAM and NVMe compare."""
    digests = set()
    for i, (gpu, ram) in enumerate(tiny.TIERS if gradient_dtype == "float32" else tiny.TIERS[1:3]):
        t = tiny.training(gradient_dtype=gradient_dtype)
        with tiny.session(tmp_path / str(i), t=t, gpu=gpu, ram=ram) as session:
            tiny.steps(session, 3)
            digests.add(tiny.digest(session.store))
    assert len(digests) == 1


DELAYED: list[Any] = [
    ({"chunk_tokens": 20}, *tiny.TIERS[-1]),
    *(pytest.param({"chunk_tokens": 20}, *budgets, marks=pytest.mark.long) for budgets in tiny.TIERS[:-1]),
    ({"kv_window": "streamed", "chunk_tokens": 9, "activation_checkpointing": "full"}, tiny.FLOOR, tiny.FLOOR),
    ({"activation_checkpointing": "none", "chunk_tokens": 9}, "1GiB", tiny.FLOOR),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("policy", "gpu", "ram"), DELAYED, ids=str)
def test_random_delays_change_no_bit(tmp_path: Path, policy: dict[str, Any], gpu: str | int, ram: str | int) -> None:
    """Runs of two steps with the ops of every lane delayed at random; of a step where the policy is another."""
    digests = set()
    tiers_only = len(policy) == 1
    for seed in range(samples(3, 20) if tiers_only else samples(2, 8)):
        with tiny.session(tmp_path, t=tiny.training(**policy), gpu=gpu, ram=ram) as session:
            tiny.delay(session, random.Random(f"{policy} {gpu} {ram} {seed}"))
            for _ in range(2 if tiers_only else 1):
                train_step(session)
            tiny.settle(session)
            digests.add(tiny.live_digest(session))
    assert len(digests) == 1


def test_a_generation_is_committed_every_so_many_steps(tmp_path: Path) -> None:
    with tiny.session(tmp_path, s=tiny.storage(checkpoint_every=2), ram=tiny.FLOOR) as session:
        for _ in range(4):
            train_step(session)
        session.executor.drain()
        assert session.store.meta["step"] == 2, "step 4's update has not been asked for yet"
        session.finish()
        assert session.store.meta["step"] == 4


def test_a_failing_op_stops_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    with tiny.session(tmp_path, ram=tiny.FLOOR) as session:
        tiny.steps(session, 1)

        def broken_update(op: Op) -> None:
            if op.action.phase == "update":
                raise RuntimeError("the lane broke")

        train_step(session)
        tiny.before_ops(session, broken_update)
        with pytest.raises(RuntimeError, match="the lane broke") as caught:
            train_step(session)
        assert any(entry.name == "broken_update" for entry in caught.traceback)
        assert "lane" in caught.value.__notes__[0]
    with tiny.session(tmp_path) as session:
        assert session.step == 1


def test_train_runs_stops_and_resumes(tmp_path: Path) -> None:
    observer = tiny.Silent()
    result = tiny.train_run(tmp_path / "a", observer)
    assert (result.steps, result.stopped) == (6, False)
    assert [m.step for m in observer.metrics] == [1, 2, 3, 4, 5, 6]
    assert result.tokens == sum(m.tokens for m in observer.metrics) == 6 * 2 * 47
    assert result.first_loss == observer.metrics[0].loss
    for tier in ("gpu", "ram", "nvme"):
        assert 0 < result.tiers[tier]["peak_bytes"] <= result.tiers[tier]["budget_bytes"]

    stopped = tiny.train_run(tmp_path / "b", tiny.Silent(stop_after=2))
    assert (stopped.steps, stopped.stopped) == (2, True)
    rest = tiny.Silent()
    tiny.train_run(tmp_path / "b", rest, resume=True)
    assert [m.loss for m in rest.metrics] == [m.loss for m in observer.metrics[2:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": tiny.BudgetConfig(gpu="1KiB", ram="1GiB")}, r"budgets\.gpu: .* give at least \d+[KMG]iB"),
        ({"budgets": tiny.BudgetConfig(gpu="1GiB", ram="1KiB")}, r"budgets\.ram: .* give at least \d+[KMG]iB"),
        ({"budgets": tiny.BudgetConfig(gpu="1GiB", ram="1GiB", nvme="1KiB")}, r"budgets\.nvme: .*1,024"),
        ({"model": tiny.model(model_type="t5")}, "encoder-decoder|not a causal"),
        ({"model": tiny.model(model_type="qwen33")}, "unknown architecture 'qwen33'"),
        ({"model": tiny.model(max_position=16)}, "max_position_embeddings"),
        ({"model": tiny.model(num_kv_heads=None)}, r"model\.num_kv_heads: 4 query heads cannot share 32"),
        ({"train": tiny.training(device="cuda")}, "no CUDA device"),
        (
            {"train": tiny.training(validate_every=2)},
            r"train\.validate_every: 2, but no documents are held out.*data\.validation_documents",
        ),
        (
            {"train": tiny.training(validate_every=2), "data": tiny.data(validation_documents=500, max_documents=None)},
            r"data\.validation_documents: 500, but the corpus has 64 documents",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "device" in message and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError, match=message):
        tiny.train_run(tmp_path, tiny.Silent(), **changes)
    assert not (tmp_path / "state").exists()


def test_a_slow_commit_lags_behind_the_steps(tmp_path: Path) -> None:
    """With all state in memory nothing but the next commit waits for the last one."""
    with tiny.session(tmp_path, t=tiny.training(steps=5), s=tiny.storage(checkpoint_every=2)) as session:
        commit, steps_at = session.store.commit, []

        def slow(meta: dict[str, Any]) -> int:
            until = time.monotonic() + 300
            while meta["step"] == 2 and session.step < 5 and time.monotonic() < until:
                time.sleep(0.005)
            steps_at.append((meta["step"], session.step))
            return commit(meta)

        session.store.commit = slow  # type: ignore[method-assign]
        tiny.steps(session)
        assert [step for step, _ in steps_at] == [2, 4, 5]
        assert steps_at[0][1] == 5, "the steps went on"
        assert session.store.meta["step"] == 5


def test_the_plan_tells_what_a_step_moves(tmp_path: Path) -> None:
    with tiny.session(tmp_path, gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:
        planned = estimate(session.plan, GENERIC, full=True).bytes
        session.executor.take_spans()
        for _ in range(3):
            train_step(session)
        tiny.settle(session)
        spans = session.executor.take_spans()
    state = 12 * sum(buffer.numel for buffer in session.plan.buffers.values())
    assert planned["nvme_write"] > state
    for lane in ("nvme_read", "nvme_write"):
        measured = sum(s.bytes for s in spans if s.lane == lane) / 3
        assert measured == pytest.approx(planned[lane], rel=0.1), lane
