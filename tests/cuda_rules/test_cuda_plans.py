"""CUDA's rules over the recorded ops of real-size plans: the real Runtime, on a device that is only addresses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from cuda_replay import Case, Replay, replay

from penstock.engine.forecast.problem import ALLOCATOR_SHARE, overhead_bytes
from penstock.engine.machine.limits import RAM_RESERVE
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import CUBLAS_WORKSPACE_BYTES, PlanOptions
from penstock.engine.schedule.actions import ACTIONS

RESIDENT_7B = Case("7b_512k", "gh200-480", PlanOptions(gpu_first="blocks"))
PROMPTED_7B = replace(RESIDENT_7B, prompt_tokens=(300, 40, 1))  # of unequal length, which lie end to end
STREAMED = PlanOptions(streamed=True, gpu_first="graphs", ram_first="state", stages=4)
GROUPED = PlanOptions(group=2, graphs_aside="half", ram_first="activations")
RECORDS_HERE = PlanOptions(gpu_first="records", recompute="all", ram_first="weights", stages=4)
WEIGHTS_ON_NVME = Case("32b_workstation", "rtx4090-64", RECORDS_HERE)
STAGED = replace(WEIGHTS_ON_NVME, device_reads=False)
ON_NVME_SMALL = "model.num_layers=4 train.global_batch_size=2 budgets.ram=8GiB"

ACTIVATIONS = {"load_x", "store_x", "load_dy", "store_dy", "load_saved", "store_saved", "load_kv", "store_kv"}
STATE = {"load_weights", "store_gradient", "update"}
SPILLS = {"spill_x", "peek_x", "discard_x"}
EVALUATED = {"embed_evaluate", "layer_evaluate", "head_evaluate", "evaluate"}
SAMPLES = {"embed_generate", "layer_generate", "head_generate", "take_logits", "load_sample_kv", "store_sample_kv"}
KV = {"load_dkv", "store_dkv", "spill_kv", "unspill_kv", "spill_saved", "unspill_saved"}
PARTS = {"load_weights", "store_gradient_part", "write_gradient", "read_state", "write_state", "layer_recompute"}


def second(run: Replay) -> None:
    """Another step, which commits the first one's state."""
    run.step(2, commit=True)


def sampled(run: Replay) -> None:
    run.sample(1)
    run.finish()


def validated(run: Replay) -> None:
    run.evaluate(1, 1)
    run.finish()


def on_nvme(plan: Plan) -> bool:
    return any(buffer.weights == "nvme" for buffer in plan.buffers.values())


@dataclass(frozen=True)
class Sort:
    """A plan of some sort, for a published model and for the same with few layers."""

    case: Case
    small: str
    """Settings of the small one: with less to train or less memory the plan is of the same sort."""
    layers: int | None
    """Carried out of the published model."""
    actions: set[str]
    """What it is there for."""
    holds: Callable[[Plan], bool] = lambda plan: True
    then: Callable[[Replay], None] = Replay.finish
    """What follows the first step."""
    least_ram: int = 0
    """GiB of the published model's arena, of more than six pieces."""


SHORT = "data.sequence_length=65536"
RESIDENT_SMALL = f"model.num_layers=3 {SHORT} train.chunk_tokens=8192 budgets.gpu=36GiB"
SORTS = {
    "best": Sort(
        Case("7b_512k", "gh200-480"),
        f"model.num_layers=2 {SHORT} budgets.gpu=24GiB",
        None,
        (ACTIVATIONS - {"load_saved", "store_saved"}) | STATE | {"checkpoint_state", "commit"},
        lambda plan: bool(plan.saved_graphs),
        second,
    ),
    "resident": Sort(
        RESIDENT_7B,
        RESIDENT_SMALL,
        8,
        ACTIVATIONS | {"update_on_gpu", "stage_state", "checkpoint_staged"},
        lambda plan: not plan.saved_graphs and any(buffer.state == "gpu" for buffer in plan.buffers.values()),
        second,
    ),
    "validated": Sort(RESIDENT_7B, RESIDENT_SMALL, 2, EVALUATED, then=validated),
    "sampled": Sort(PROMPTED_7B, RESIDENT_SMALL, 4, SAMPLES, then=sampled),
    "120b": Sort(
        Case("120b_gh200", "gh200-480"),
        "model.num_layers=6 train.global_batch_size=6 budgets.ram=18GiB budgets.gpu=36GiB",
        4,
        PARTS,
        lambda plan: bool(plan.recomputed),
        least_ram=400,
    ),
    "24gb": Sort(
        Case("7b_1m", "rtx4090-64", STREAMED, 16384),
        "model.num_layers=2 data.sequence_length=131072 budgets.ram=12GiB",
        2,
        ACTIVATIONS | STATE | KV,
        lambda plan: plan.streamed and bool(plan.spilled),
    ),
    "groups": Sort(
        Case("14b_workstation", "rtx4090-256", GROUPED),
        "model.num_layers=4",
        2,
        (ACTIVATIONS - {"load_dy"}) | STATE | {"load_graph", "store_graph", "load_sum", "store_sum"},
        lambda plan: plan.num_groups > 1 and bool(plan.graphs_aside),
    ),
    "weights here": Sort(
        Case("32b_workstation", "rtx4090-64", replace(RECORDS_HERE, gpu_first="weights")),
        "model.num_layers=6 train.global_batch_size=2 budgets.ram=24GiB",
        12,
        {"load_weights_part", "update", "write_state"},
        lambda plan: any(buffer.weights == "gpu" and buffer.state == "nvme" for buffer in plan.buffers.values()),
        second,
    ),
    "direct": Sort(WEIGHTS_ON_NVME, ON_NVME_SMALL, 12, {"read_weights_whole", "write_weights"}, on_nvme, second),
    "staged": Sort(STAGED, ON_NVME_SMALL, 12, {"read_weights", "load_weights_part"}, on_nvme, second),
}


def check(run: Replay) -> None:
    """What holds for every plan."""
    watch, cuda, plan = run.watch, run.cuda, run.plan
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


@pytest.mark.parametrize("published", [False, pytest.param(True, marks=pytest.mark.long)], ids=["small", "published"])
@pytest.mark.parametrize("name", SORTS)
def test_a_plan_keeps_the_rules(name: str, published: bool) -> None:
    sort = SORTS[name]
    small = replace(sort.case, settings=("train.compile=off", *sort.small.split()))
    with replay(sort.case if published else small, sort.layers if published else None) as run:
        plan, arena = run.plan, run.ram.arena
        assert sort.holds(plan)
        if published and sort.least_ram:
            assert plan.saved_on_gpu
            assert plan.spilled
            assert arena.used_bytes > sort.least_ram << 30
            assert len(arena.pieces) > 6
        run.step(1)
        sort.then(run)
        check(run)
        assert run.watch.actions >= (sort.actions | SPILLS if published and sort.least_ram else sort.actions)
        absent = {"direct": {"read_weights"}, "staged": {"read_weights_whole"}}.get(name, set())
        assert absent.isdisjoint(run.watch.actions)


@pytest.mark.long
def test_an_adapter_on_70b_with_24_gb() -> None:
    """Frozen weights from NVMe, in slots of their own beside the adapter's, which is in RAM."""
    with replay(Case("70b_lora_24gb", "rtx4090-128", device_reads=False), 3) as run:
        plan = run.plan
        stays = [buffer for buffer in plan.buffers.values() if buffer.frozen]
        assert "nvme" in {buffer.weights for buffer in stays}
        assert plan.weight_slot_numel["frozen layer"] > 100 * plan.weight_slot_numel["layer"]
        run.step(1)
        run.finish()
        check(run)
        assert run.watch.actions >= ACTIVATIONS | STATE | {"read_weights", "load_weights_part"}


def test_every_copy_between_host_and_device_is_in_some_plan() -> None:
    copies = {action.name for action in ACTIONS.values() if action.lane in ("h2d", "d2h")}
    assert copies <= set().union(*(sort.actions for sort in SORTS.values()))
