"""CUDA's rules over the recorded ops of real-size plans: the real Runtime, on a device that is only addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cuda_replay import Case, Replay, replay

from penstock.engine.forecast.problem import ALLOCATOR_SHARE, overhead_bytes
from penstock.engine.machine.limits import RAM_RESERVE
from penstock.engine.plan.problem import CUBLAS_WORKSPACE_BYTES, PlanOptions
from penstock.engine.schedule.actions import ACTIONS

BEST_7B = Case("7b_512k", "gh200-480")
RESIDENT_7B = Case("7b_512k", "gh200-480", PlanOptions(gpu_first="blocks"))
BEST_120B = Case("120b_gh200", "gh200-480")
STREAMED_7B = Case(
    "7b_1m", "rtx4090-64", PlanOptions(streamed=True, gpu_first="graphs", ram_first="state", stages=4), 16384
)
GROUPED_14B = Case("14b_workstation", "rtx4090-256", PlanOptions(group=2, graphs_aside="half", ram_first="activations"))
RECORDS_HERE = PlanOptions(gpu_first="records", recompute="all", ram_first="weights", stages=4)
WEIGHTS_ON_NVME = Case("32b_workstation", "rtx4090-64", RECORDS_HERE)
STAGED = Case("32b_workstation", "rtx4090-64", RECORDS_HERE, device_reads=False)
WEIGHTS_HERE = Case("32b_workstation", "rtx4090-64", replace(RECORDS_HERE, gpu_first="weights"))
SAMPLED_7B = Case("7b_512k", "gh200-480", prompt_tokens=(300, 40, 1))
ADAPTER_70B = Case("70b_lora_24gb", "rtx4090-128", device_reads=False)

ACTIVATIONS = {"load_x", "store_x", "load_dy", "store_dy", "load_saved", "store_saved", "load_kv", "store_kv"}
STATE = {"load_weights", "store_gradient", "update"}
SPILLS = {"spill_x", "peek_x", "discard_x"}
EXPECTED = {
    "best": ACTIVATIONS | STATE | {"checkpoint_state", "commit"},
    "resident": ACTIVATIONS | {"update_on_gpu", "stage_state", "checkpoint_staged"},
    "validated": {"embed_evaluate", "layer_evaluate", "head_evaluate", "evaluate"},
    "sampled": {
        "embed_generate",
        "layer_generate",
        "head_generate",
        "take_logits",
        "load_sample_kv",
        "store_sample_kv",
    },
    "120b": {"load_weights", "store_gradient_part", "write_gradient", "read_state", "write_state", "layer_recompute"}
    | SPILLS,
    "24gb": ACTIVATIONS | STATE | {"load_dkv", "store_dkv", "spill_kv", "unspill_kv", "spill_saved", "unspill_saved"},
    "groups": (ACTIVATIONS - {"load_dy"}) | STATE | {"load_graph", "store_graph", "load_sum", "store_sum"},
    "here": {"load_weights_part", "update", "write_state"},
    "direct": {"read_weights_whole", "write_weights"},
    "staged": {"read_weights", "load_weights_part"},
    "adapter": ACTIVATIONS | STATE | {"read_weights", "load_weights_part"},
}
"""What each plan below is there for: actions that it must have."""


def check(run: Replay, case: str) -> None:
    """What holds for every plan."""
    watch, cuda, plan = run.watch, run.cuda, run.plan
    assert watch.actions >= EXPECTED[case]
    assert watch.violations == []
    assert watch.copies > 100
    assert watch.synchronous == set()
    tier = plan.tiers["gpu"]
    slots = sum(tier.parts.values()) - tier.parts["workspace"] - tier.parts["saved graphs"]
    dynamic = cuda.reserved_bytes() - run.slot_bytes - tier.parts["saved graphs"]
    tokens = plan.problem.micro_batches * plan.window_tokens
    beside = overhead_bytes(tokens) - CUBLAS_WORKSPACE_BYTES + plan.problem.gpu_budget // ALLOCATOR_SHARE
    assert run.slot_bytes <= slots + plan.problem.gpu_budget // ALLOCATOR_SHARE // 4
    # A graph that is about to leave is part of its op's temporaries.
    temporaries = tier.parts["workspace"] if plan.graphs_aside else 0
    assert 0 < dynamic <= beside + temporaries
    assert cuda.reserved_bytes() + tier.parts["workspace"] - temporaries - beside <= tier.budget_bytes
    # torch's pinned allocator takes powers of two; the reserve of RAM is what they come from.
    assert run.ram.arena.used_bytes <= plan.tiers["ram"].peak_bytes - plan.problem.reader_bytes
    assert 0 < cuda.peak_pinned_bytes <= RAM_RESERVE[0] // 4


@pytest.mark.parametrize(("name", "case"), [("best", BEST_7B), ("resident", RESIDENT_7B)])
def test_7b_at_512k_on_a_gh200(name: str, case: Case) -> None:
    """Whole; resident blocks, where the plan keeps no graphs, in a part of the layers."""
    with replay(case, None if case.choice is None else 8) as run:
        assert bool(run.plan.saved_graphs) == (case is BEST_7B)
        assert any(buffer.state == "gpu" for buffer in run.plan.buffers.values()) == (case is RESIDENT_7B)
        run.step(1)
        run.step(2, commit=True, passes=len(run.plan.blocks))
        check(run, name)


def test_7b_validated_between_two_steps() -> None:
    with replay(BEST_7B, 2) as run:
        run.step(1)
        run.evaluate(1, 1)
        run.finish()
        check(run, "validated")


def test_samples_of_7b_between_two_steps() -> None:
    """Their keys and values come to the GPU and leave it; prompts of unequal length lie end to end."""
    with replay(SAMPLED_7B, 4) as run:
        run.step(1)
        run.sample(1)
        run.finish()
        check(run, "sampled")


def test_120b_on_a_gh200() -> None:
    with replay(BEST_120B, 4) as run:
        plan = run.plan
        assert plan.saved_on_gpu
        assert plan.spilled
        assert plan.recomputed
        assert run.ram.arena.used_bytes > 400 << 30
        assert len(run.ram.arena.pieces) > 6
        run.step(1)
        run.finish()
        check(run, "120b")


def test_7b_at_1m_with_24_gb() -> None:
    with replay(STREAMED_7B, 2) as run:
        assert run.plan.streamed
        assert run.plan.spilled
        run.step(1)
        run.finish()
        check(run, "24gb")


def test_14b_in_groups_whose_graphs_leave() -> None:
    with replay(GROUPED_14B, 2) as run:
        assert run.plan.num_groups > 1
        assert run.plan.graphs_aside
        run.step(1)
        run.finish()
        check(run, "groups")


def test_weights_alone_on_the_gpu() -> None:
    """New ones are made in RAM and come to it part by part."""
    with replay(WEIGHTS_HERE, 12) as run:
        assert any(buffer.weights == "gpu" and buffer.state == "nvme" for buffer in run.plan.buffers.values())
        run.step(1)
        run.step(2, passes=len(run.plan.blocks) // 2)
        check(run, "here")


@pytest.mark.parametrize(("name", "case"), [("direct", WEIGHTS_ON_NVME), ("staged", STAGED)])
def test_weights_from_nvme(name: str, case: Case) -> None:
    """Straight to the GPU, each part at whole pages; or through a stage in RAM."""
    with replay(case, 12) as run:
        assert any(buffer.weights == "nvme" for buffer in run.plan.buffers.values())
        run.step(1)
        run.step(2, passes=len(run.plan.blocks) // 2)
        check(run, name)
        assert ({"read_weights_whole"} if name == "staged" else {"read_weights"}).isdisjoint(run.watch.actions)


@pytest.mark.long
def test_an_adapter_on_70b_with_24_gb() -> None:
    """Frozen weights from NVMe, in slots of their own beside the adapter's, which is in RAM."""
    with replay(ADAPTER_70B, 3) as run:
        plan = run.plan
        stays = [buffer for buffer in plan.buffers.values() if buffer.frozen]
        assert "nvme" in {buffer.weights for buffer in stays}
        assert plan.weight_slot_numel["frozen layer"] > 100 * plan.weight_slot_numel["layer"]
        run.step(1)
        run.finish()
        check(run, "adapter")


def test_every_copy_between_host_and_device_is_in_some_plan() -> None:
    copies = {action.name for action in ACTIONS.values() if action.lane in ("h2d", "d2h")}
    assert copies <= set().union(*EXPECTED.values())
