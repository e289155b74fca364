"""What each choice does to a plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from small_problems import planned, problem, problems, some_plan, window_chunks, with_need

from engine.plan import KV_SLOTS, Choice, Plan, Problem
from engine.planner import make_plan
from engine.search import dimensions
from storage.errors import BudgetError


def floor(tier: str, choice: Choice | None = None, **shape: Any) -> int:
    """The least budget of a tier that the problem is planned with."""
    return some_plan(problem(**shape | {f"{tier}_budget": 1}), choice).tiers[tier].peak_bytes


@settings(max_examples=200, deadline=None)
@given(planned())
def test_every_tier_adds_up_to_a_peak_within_its_budget(plan: Plan) -> None:
    assert plan.tiers.keys() == {"gpu", "ram", "nvme"}
    for tier in plan.tiers.values():
        assert all(size >= 0 for size in tier.parts.values())
        assert sum(tier.parts.values()) == tier.peak_bytes <= tier.budget_bytes
    assert plan.tiers["gpu"].budget_bytes == plan.problem.gpu_budget
    assert plan.tiers["ram"].budget_bytes == plan.problem.ram_budget


@settings(max_examples=200, deadline=None)
@given(planned())
def test_what_is_saved_of_a_chunk_is_in_one_place(plan: Plan) -> None:
    layers = {(i, c.index) for i, block in enumerate(plan.blocks) if block.role == "layer" for c in plan.chunks}
    assert plan.spilled <= layers
    assert plan.held <= layers
    assert plan.kept <= layers
    assert not plan.spilled & (plan.held | plan.kept)
    assert not {i for i, _ in plan.kept} & plan.recomputed, "nothing is computed again where everything is kept"
    assert all(plan.blocks[i].attends for i in plan.recomputed)
    assert bool(plan.spilled) <= (plan.activation_stages > 0)
    in_ram = layers - plan.spilled - plan.kept - plan.held
    if plan.spilled and in_ram:
        assert min(in_ram) >= (max(i for i, _ in plan.spilled), 0), "backward's last ones are spilled first"


def test_placement_fills_the_gpu_then_ram_then_nvme() -> None:
    blocks = Choice(gpu_first="blocks")
    roomy = make_plan(problem(), blocks)
    assert {b.state for b in roomy.buffers.values()} == {"gpu"}
    gpu = floor("gpu")
    in_ram = make_plan(problem(gpu_budget=gpu), blocks)
    assert {b.state for b in in_ram.buffers.values()} == {"ram"}
    ram = floor("ram", gpu_budget=gpu)
    on_disk = make_plan(problem(gpu_budget=gpu, ram_budget=ram), blocks)
    assert {(b.weights, b.gradient, b.state) for b in on_disk.buffers.values()} == {("nvme", "nvme", "nvme")}
    assert len(on_disk.spilled) == 3 * len(on_disk.chunks)
    mixed = make_plan(problem(gpu_budget=gpu, ram_budget=ram + 500_000), blocks)
    assert "nvme" in {b.state for b in mixed.buffers.values()}
    assert 0 <= len(mixed.spilled) < len(on_disk.spilled)


def test_ram_goes_first_to_what_the_choice_says() -> None:
    gpu = floor("gpu")
    budget = floor("ram", gpu_budget=gpu) + 120_000
    shape = problem(gpu_budget=gpu, ram_budget=budget)
    plans: dict[str, Plan] = {
        first: make_plan(shape, Choice(ram_first=first)) for first in ("weights", "activations", "state")
    }

    def in_ram(first: str, kind: str) -> int:
        return sum(b.numel for b in plans[first].buffers.values() if getattr(b, kind) == "ram")

    for other in ("activations", "state"):
        assert in_ram("weights", "weights") >= in_ram(other, "weights")
    assert len(plans["activations"].spilled) < min(len(plans[first].spilled) for first in ("weights", "state"))
    roomier = replace(shape, ram_budget=budget + 300_000)
    states = {
        first: sum(b.numel for b in make_plan(roomier, Choice(ram_first=first)).buffers.values() if b.state == "ram")
        for first in ("weights", "activations", "state")
    }
    assert states["state"] >= max(states.values())


def test_the_gpu_goes_first_to_what_the_choice_says() -> None:
    shape = {"save": "auto", "edge": 16, "row_tokens": 512, "chunk_tokens": 64}
    budget = floor("gpu", **shape) + 800_000
    plans: dict[str, Plan] = {
        first: make_plan(problem(gpu_budget=budget, **shape), Choice(gpu_first=first))
        for first in ("graphs", "blocks", "half", "records")
    }
    resident = {first: sum(b.numel for b in plan.buffers.values() if b.state == "gpu") for first, plan in plans.items()}
    kept = {first: len(plan.kept) for first, plan in plans.items()}
    assert kept["graphs"] > kept["half"] > kept["blocks"]
    assert resident["graphs"] < resident["half"] < resident["blocks"]
    assert kept["records"] == 0
    order = [(i, c.index) for i in (3, 2, 1) for c in reversed(plans["graphs"].chunks)]
    assert plans["graphs"].kept == set(order[: kept["graphs"]]), "backward's first ones first"
    every = make_plan(problem(save="auto"), Choice())
    assert every.kept == {(i, c.index) for i in (1, 2, 3) for c in every.chunks}


def test_attention_is_computed_again_as_far_as_the_choice_says() -> None:
    gpu = floor("gpu")
    # All weights and all state have no place in RAM beside the activations; some of these have none either.
    ram = floor("ram", Choice(recompute="all"), gpu_budget=gpu) + 100_000
    shape = problem(gpu_budget=gpu, ram_budget=ram, save="auto")
    none, fit, everything = (make_plan(shape, Choice(recompute=r)) for r in ("none", "fit", "all"))  # type: ignore[arg-type]
    assert not none.recomputed
    assert everything.recomputed == {1, 2, 3}
    assert fit.recomputed <= everything.recomputed
    assert len(fit.spilled) <= len(none.spilled)
    assert len(everything.spilled) <= len(none.spilled)
    roomy = make_plan(problem(save="auto", gpu_budget=gpu), Choice(recompute="fit"))
    assert not roomy.recomputed, "only where RAM is short"


def test_records_that_ram_has_no_room_for_stay_on_the_gpu() -> None:
    gpu = floor("gpu", layers=4) + 60_000
    ram = floor("ram", layers=4, gpu_budget=gpu)
    held = make_plan(problem(gpu_budget=gpu, ram_budget=ram, layers=4), Choice(gpu_first="records"))
    assert held.held
    order = [(i, c.index) for i in (4, 3, 2, 1) for c in reversed(held.chunks)]
    assert held.held == set(order[: len(held.held)]), "backward's first ones first"
    assert held.tiers["gpu"].parts["held activations"] == sum(held.record_bytes(*key) for key in held.held)


def test_a_streamed_window_takes_the_same_memory_at_any_length() -> None:
    long = {"row_tokens": 2048, "kv_window": "auto"}
    streamed, whole = Choice(streamed=True), Choice()
    need = floor("gpu", streamed, **long)
    assert need < floor("gpu", whole, **long)
    with pytest.raises(BudgetError, match=r"budgets\.gpu: .*give at least \d+ bytes"):
        make_plan(problem(**long, gpu_budget=need), whole)
    assert make_plan(problem(**long, gpu_budget=need), streamed).streamed
    windows = [
        make_plan(problem(**long | {"row_tokens": n}), streamed).tiers["gpu"].parts["K/V window"] for n in (1024, 4096)
    ]
    assert windows[0] == windows[1]


def test_layers_fetched_ahead_take_slots() -> None:
    gpu = floor("gpu")
    slots = [
        make_plan(problem(layers=5, gpu_budget=gpu + 100_000), Choice(spare_slots=n, gpu_first="records")).weight_slots
        for n in (1, 2)
    ]
    assert [found["layer"] for found in slots] == [2, 3]


def test_only_what_can_differ_is_tried() -> None:
    assert dimensions(problem(kv_window="auto"), KV_SLOTS)["streamed"] == [False]
    assert dimensions(problem(kv_window="auto"), KV_SLOTS + 1)["streamed"] == [False, True]
    assert dimensions(problem(kv_window="streamed"), KV_SLOTS + 1)["streamed"] == [True]
    assert dimensions(problem(kv_window="whole"), KV_SLOTS + 1)["streamed"] == [False]
    bare = problem(kv_window="auto", save="auto", without_attention=frozenset(range(3)))
    assert dimensions(bare, 100)["streamed"] == [False]
    assert dimensions(bare, 100)["recompute"] == ["none"]
    assert dimensions(problem(save="input"), 4)["recompute"] == ["all"]
    assert dimensions(problem(save="attention"), 4)["recompute"] == ["none"]
    assert set(dimensions(problem(save="auto"), 4)["recompute"]) == {"none", "fit", "all"}


def test_everything_is_kept_or_refused_with_the_need() -> None:
    with pytest.raises(BudgetError, match=r"budgets\.gpu: .*train\.save=everything needs") as e:
        make_plan(problem(save="everything", gpu_budget=400_000), Choice())
    assert e.value.tier == "gpu"
    plan = make_plan(problem(save="everything", gpu_budget=e.value.need_bytes), Choice())
    assert len(plan.kept) == 3 * len(plan.chunks)
    with pytest.raises(BudgetError, match=r"train\.save: what layers\.0 would have to keep is not known"):
        make_plan(problem(save="everything", graph_bytes=None), Choice())


def test_the_disk_holds_two_generations_and_those_that_are_kept() -> None:
    # 8 pages of 2,048 in embedding and head, 4 in each of 3 layers: 28 pages of parameters, 12 bytes of state each,
    # in chunk files of parts of 4,096 parameters or less.
    parts = make_plan(problem(), Choice()).tiers["nvme"].parts
    generation = parts["state, two generations"] // 2
    assert 28 * 2048 * 12 <= generation < 28 * 2048 * 12 * 1.6
    kept = make_plan(problem(kept_generations=3), Choice()).tiers["nvme"]
    assert kept.parts["kept generations"] == 3 * generation
    with pytest.raises(BudgetError, match=r"budgets\.nvme: .*give at least (\d+) bytes") as e:
        make_plan(problem(kept_generations=3, nvme_budget=kept.peak_bytes - 1), Choice())
    assert (e.value.tier, e.value.need_bytes) == ("nvme", kept.peak_bytes)
    assert make_plan(problem(kept_generations=3, nvme_budget=kept.peak_bytes), Choice()).tiers["nvme"] == kept


@pytest.mark.parametrize("tier", ["gpu", "ram", "nvme"])
def test_a_budget_below_what_is_needed_is_refused_with_the_need(tier: str) -> None:
    shape = problem(**{"gpu_budget": floor("gpu"), f"{tier}_budget": 1000})
    with pytest.raises(BudgetError) as e:
        make_plan(shape, Choice())
    assert e.value.tier == tier
    assert make_plan(with_need(shape, e.value), Choice()).tiers[tier].peak_bytes == e.value.need_bytes


@settings(max_examples=200, deadline=None)
@given(problems)
def test_what_a_refusal_asks_for_is_enough_whatever_the_choice(shape: Problem) -> None:
    values = dimensions(shape, window_chunks(shape))
    poor = replace(shape, gpu_budget=1, ram_budget=1, nvme_budget=1)
    for streamed in values["streamed"]:
        for recompute in values["recompute"]:
            some_plan(poor, Choice(streamed=streamed, recompute=recompute, gpu_first=values["gpu_first"][0]))
