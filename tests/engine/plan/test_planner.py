"""What each choice does to a plan, and what is refused."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from small_problems import planned, problem, some_plan, window_chunks

from penstock.engine.forecast.choices import dimensions
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import KV_SLOTS, PlanOptions, RamFirst
from penstock.storage.files.errors import BudgetError
from penstock.storage.tier.chunk import ChunkFormat

ORDERS: tuple[RamFirst, ...] = ("activations", "weights", "state")
TIERS = ["gpu", "ram", "nvme"]


def made(choice: PlanOptions | None = None, **shape: Any) -> Plan:
    return make_plan(problem(**shape), choice or PlanOptions())


def floor(tier: str, choice: PlanOptions | None = None, **shape: Any) -> int:
    """The least budget of a tier that the problem is planned with."""
    return some_plan(problem(**shape | {f"{tier}_budget": 1}), choice).tiers[tier].peak_bytes


@sampled(50, 200)
@given(planned())
def test_every_tier_is_within_its_budget_and_what_is_saved_of_a_chunk_in_one_place(plan: Plan) -> None:
    assert plan.tiers.keys() == {"gpu", "ram", "nvme"}
    for tier in plan.tiers.values():
        assert all(size >= 0 for size in tier.parts.values())
        assert sum(tier.parts.values()) == tier.peak_bytes <= tier.budget_bytes
    budgets = plan.tiers["gpu"].budget_bytes, plan.tiers["ram"].budget_bytes
    assert budgets == (plan.problem.gpu_budget, plan.problem.ram_budget)
    passed = [i for i, block in enumerate(plan.blocks) if block.saved_inputs and block.backward]
    layers = {(i, c.index) for i in passed for c in plan.group_chunks}
    graphs = plan.saved_graphs - plan.offloaded_graphs
    assert plan.spilled <= layers
    assert plan.saved_on_gpu <= layers
    assert plan.saved_graphs <= layers
    assert plan.offloaded_graphs <= plan.saved_graphs - plan.saved_on_gpu
    assert not plan.spilled & (plan.saved_on_gpu | graphs)
    assert not {i for i, _ in plan.saved_graphs} & plan.recomputed, "nothing is recomputed where everything is saved"
    assert all(plan.blocks[i].attends for i in plan.recomputed)
    assert bool(plan.spilled) <= (plan.activation_stages > 0)
    in_ram = layers - plan.spilled - graphs - plan.saved_on_gpu
    if plan.spilled and in_ram:
        assert min(in_ram) >= (max(i for i, _ in plan.spilled), 0), "backward's last ones are spilled first"


def test_what_needs_all_of_a_step_s_forward_is_one_group_whatever_was_chosen_before() -> None:
    choice = PlanOptions(group=1)
    assert made(choice).num_groups == problem().micro_batches > 1
    plan = made(choice, one_group=True)
    assert plan.num_groups == 1
    assert plan.to_json()["one_group"]
    assert not made(choice, one_group=True, micro_batches=1).to_json()["one_group"]


def test_placement_fills_the_gpu_then_ram_then_nvme() -> None:
    blocks = PlanOptions(gpu_first="blocks")
    roomy = made(blocks)
    assert {b.state for b in roomy.buffers.values()} == {"gpu"}
    gpu = floor("gpu")
    in_ram = made(blocks, gpu_budget=gpu)
    assert {b.state for b in in_ram.buffers.values()} == {"ram"}
    ram = floor("ram", gpu_budget=gpu)
    on_disk = made(blocks, gpu_budget=gpu, ram_budget=ram)
    assert {(b.weights, b.gradient, b.state) for b in on_disk.buffers.values()} == {("nvme", "nvme", "nvme")}
    assert len(on_disk.spilled) == 3 * len(on_disk.chunks)
    mixed = made(blocks, gpu_budget=gpu, ram_budget=ram + 500_000)
    assert "nvme" in {b.state for b in mixed.buffers.values()}
    assert 0 <= len(mixed.spilled) < len(on_disk.spilled)


def test_ram_is_filled_in_the_order_that_the_choice_says() -> None:
    gpu = floor("gpu")
    # All weights; and of 24 records a page each for the input and for keys and values, two for output and log-sum-exp.
    weights, records = 28 * 2048 * 2, 24 * 4 * 4096
    room = {first: floor("ram", PlanOptions(ram_first=first), gpu_budget=gpu) for first in ORDERS}
    assert room["activations"] == room["weights"] + records - 2 * 2 * 4096, "no record may leave, so no stage for any"

    def plan(first: RamFirst, more: int) -> Plan:
        return made(PlanOptions(ram_first=first), gpu_budget=gpu, ram_budget=room[first] + more)

    for first in ORDERS:
        assert {b.weights for b in plan(first, weights).buffers.values()} == {"ram"}
        assert {b.gradient for b in plan(first, weights).buffers.values()} == {"nvme"}
    assert not plan("activations", 0).spilled
    assert len(plan("weights", weights).spilled) == len(plan("state", weights).spilled) == 24
    # What comes after weights: records, or gradients.
    assert len(plan("weights", weights + records // 2).spilled) == 12
    assert {b.gradient for b in plan("weights", weights + records // 2).buffers.values()} == {"nvme"}
    for first in ("activations", "state"):
        roomier = plan(first, weights + 28 * 2048 * 4)
        assert {b.gradient for b in roomier.buffers.values()} == {"ram"}
        assert {b.state for b in roomier.buffers.values()} == {"nvme"}
    assert len(plan("state", weights + 28 * 2048 * 15).spilled) == 24


@sampled(50, 200)
@given(planned(), st.integers(0, 1_000_000), st.integers(0, 1_000_000))
def test_with_more_of_a_tier_a_choice_gives_all_that_it_gave_with_less(plan: Plan, gpu: int, ram: int) -> None:
    p = plan.problem
    # Where no graph can leave, the plan is that without slots for any: with more RAM one might, which takes them.
    choice = plan.choice if plan.offloaded_graphs else replace(plan.choice, offloaded_graphs="none")
    aside, first = choice.offloaded_graphs, choice.gpu_first
    more = make_plan(replace(p, ram_budget=p.ram_budget + ram, nvme_budget=None), choice)
    # With "room" graphs that leave are spread over the layers: where there is room for more, others may leave.
    assert more.saved_graphs - more.offloaded_graphs == plan.saved_graphs - plan.offloaded_graphs
    assert aside == "room" or more.saved_graphs >= plan.saved_graphs
    for name in ("saved_on_gpu", "recomputed", "windows"):
        assert getattr(more, name) == getattr(plan, name)
    # With more of the GPU fewer graphs can leave, of which a share is others, or none; and records stay, not graphs.
    if aside not in ("none", "all") or (aside, first) == ("all", "saved activations"):
        gpu = 0
    # What lives on the GPU passes through stages in RAM when it is read and written.
    roomy = replace(more.problem, gpu_budget=p.gpu_budget + gpu, ram_budget=more.problem.ram_budget + (1 << 20))
    both = make_plan(roomy, choice)
    assert aside == "room" or both.saved_graphs >= plan.saved_graphs
    assert both.saved_on_gpu >= plan.saved_on_gpu
    for less, found in ((plan, more), (more, both)):
        assert found.spilled <= less.spilled
        for name, buffer in less.buffers.items():
            for kind in ("weights",) if buffer.frozen else ("weights", "gradient", "state"):
                assert TIERS.index(getattr(found.buffers[name], kind)) <= TIERS.index(getattr(buffer, kind))


def test_stages_and_slots_are_as_many_as_the_choice_says() -> None:
    gpu = floor("gpu")
    budget = floor("ram", PlanOptions(stages=4), gpu_budget=gpu)
    for stages in (2, 4):
        plan = made(PlanOptions(stages=stages), gpu_budget=gpu, ram_budget=budget)
        assert (plan.state_stages, plan.part_stages) == (stages, stages)
        ahead = PlanOptions(spare_slots=stages // 2, gpu_first="saved activations")
        assert made(ahead, layers=5, gpu_budget=gpu + 100_000).weight_slots["layer"] == 1 + stages // 2
    with pytest.raises(BudgetError, match="staging"):
        made(PlanOptions(stages=4), gpu_budget=gpu, ram_budget=budget - 1)


def test_what_is_frozen_takes_room_for_its_weights_alone() -> None:
    """Layers of four pages, of which one is trained, below them one and an embedding that are frozen whole: the bytes
    of each tier counted by hand."""
    page, kinds = 2048, 3
    frozen, trained = 8 * page + 4 * page + 2 * 3 * page, 2 * page + 8 * page
    shape = {"frozen": frozenset({0, 1}), "halves": frozenset({2, 3})}
    roomy = made(**shape)
    assert {b.weights for b in roomy.buffers.values()} == {"gpu"}
    assert roomy.tiers["gpu"].parts["resident blocks"] == 2 * (frozen + trained) + 4 * (1 + kinds) * trained
    in_ram = made(gpu_budget=floor("gpu", **shape), **shape)
    assert in_ram.tiers["ram"].parts["resident blocks"] == 2 * (frozen + trained) + (4 + 4 * kinds) * trained
    assert in_ram.weight_slot_bytes["layer"] == 2 * page
    assert in_ram.weight_slot_bytes["frozen layer"] == 8 * page
    assert in_ram.gradient_slots["frozen layer"] == in_ram.gradient_slots["frozen embedding and head"] == 0
    for plan in (roomy, in_ram):
        files = {n: b.num_parts * ChunkFormat(b.part_numel * 2).file_bytes for n, b in plan.buffers.items() if b.frozen}
        assert plan.tiers["nvme"].parts["frozen weights"] == sum(files.values())
        assert plan.tiers["nvme"].parts["weights"] == 0
        assert {i for i, _ in plan.saved_graphs | plan.saved_on_gpu | plan.spilled} <= {2, 3}
        assert not plan.saved_activations(1, 0)
    blocks = {block["name"]: block for block in in_ram.to_json()["blocks"]}
    assert blocks["layers.1"]["bytes"] == 14 * page
    assert (blocks["layers.1.frozen"]["bytes"], blocks["layers.1.frozen"]["frozen"]) == (6 * page, True)
    assert (blocks["layers.1.frozen"]["state"], blocks["layers.1.frozen"]["gradient"]) == (None, None)


def test_a_reference_model_passes_through_the_slots_of_the_one_that_is_trained() -> None:
    """It needs no memory, but a drive; and what memory nothing else wants keeps some of it there."""
    page = 2048
    shape: dict[str, Any] = {"halves": frozenset({1}), "edge": 4}
    kept = {"references": True, **shape}
    for tier in ("gpu", "ram"):
        assert floor(tier, **kept) == floor(tier, **shape)
    scarce = {
        "gpu_budget": floor("gpu", **shape),
        "ram_budget": floor("ram", gpu_budget=floor("gpu", **shape), **shape),
    }
    plan, without = made(**kept | scarce), made(**shape | scarce)
    assert (plan.weight_slots, plan.weight_slot_bytes) == (without.weight_slots, without.weight_slot_bytes)
    assert plan.reference_bytes == {"nvme": 2 * (4 + 1 + 4 + 4 + 4) * page}
    files = (b for b in plan.buffers.values() if b.reference_of is not None)
    on_disk = sum(b.num_parts * ChunkFormat(b.part_numel * 2).file_bytes for b in files)
    assert plan.tiers["nvme"].parts["reference weights"] == on_disk
    assert plan.tiers["nvme"].parts["frozen weights"] == without.tiers["nvme"].parts["frozen weights"]
    assert [b["name"] for b in plan.to_json()["blocks"]] == [b["name"] for b in without.to_json()["blocks"]]
    for more in range(0, 2_000_000, 50_000):
        plan = made(**kept | scarce | {"ram_budget": scarce["ram_budget"] + more})
        own = {getattr(b, kind) for b in plan.buffers.values() if not b.frozen for kind in ("weights", "state")}
        assert own == {"ram"} or set(plan.reference_bytes) == {"nvme"}
    assert set(plan.reference_bytes) == {"ram"}
    assert set(made(**kept).reference_bytes) == {"gpu"}


def test_what_has_ram_before_frozen_weights_do() -> None:
    """State: a byte of either spares as much reading, and that of state writing as well; unless weights are to be
    first. Records, where the choice says so."""
    shape: dict[str, Any] = {"frozen": frozenset({0, 1, 4}), "halves": frozenset({2, 3}), "layers": 3}
    shape["gpu_budget"] = floor("gpu", **shape)
    state = sum(b.numel for b in made(**shape).buffers.values() if not b.frozen) * 18
    spilled = {}
    for first in (*ORDERS, "frozen last"):
        choice = PlanOptions(ram_first=first)  # type: ignore[arg-type]
        need = floor("ram", choice, **shape)
        plan = made(choice, **shape | {"ram_budget": need + state})
        if first != "frozen last":
            tiers = {b.state for b in plan.buffers.values() if not b.frozen}
            assert tiers == ({"nvme"} if first == "weights" else {"ram"})
            assert "nvme" in {b.weights for b in plan.buffers.values() if b.frozen} or first == "weights"
        if first in ("frozen last", "state"):
            saved_bytes = made(choice, **shape | {"ram_budget": need}).saved_bytes(2, 0)
            plan = made(choice, **shape | {"ram_budget": need + state + 3 * saved_bytes})
            spilled[first] = len(plan.spilled)
            assert any(b.weights == "ram" for b in plan.buffers.values() if b.frozen) == (first == "state")
    assert spilled["frozen last"] < spilled["state"]


def test_the_gpu_goes_to_what_the_choice_says() -> None:
    shape = {"activation_checkpointing": "auto", "edge": 16, "row_tokens": 512, "chunk_tokens": 64}
    budget = floor("gpu", **shape) + 1_100_000
    plans: dict[str, Plan] = {
        first: made(PlanOptions(gpu_first=first, ram_first="activations"), gpu_budget=budget, **shape)
        for first in ("graphs", "blocks", "half", "saved activations")
    }
    resident = {first: sum(b.numel for b in plan.buffers.values() if b.state == "gpu") for first, plan in plans.items()}
    kept = {first: len(plan.saved_graphs) for first, plan in plans.items()}
    assert kept["graphs"] > kept["half"] > kept["blocks"] == kept["saved activations"] == 0
    assert resident["graphs"] < resident["half"] < resident["blocks"]
    assert [first for first, plan in plans.items() if plan.saved_on_gpu] == ["saved activations"]
    for found, first in (
        (plans["graphs"].saved_graphs, "graphs"),
        (plans["saved activations"].saved_on_gpu, "saved activations"),
    ):
        order = [(i, c.index) for i in (3, 2, 1) for c in reversed(plans[first].chunks)]
        assert found == set(order[: len(found)]), "backward's first ones first"
    held = plans["saved activations"]
    assert held.tiers["gpu"].parts["saved activations"] == sum(held.saved_bytes(*key) for key in held.saved_on_gpu)
    for first in ("graphs", "blocks", "half"):
        roomy = made(PlanOptions(gpu_first=first, ram_first="activations"), activation_checkpointing="auto")  # type: ignore[arg-type]
        assert roomy.saved_graphs == {(i, c.index) for i in (1, 2, 3) for c in roomy.chunks}
        assert {b.state for b in roomy.buffers.values()} == {"gpu"}
    assert not made(PlanOptions(gpu_first="graphs", ram_first="weights"), activation_checkpointing="auto").saved_graphs


def test_attention_is_computed_again_as_far_as_the_choice_says() -> None:
    gpu = floor("gpu")
    ram = floor("ram", PlanOptions(ram_first="weights"), gpu_budget=gpu) + 400_000
    shape = problem(
        layers=5, gpu_budget=gpu, ram_budget=ram, activation_checkpointing="auto", without_attention=frozenset({1})
    )
    none, half, every = (make_plan(shape, PlanOptions(recompute=r)) for r in ("none", "half", "all"))  # type: ignore[arg-type]
    assert not none.recomputed
    assert half.recomputed == {1, 3}, "of those with attention the ones whose records wait longest"
    assert every.recomputed == {1, 3, 4, 5}
    assert every.spill_bytes < half.spill_bytes < none.spill_bytes
    # Of a layer computed again the input is saved alone: 64 bytes a token instead of 64 + 64 + 16 + 64.
    sizes = [plan.saved_bytes(1, 0) for plan in (none, every)]
    assert sizes == [4 * 4096, 4096]


def test_a_streamed_window_takes_the_same_memory_at_any_length() -> None:
    long = {"row_tokens": 2048, "kv_window": "auto"}
    streamed, whole = PlanOptions(streamed=True), PlanOptions()
    need = floor("gpu", streamed, **long)
    assert need < floor("gpu", whole, **long)
    with pytest.raises(BudgetError, match=r"budgets\.gpu: .*give at least \d+[KMG]iB"):
        made(whole, **long, gpu_budget=need)
    assert made(streamed, **long, gpu_budget=need).streamed
    windows = [made(streamed, **long | {"row_tokens": n}).tiers["gpu"].parts["K/V window"] for n in (1024, 4096)]
    assert windows[0] == windows[1]


def test_only_what_can_differ_is_tried() -> None:
    assert dimensions(problem(kv_window="auto"), KV_SLOTS)["streamed"] == [False]
    assert dimensions(problem(kv_window="auto"), KV_SLOTS + 1)["streamed"] == [False, True]
    assert dimensions(problem(kv_window="streamed"), KV_SLOTS + 1)["streamed"] == [True]
    assert dimensions(problem(kv_window="whole"), KV_SLOTS + 1)["streamed"] == [False]
    bare = problem(kv_window="auto", activation_checkpointing="auto", without_attention=frozenset(range(3)))
    assert dimensions(bare, 100)["streamed"] == [False]
    assert dimensions(bare, 100)["recompute"] == ["none"]
    assert dimensions(problem(activation_checkpointing="full"), 4)["recompute"] == ["all"]
    assert dimensions(problem(activation_checkpointing="selective"), 4)["recompute"] == ["none"]
    assert set(dimensions(problem(activation_checkpointing="auto"), 4)["recompute"]) == {"none", "half", "all"}


def test_everything_is_kept_or_refused_with_the_need() -> None:
    with pytest.raises(BudgetError, match=r"budgets\.gpu: .*which train\.activation_checkpointing=none needs") as e:
        made(activation_checkpointing="none", gpu_budget=400_000)
    assert e.value.tier == "gpu"
    plan = made(activation_checkpointing="none", gpu_budget=e.value.need_bytes)
    assert len(plan.saved_graphs) == 3 * len(plan.chunks)
    with pytest.raises(BudgetError, match=r"train\.activation_checkpointing: what layers\.0 would .* is not known"):
        made(activation_checkpointing="none", graph_bytes=None)
    # Whatever else is chosen, where graphs may leave.
    shape = problem(activation_checkpointing="none", graph_bytes=3000, gpu_budget=2_000_000)
    values, places = dimensions(shape, window_chunks(shape)), {}
    assert values["offloaded_graphs"] == ["none", "all"]
    for gpu_first, ram_first, group in itertools.product(values["gpu_first"], ORDERS, values["group"]):
        choice = PlanOptions(gpu_first=gpu_first, ram_first=ram_first, group=group, offloaded_graphs="all")
        plan = make_plan(shape, choice)
        assert len(plan.saved_graphs) == 3 * plan.num_group_chunks
        places[gpu_first, ram_first, group] = len(plan.offloaded_graphs)
    assert places["graphs", "activations", 1] < places["blocks", "activations", 1] <= 3 * 4


def test_the_disk_holds_two_generations_and_those_that_are_kept() -> None:
    # 8 pages of 2,048 in embedding and head, 4 in each of 3 layers: 28 pages of parameters, 12 bytes of state each,
    # in chunk files of parts of 4,096 parameters or less.
    parts = made().tiers["nvme"].parts
    generation = parts["state, two generations"] // 2
    assert 28 * 2048 * 12 <= generation < 28 * 2048 * 12 * 1.6
    kept = made(retained_generations=3).tiers["nvme"]
    assert kept.parts["kept generations"] == 3 * generation
    with pytest.raises(BudgetError, match=r"budgets\.nvme: .*give at least (\d+[KMG]iB)") as e:
        made(retained_generations=3, nvme_budget=kept.peak_bytes - 1)
    assert (e.value.tier, e.value.need_bytes) == ("nvme", kept.peak_bytes)
    assert made(retained_generations=3, nvme_budget=kept.peak_bytes).tiers["nvme"] == kept
