"""Training end to end on tiny models: equal to plain PyTorch, to itself under any placement, delay or interruption, and
whatever is saved, kept, computed again or streamed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import plain_training
from samples import cases, sampled, samples
from tiny_plans import FLOORS

from penstock.engine.forecast.extrapolate import estimate
from penstock.engine.machine.presets import GENERIC
from penstock.engine.plan.problem import GpuFirst, GraphsAside
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.errors import UserError

QUICK = tiny.training(steps=5, global_batch_size=1, chunk_tokens=48)


@pytest.mark.parametrize(
    ("tied", "policy", "gpu"),
    [
        (True, {"activation_checkpointing": "none"}, "1GiB"),
        pytest.param(
            True,
            {"kv_window": "streamed", "chunk_tokens": 9, "activation_checkpointing": "full"},
            tiny.FLOOR,
            marks=pytest.mark.long,
        ),
        (False, {"kv_window": "auto", "activation_checkpointing": "auto"}, 1_100_000),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_five_steps_equal_plain_pytorch(tmp_path: Path, tied: bool, policy: dict[str, Any], gpu: str | int) -> None:
    settings: dict[str, Any] = {
        "m": tiny.model(tie_embeddings=tied),
        "t": tiny.training(**({"steps": 5, "warmup_steps": 3, "clip_norm": 0.5, "lr": 3e-3} | policy)),
        "gpu": gpu,
        "ram": tiny.FLOOR,
    }
    with tiny.session(tmp_path / "plain", **settings) as reference:
        expected_losses, expected, _ = plain_training(reference, 5)
    with tiny.session(tmp_path / "run", **settings) as session:
        losses = [m.loss for m in tiny.steps(session)]
        weights = tiny.parameters(session.store, session.spec)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        error = (tensor - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-5, f"{name}: {error}"


def test_placement_changes_no_bit_of_what_bfloat16_gradients_do(tmp_path: Path) -> None:
    """In RAM and on NVMe: buffers on the GPU keep float32 gradients."""
    digests = set()
    for gpu, ram in tiny.TIERS[1:3]:
        t = tiny.training(gradient_dtype="bfloat16", chunk_tokens=24)
        with tiny.session(tmp_path / ram, t=t, gpu=gpu, ram=ram) as session:
            tiny.steps(session, 2)
            digests.add(tiny.digest(session.store))
    assert len(digests) == 1


DELAYED: list[Any] = [
    ({"chunk_tokens": 20}, *tiny.TIERS[-1]),
    ({"activation_checkpointing": "none", "chunk_tokens": 9}, "1GiB", tiny.FLOOR),
    ({"kv_window": "streamed", "chunk_tokens": 9, "activation_checkpointing": "full"}, tiny.FLOOR, tiny.FLOOR),
    *(({"chunk_tokens": 20}, *budgets) for budgets in tiny.TIERS[:-1]),
]


@pytest.mark.sampled
@pytest.mark.parametrize("number", cases(range(len(DELAYED)), 0, 1))
def test_random_delays_change_no_bit(tmp_path: Path, number: int) -> None:
    """Runs of two steps with the ops of every lane delayed at random; of a step where the policy is another."""
    policy, gpu, ram = DELAYED[number]
    digests, tiers_only = set(), len(policy) == 1
    for seed in range(samples(2, 20) if tiers_only else samples(2, 8)):
        with tiny.session(tmp_path, t=tiny.training(global_batch_size=1, **policy), gpu=gpu, ram=ram) as session:
            tiny.delay(session, random.Random(f"{policy} {gpu} {ram} {seed}"))
            for _ in range(2 if tiers_only else 1):
                train_step(session)
            tiny.settle(session)
            digests.add(tiny.live_digest(session))
    assert len(digests) == 1


def test_a_generation_is_committed_every_so_many_steps(tmp_path: Path) -> None:
    with tiny.session(tmp_path, t=QUICK, s=tiny.storage(checkpoint_every=2), ram=tiny.FLOOR) as session:
        for _ in range(4):
            train_step(session)
        session.executor.drain()
        assert session.store.meta["step"] == 2, "step 4's update has not been asked for yet"
        session.finish()
        assert session.store.meta["step"] == 4


def test_a_failing_op_stops_the_run_with_its_own_traceback(tmp_path: Path) -> None:
    with tiny.session(tmp_path, t=QUICK, ram=tiny.FLOOR) as session:
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
    with tiny.session(tmp_path, t=QUICK) as session:
        assert session.step == 1


def test_train_runs_stops_and_resumes(tmp_path: Path) -> None:
    observer, train = tiny.Silent(), tiny.training(steps=6, chunk_tokens=48)
    result = tiny.train_run(tmp_path / "a", observer, train=train)
    assert (result.steps, result.stopped) == (6, False)
    assert [m.step for m in observer.metrics] == [1, 2, 3, 4, 5, 6]
    assert result.tokens == sum(m.tokens for m in observer.metrics) == 6 * 2 * 47
    assert result.first_loss == observer.metrics[0].loss
    for tier in ("gpu", "ram", "nvme"):
        assert 0 < result.tiers[tier]["peak_bytes"] <= result.tiers[tier]["budget_bytes"]

    stopped = tiny.train_run(tmp_path / "b", tiny.Silent(stop_after=2), train=train)
    assert (stopped.steps, stopped.stopped) == (2, True)
    rest = tiny.Silent()
    tiny.train_run(tmp_path / "b", rest, resume=True, train=train)
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
    with tiny.session(tmp_path, t=QUICK, s=tiny.storage(checkpoint_every=2)) as session:
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


DATA = tiny.data(sequence_length=96)


def in_chunks(**changes: Any) -> tiny.TrainConfig:
    return tiny.training(**({"steps": 1, "global_batch_size": 2, "chunk_tokens": 18} | changes))


def run(session: Session) -> tuple[float, float, str]:
    """Loss and norm of a step, and the digest after it."""
    (metrics,) = tiny.steps(session)
    return metrics.loss, metrics.grad_norm, tiny.digest(session.store)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float, str]:
    with tiny.session(tmp_path_factory.mktemp("plain"), d=DATA, t=in_chunks()) as session:
        return run(session)


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_saving_less_or_more_changes_no_bit(tmp_path: Path, expected: object, checkpointing: str) -> None:
    t, budgets = in_chunks(activation_checkpointing=checkpointing), {} if checkpointing == "none" else FLOORS
    with tiny.session(tmp_path, d=DATA, t=t, **budgets) as session:
        layers, chunks = 3, len(session.plan.chunks)
        assert len(session.plan.recomputed) == (layers if checkpointing == "full" else 0)
        assert len(session.plan.saved_graphs) == (layers * chunks if checkpointing == "none" else 0)
        assert run(session) == expected
        ops = {span.op for span in session.executor.take_spans()}
        assert ("layer_recompute" in ops) == (checkpointing == "full")
        assert session.runtime.layer_ops.graphs_bytes == 0


def test_what_ram_cannot_hold_stays_on_the_gpu_where_there_is_room(tmp_path: Path, expected: object) -> None:
    with tiny.session(tmp_path, d=DATA, t=in_chunks(), **FLOORS) as session:
        need, ram = (session.plan.tiers[tier].peak_bytes for tier in ("gpu", "ram"))
        spilled = len(session.plan.spilled)
    need += 100_000  # a third of the records, less than a resident block
    with tiny.session(tmp_path, d=DATA, t=in_chunks(), gpu=need, ram=ram, gpu_first="records") as session:
        plan = session.plan
        assert plan.saved_on_gpu
        assert len(plan.spilled) < spilled
        assert not plan.saved_on_gpu & plan.spilled
        assert run(session) == expected
        assert session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"] <= need


@sampled(6, 25)
@given(
    policy=st.fixed_dictionaries(
        {
            "activation_checkpointing": st.sampled_from(["auto", "full", "selective", "none"]),
            "kv_window": st.sampled_from(["whole", "streamed", "auto"]),
            "chunk_tokens": st.integers(5, 70),
        }
    ),
    sequences=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    documents=st.integers(1, 40),
    seed=st.integers(0, 3),
    window=st.sampled_from([None, 9]),
    group=st.sampled_from([0, 1]),
    graphs_aside=st.sampled_from(["none", "half", "all"]),
    gpu=st.sampled_from([tiny.FLOOR, 1_400_000, "1GiB"]),
    ram=st.sampled_from([tiny.FLOOR, 850_000, "1GiB"]),
    gpu_first=st.sampled_from(["blocks", "weights"]),
)
def test_gradients_are_those_of_plain_pytorch(
    tmp_path_factory: pytest.TempPathFactory,
    policy: dict[str, Any],
    sequences: tuple[int, int],
    documents: int,
    seed: int,
    window: int | None,
    group: int,
    graphs_aside: GraphsAside,
    gpu: str | int,
    ram: str | int,
    gpu_first: GpuFirst,
) -> None:
    sizes = dict(zip(("global_batch_size", "micro_batch_size"), sequences, strict=True))
    roomy = policy["activation_checkpointing"] == "none"
    overrides = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    options: dict[str, Any] = {
        "m": tiny.model(num_layers=2, overrides=overrides),
        "d": tiny.data(sequence_length=64, max_documents=documents, seed=seed),
        "t": in_chunks(steps=1, clip_norm=None, **sizes, **policy),
        "gpu": "1GiB" if roomy else gpu,
        "ram": "1GiB" if roomy else ram,
        "gpu_first": gpu_first,
    }
    folder = tmp_path_factory.mktemp("any")
    with tiny.session(folder / "plain", **options) as reference:
        losses, _, moments = plain_training(reference, 1)
    with tiny.session(folder / "run", **options, group=group, graphs_aside=graphs_aside) as session:
        (metrics,) = tiny.steps(session)
        used, parts = session.gpu.arena.used_bytes, session.plan.tiers["gpu"].parts
        assert used + parts["workspace"] + session.runtime.layer_ops.graphs_peak_bytes <= sum(parts.values())
        assert not session.runtime.layer_ops.outgrown
        assert session.ram.arena.used_bytes == session.plan.tiers["ram"].peak_bytes - session.plan.problem.reader_bytes
        found = tiny.first_moments(session.store, session.spec)
    assert metrics.loss == pytest.approx(losses[0], rel=1e-5)
    for name, moment in moments.items():
        assert (found[name] - moment).norm() <= 2e-5 * moment.norm(), name
