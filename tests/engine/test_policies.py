"""What is saved, kept, computed again or streamed changes memory and time, never the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import plain_training
from samples import sampled

from penstock.engine.plan.problem import GpuFirst, GraphsAside
from penstock.engine.session import Session

MODEL = tiny.model(num_layers=3)
DATA = tiny.data(sequence_length=96)


def training(**changes: Any) -> Any:
    return tiny.training(**({"steps": 2, "global_batch_size": 2, "chunk_tokens": 13} | changes))


Result = tuple[list[float], dict[str, torch.Tensor]]


def run(session: Session) -> Result:
    """Losses and norms of all steps, and the parameters after them."""
    metrics = tiny.steps(session)
    figures = [value for m in metrics for value in (m.loss, m.grad_norm)]
    return figures, tiny.parameters(session.store, session.spec)


def same(found: Result, expected: Result) -> bool:
    return found[0] == expected[0] and all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def close(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        # Adam's first steps are near its sign: what is rounding in a gradient near zero is not in the step.
        assert (found[1][name] - value).norm() <= 1e-3 * value.norm(), name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with tiny.session(tmp_path_factory.mktemp("plain"), m=MODEL, d=DATA, t=training()) as session:
        return run(session)


@pytest.mark.parametrize(("checkpointing", "ram"), [("full", tiny.FLOOR), ("none", "1GiB")])
def test_saving_less_or_more_changes_no_bit(tmp_path: Path, expected: Any, checkpointing: str, ram: str) -> None:
    gpu = "1GiB" if checkpointing == "none" else tiny.FLOOR
    with tiny.session(
        tmp_path, m=MODEL, d=DATA, t=training(activation_checkpointing=checkpointing), gpu=gpu, ram=ram
    ) as session:
        layers, chunks = 3, len(session.plan.chunks)
        assert len(session.plan.recomputed) == (layers if checkpointing == "full" else 0)
        assert len(session.plan.saved_graphs) == (layers * chunks if checkpointing == "none" else 0)
        assert same(run(session), expected)
        ops = {span.op for span in session.executor.take_spans()}
        assert ("layer_recompute" in ops) == (checkpointing == "full")
        assert session.runtime.layer_ops.graphs_bytes == 0


def test_what_ram_cannot_hold_stays_on_the_gpu_where_there_is_room(tmp_path: Path, expected: Any) -> None:
    with tiny.session(tmp_path, m=MODEL, d=DATA, t=training(), gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:
        need, ram = (session.plan.tiers[tier].peak_bytes for tier in ("gpu", "ram"))
        spilled = len(session.plan.spilled)
    need += 100_000  # a third of the records, less than a resident block
    with tiny.session(tmp_path, m=MODEL, d=DATA, t=training(), gpu=need, ram=ram, gpu_first="records") as session:
        plan = session.plan
        assert plan.saved_on_gpu
        assert len(plan.spilled) < spilled
        assert not plan.saved_on_gpu & plan.spilled
        assert same(run(session), expected)
        assert session.gpu.arena.used_bytes + plan.tiers["gpu"].parts["workspace"] <= need


@pytest.mark.parametrize(("checkpointing", "ram"), [("full", "1GiB"), ("selective", tiny.FLOOR), ("none", tiny.FLOOR)])
def test_a_streamed_window_gives_the_same_gradients(
    tmp_path: Path, expected: Result, checkpointing: str, ram: str
) -> None:
    t = training(activation_checkpointing=checkpointing, kv_window="streamed")
    gpu = "1GiB" if checkpointing == "none" else tiny.FLOOR
    with tiny.session(tmp_path, m=MODEL, d=DATA, t=t, gpu=gpu, ram=ram) as session:
        assert session.plan.streamed
        close(run(session), expected)
        ops = {span.op for span in session.executor.take_spans()}
    assert ops >= {"layer_project", "attend", "attend_backward", "load_kv", "load_dkv", "store_dkv"}


@sampled(8, 25)
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
        "t": training(steps=1, clip_norm=None, **sizes, **policy),
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
