"""What is needed at least: budgets of "least" are accepted and nothing less is, and every refusal says the same."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import BudgetConfig, Recipe, SamplesConfig, parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets, machine_budgets
from penstock.engine.machine.presets import GENERIC, find_machine
from penstock.storage.errors import BudgetError

ROOMY = Budgets(1 << 40, 1 << 40, None, {})
MODELS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"num_layers": 1, "vocab_size": 5000}, (), "none"),
    ({"vocab_size": 60, "tie_embeddings": True}, (), "none"),
    ({}, ("model.embed_tokens.*",), "none"),
    ({"vocab_size": 5000}, (), "lora"),
    ({}, (), "dora"),
]
"""Changes of the tiny model, what is frozen, adapter.method."""


@pytest.fixture(scope="module", autouse=True)
def _taken_apart() -> None:
    """Each model is taken apart once, which takes longer than to plan it."""
    for shape, freeze, method in MODELS:
        request(tiny.recipe(model=tiny.model(**shape), adapter=tiny.AdapterConfig(method=method)), ROOMY, "cpu", freeze)


def request(recipe: Recipe, budgets: Budgets, device_type: str, freeze: tuple[str, ...], **known: Any) -> PlanRequest:
    spec = tiny.spec_of(model_config(recipe, None), freeze, recipe.adapter)
    return PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type=device_type, **known)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Small runs of any kind, which nothing limits."""
    micro = draw(st.sampled_from([1, 2, 3]))
    train = tiny.training(
        global_batch_size=micro * draw(st.sampled_from([1, 2, 5])),
        micro_batch_size=micro,
        chunk_tokens=draw(st.sampled_from([None, 16, 40, 512])),
        activation_checkpointing=draw(st.sampled_from(["auto", "full", "selective", "none"])),
        kv_window=draw(st.sampled_from(["auto", "whole", "streamed"])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        gradient_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    shape, freeze, method = draw(st.sampled_from(MODELS))
    recipe = tiny.recipe(
        model=tiny.model(**shape),
        data=tiny.data(sequence_length=draw(st.sampled_from([32, 200, 1500]))),
        train=train,
        storage=tiny.storage(
            part_bytes=draw(st.sampled_from(["8KiB", "16KiB", "1MiB"])), keep_last=draw(st.sampled_from([1, 3]))
        ),
        adapter=tiny.AdapterConfig(method=method),
        samples=draw(st.sampled_from([SamplesConfig(), SamplesConfig(every=2, prompts=["a", "longer"], tokens=9)])),
    )
    known = {"reader_bytes": draw(st.sampled_from([0, 70_000])), "device_reads": draw(st.booleans())}
    return request(recipe, ROOMY, draw(st.sampled_from(["cpu", "cuda"])), freeze, **known)


def fits(task: PlanRequest, tier: str) -> bool:
    refusal = task.refusal()
    return refusal is None or refusal.tier != tier


@sampled(4, 300)
@given(requests(), st.sampled_from(["gpu", "ram", "nvme"]), st.integers(1, 3_000_000))
def test_what_a_refusal_asks_for_is_exact_and_what_it_says_to_lower_helps(
    task: PlanRequest, tier: str, size: int
) -> None:
    task = task.changed({f"budgets.{tier}": size})
    assume(not fits(task, tier))
    with pytest.raises(BudgetError) as refused:
        task.search(GENERIC)
    message, need = str(refused.value), refused.value.need_bytes
    assert message.startswith(f"budgets.{tier}: ")
    asked = parse_bytes(re.findall(r"give at least (\d+[KMG]iB)", message)[0], tier)
    assert fits(task.changed({f"budgets.{tier}": asked}), tier)
    assert not fits(task.changed({f"budgets.{tier}": asked - 1024}), tier)
    lowered = re.findall(r"[a-z]+\.[a-z_]+(?:=\w+)?", message.partition(", or lower ")[2].partition(", or set")[0])
    for name in lowered:
        section, _, field = name.partition(".")
        value = getattr(getattr(task.recipe, section), field)
        tried = []
        for divisor in range(2, 9):  # half of it, or what the recipe's other fields allow
            whole = parse_bytes(value, name) if field == "part_bytes" else value or refused.value.budget_bytes
            less = whole // divisor
            if field == "part_bytes":
                less = less // 8192 * 8192
            if field == "chunk_tokens" and value is None:
                less = max(1, min(512, task.recipe.data.sequence_length) // divisor)
            try:
                other = task.changed({name: less}).refusal()
            except ValueError:
                continue
            tried.append(other is None or other.tier != tier or other.need_bytes < need)
        assert any(tried), (name, message)


@sampled(3, 150)
@given(requests(), st.sampled_from([("gpu",), ("ram",), ("gpu", "ram")]))
def test_the_least_is_enough_and_a_kib_less_is_not(task: PlanRequest, tiers: tuple[str, ...]) -> None:
    settled = replace(task, budgets=replace(ROOMY, least=frozenset(tiers))).settled()
    assert settled.refusal() is None
    assert not settled.budgets.least
    for tier in tiers:
        size = getattr(settled.budgets, tier)
        margin = re.search(r", and ([\d.]+ \w+) for saved graphs", settled.budgets.why[tier])
        assert (margin is not None) <= (task.recipe.train.activation_checkpointing == "none")
        if margin is None:
            assert size % 1024 == 0
            assert settled.changed({f"budgets.{tier}": size - 1024}).refusal() is not None


def test_the_margin_holds_what_calibration_adds_to_graphs() -> None:
    recipe = tiny.recipe(train=tiny.training(activation_checkpointing="none"))
    task = request(recipe, replace(ROOMY, least=frozenset({"gpu", "ram"})), "cpu", ()).settled()
    sizes = task.spec.graph_bytes["float32"]
    names = [f"layers.{i}" for i in range(len(sizes))]
    measured = {name: int(1.1 * (size or 0)) for name, size in zip(names, sizes, strict=True)}
    assert replace(task, graph_bytes=measured).refusal() is None
    assert replace(task, graph_bytes={name: 2 * size for name, size in measured.items()}).refusal() is not None


@pytest.mark.parametrize("machine", ["generic", "rtx4090-64"])
def test_least_and_shares_of_a_machine(machine: str) -> None:
    on = GENERIC if machine == "generic" else find_machine(machine)
    whole = machine_budgets(BudgetConfig(), on)
    both = whole.gpu + whole.ram
    halves = machine_budgets(BudgetConfig(gpu="25%", ram="50%"), on)
    rest = machine_budgets(BudgetConfig(gpu="least"), on)
    assert halves.why["ram"].startswith("50% of what is free")
    if on.gpu is None:  # one memory
        assert (halves.gpu, halves.ram) == (both // 4, both // 2)
        with pytest.raises(ValueError, match="share the same memory; give shares that come to 100% at most"):
            machine_budgets(BudgetConfig(gpu="60%", ram="50%"), on)
    else:
        assert (halves.gpu, halves.ram) == (whole.gpu // 4, whole.ram // 2)
    budgets = machine_budgets(BudgetConfig(gpu="least", ram="least"), on)
    task = request(tiny.recipe(), budgets, "cpu" if on.gpu is None else "cuda", ()).settled()
    assert task.budgets.gpu + task.budgets.ram < whole.gpu // 10
    assert task.budgets.why["gpu"] == "the least that a plan needs"
    rest = request(tiny.recipe(), rest, "cpu" if on.gpu is None else "cuda", ()).settled().budgets
    assert rest.gpu == task.budgets.gpu
    assert rest.ram == (both - rest.gpu if on.gpu is None else whole.ram)
