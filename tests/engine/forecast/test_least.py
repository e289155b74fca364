"""What is needed at least: budgets of "least" are accepted and nothing less is, and every refusal says the same. And
advice: every change that is suggested has been tried, and applied it is accepted."""

import re
from dataclasses import replace
from typing import Any

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import BudgetConfig, Recipe, SamplesConfig, parse_bytes
from penstock.engine.forecast.advice import Change, best_change, fixes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets, machine_budgets
from penstock.engine.machine.presets import GENERIC, find_machine
from penstock.storage.files.errors import BudgetError, UserError

ROOMY = Budgets(1 << 40, 1 << 40, None, {})
MODELS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"num_layers": 1, "vocab_size": 5000}, (), "none"),
    ({"vocab_size": 60, "tie_embeddings": True}, (), "none"),
    ({}, ("model.embed_tokens.*",), "none"),
    ({"vocab_size": 5000}, (), "lora"),
    ({}, (), "dora"),
]
"""Changes of the tiny model, what is frozen, adapter.method."""
DRIVES = [1_000_000, 5_000_000, 1 << 40]
SIZES = {"gpu": 1 << 40, "ram": 1 << 40, "nvme": 1 << 40}


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
def test_what_a_refusal_asks_for_is_exact_and_what_to_lower_helps(task: PlanRequest, tier: str, size: int) -> None:
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


def test_a_chunk_length_with_which_keys_and_values_must_stream_is_not_advised() -> None:
    """As many chunks as the window has slots are held whole; twice as many stream, which takes more."""
    train = tiny.training(global_batch_size=2, micro_batch_size=2, chunk_tokens=16, kv_window="streamed")
    model = tiny.model(vocab_size=60, tie_embeddings=True)
    recipe = tiny.recipe(model=model, data=tiny.data(sequence_length=32), train=train)
    with pytest.raises(BudgetError, match="give at least") as refused:
        request(recipe, replace(ROOMY, gpu=1), "cpu", ()).search(GENERIC)
    assert "train.chunk_tokens" not in str(refused.value)


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


@sampled(3, 40, derandomize=True)
@given(requests(), st.integers(100_000, 2_000_000), st.integers(100_000, 1_000_000), st.sampled_from(DRIVES))
def test_every_suggested_change_is_accepted(task: PlanRequest, gpu: int, ram: int, nvme: int) -> None:
    task = task.changed({"budgets.gpu": gpu, "budgets.ram": ram, "budgets.nvme": nvme})
    error = task.refusal()
    assume(error is not None)
    assert error.tier in SIZES
    assert error.need_bytes > error.budget_bytes
    changes = fixes(task, SIZES)
    assert changes, "a machine with enough memory helps, if nothing else does"
    for change in changes:
        assert change.values
        assert change.text
        changed = task.changed(change.values)
        assert changed.refusal() is None
        changed.search(GENERIC)
        assert all(f"{name}=" in word for name, word in zip(change.values, change.to_json()["set"], strict=True))
    assert len({tuple(change.values) for change in changes}) == len(changes)


def test_what_the_machine_lacks_and_the_least_change_of_a_field() -> None:
    budgets = Budgets(100_000, 1 << 30, None, {})
    task = request(tiny.recipe(), budgets, "cpu", ())
    roomy = fixes(task, SIZES)[-1]
    assert list(roomy.values) == ["budgets.gpu"]
    assert task.changed(roomy.values).refusal() is None
    assert re.fullmatch(r"\d+[KMG]iB", roomy.values["budgets.gpu"])
    less = {"budgets.gpu": parse_bytes(roomy.values["budgets.gpu"], "budgets.gpu") - 1024}
    assert task.changed(less).refusal() is not None, "the smallest, in whole KiB"
    poor = fixes(task, SIZES | {"gpu": 200_000})[-1]
    assert poor.values == {}
    assert "a machine with" in poor.text
    assert "GPU memory" in poor.text
    # The least change of a field.
    budgets = Budgets(1 << 30, 1 << 30, None, {})
    d, t = tiny.data(sequence_length=256), tiny.training(chunk_tokens=256, global_batch_size=1)
    roomy = request(tiny.recipe(data=d, train=t), budgets, "cpu", ())
    need = [roomy.changed({"train.chunk_tokens": n, "budgets.gpu": 1}).refusal() for n in (256, 128, 64)]
    wanted = [error.need_bytes for error in need]
    assert wanted[0] > wanted[1] > wanted[2]
    task = roomy.changed({"budgets.gpu": wanted[1]})
    assert Change({"train.chunk_tokens": 128}, "shorter chunks") in fixes(task, SIZES)
    # Changes are checked as recipes are.
    assert task.changed({"budgets.ram": "2KiB"}).budgets.ram == 2048
    assert task.changed({"train.lr": 0.5, "data.sequence_length": 9}).recipe.data.sequence_length == 9
    with pytest.raises((UserError, ValueError), match=r"train\.global_batch_size: 0"):
        task.changed({"train.global_batch_size": 0})


@pytest.mark.long
def test_the_best_change_is_faster_per_token() -> None:
    budgets = Budgets(600_000, 800_000, 1 << 30, {})
    t = tiny.training(activation_checkpointing="auto", kv_window="auto", global_batch_size=1)
    task = request(tiny.recipe(train=t), budgets, "cpu", ())
    found, tokens = task.search(GENERIC), 48
    best = best_change(task, GENERIC, found, tokens)
    assert best["gain"] >= 1.02
    assert best["gain"] == pytest.approx(best["tokens_per_s"] / (tokens / found.best.step_s))
    assert best["text"]
