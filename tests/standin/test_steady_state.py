"""From the third step on a step asks for nothing that stops the GPU or the lanes."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import adapted
import pytest
import small_model
import standin
import tiny
import torch
from torch._dynamo.utils import compilation_time_metrics, counters

from penstock.engine import samples
from penstock.engine.config import SamplesConfig
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.actions import NORM
from penstock.engine.train import train_step
from penstock.storage.tier.readers import KvikioReader

CUDA = torch.device("cuda", 0)
GPU_LANES = {"h2d", "compute", "d2h"}
ALLOCATIONS = ("device_allocation", "device_mapping", "device_free", "host_allocation", "registration")
MIB = 1 << 20

# (gpu, ram): everything on the GPU; state in RAM; state in RAM and on drives; the least that is accepted.
TIERS = [("4GiB", "1GiB"), (tiny.FLOOR, "1GiB"), (tiny.FLOOR, 48 * MIB), (tiny.FLOOR, tiny.FLOOR)]

KEPT = small_model.training(activation_checkpointing="auto")
LEAST: dict[str, Any] = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
CASES: dict[str, dict[str, Any]] = {
    **{f"{gpu}-{ram}": {"gpu": gpu, "ram": ram} for gpu, ram in TIERS},
    "frozen": LEAST | {"t": small_model.training(freeze=["*embed_tokens*", "*.layers.0.*", "*.mlp.*"])},
    "lora": LEAST | {"adapter": adapted.section("lora")},
    "dora": {"gpu": "4GiB", "ram": "1GiB", "adapter": adapted.section("dora")},
    "two groups, graphs in RAM": {"gpu": 48 * MIB, "ram": 64 * MIB, "group": 1, "offloaded_graphs": "all", "t": KEPT},
    "graphs on drives": {"gpu": 48 * MIB, "ram": 16 * MIB, "offloaded_graphs": "all", "t": KEPT},
    "weights on the GPU, state not": {"gpu": 32 * MIB, "ram": 48 * MIB, "gpu_first": "weights"},
    "not pinned": {"gpu": 32 * MIB, "ram": 48 * MIB, "gpu_first": "weights"},
    "samples": LEAST | {"samples": SamplesConfig(every=1, prompts=["the mill", "a"], tokens=4)},
}

PLANNED: dict[str, Callable[[Plan], bool]] = {
    "two groups, graphs in RAM": lambda p: p.num_groups == 2 and bool(p.offloaded_graphs) and not p.spilled,
    "graphs on drives": lambda p: bool(p.offloaded_graphs & p.spilled),
    "weights on the GPU, state not": lambda p: all(b.weights == "gpu" != b.state for b in p.buffers.values()),
}
"""What a case is there for."""


def compilations() -> int:
    """Frames that Dynamo has looked at, and everything that it and Inductor have timed of their work."""
    return counters["frames"]["total"] + sum(len(times) for times in compilation_time_metrics.values())


@pytest.mark.parametrize("case", CASES)
def test_no_step_after_the_second_stops_for_anything(tmp_path: Path, case: str) -> None:
    """Samples are written before the steps that are watched.

    Allowed: host lanes wait for events of the GPU's lanes, which is how they wait for what they read; the main thread
    waits for the stream of its own that brings the next batch (BatchCarrier); threads that read with kvikio wait for
    streams of their own, on which they bring what they check; in compatibility mode so do kvikio's threads, and
    register one buffer a thread as they come to need them. Nothing else waits, nothing allocates, nothing is copied
    from or to pageable memory, and nothing is compiled. Where RAM is not pinned, the lanes that copy wait for pieces
    of the ring.
    """
    kinds = ("pageable_copy", "stream_sync", "device_sync", "event_sync", *ALLOCATIONS)
    sections = {"m": small_model.model(), "d": tiny.data(sequence_length=512), "t": small_model.training()}
    if case == "samples":
        text = tmp_path / "a.txt"
        text.write_text("the mill turns the stone and the stone turns a wheel of the mill\n" * 300)
        sections["m"] = small_model.model(vocab_size=None)
        sections["d"] = tiny.data(source="text", path=str(text), tokenizer_vocab_size=300, sequence_length=512)
    storage = tiny.storage(part_bytes="256KiB")
    unpinned = case == "not pinned"
    refused = standin.setting("STANDIN_REGISTER", 0, after=1) if unpinned else nullcontext()
    with refused, tiny.session(tmp_path, s=storage, device=CUDA, **(sections | CASES[case])) as session:
        assert session.ram.arena.pinned is not unpinned
        if case in PLANNED:
            assert PLANNED[case](session.plan)
        for _ in range(2):
            train_step(session)
            if samples.due(session):
                samples.write(session)
        session.executor.drain()
        compiled, before = compilations(), standin.counts()
        with standin.watched(*kinds) as calls:
            for _ in range(3):
                train_step(session)
        made = standin.counts() - before
        assert compilations() == compiled
    pool = [n for thread, n in standin.counts().by_thread("registration").items() if thread.startswith("kvikio-")]
    assert sum(pool) <= KvikioReader.num_threads
    assert set(made.by_thread("copy", "launch")) >= {"compute", "h2d", "d2h"}, "the lanes' names are not known"
    for call in calls:
        if call.kind == "event_sync" and call.thread in set(LANES) - GPU_LANES:
            continue
        if call.kind == "event_sync" and unpinned and any(at.endswith(" _wait") for at in call.stack):
            continue
        if call.kind == "stream_sync" and call.thread.startswith("nvme-read ") and "readers.py" in call.stack[-1]:
            continue
        if call.kind in ("stream_sync", "registration") and call.thread.startswith("kvikio-"):
            continue
        if call.kind == "stream_sync" and call.thread == "main" and any(at.endswith(" _carry") for at in call.stack):
            continue
        lane = "compute" if call.thread == "pt_autograd_0" else call.thread
        pytest.fail(f"{call.kind} of {call.nbytes:,} bytes on {lane}: " + "\n  ".join(call.stack[-6:]))


def test_a_lane_that_waits_is_found(tmp_path: Path) -> None:
    """The test above would see a stream that is waited for on a lane, and know the lane."""
    t = small_model.training(compile="off")
    with tiny.session(tmp_path, m=small_model.model(), d=tiny.data(sequence_length=512), t=t, device=CUDA) as session:
        norm = session.runtime.handlers[NORM]

        def waits(op):  # type: ignore[no-untyped-def]
            assert threading.current_thread().name == "compute"
            torch.cuda.current_stream().synchronize()
            return norm(op)

        session.runtime.handlers[NORM] = waits
        before = standin.counts()
        train_step(session)
        assert (standin.counts() - before).by_thread("stream_sync")["compute"] >= len(session.plan.buffers)
