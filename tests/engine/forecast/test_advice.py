"""Advice: every change that is suggested has been tried, and applied it is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.config import DataConfig, StorageConfig, TrainConfig, parse_bytes
from penstock.engine.forecast.advice import Change, best_change, fits, fixes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.presets import GENERIC
from penstock.storage.errors import UserError

SIZES = {"gpu": 1 << 40, "ram": 1 << 40, "nvme": 1 << 40}


def a_task(d: DataConfig, t: TrainConfig, s: StorageConfig, budgets: Budgets, **changes: Any) -> PlanRequest:
    recipe = tiny.recipe(model=tiny.model(**changes), data=d, train=t, storage=s)
    spec = tiny.spec_of(model_config(recipe, None))
    return PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type="cpu")


tasks = st.builds(
    a_task,
    d=st.builds(tiny.data, sequence_length=st.sampled_from([32, 48, 200])),
    t=st.builds(
        tiny.training,
        global_batch_size=st.sampled_from([2, 4]),
        micro_batch_size=st.sampled_from([1, 2]),
        chunk_tokens=st.sampled_from([None, 16, 40]),
        activation_checkpointing=st.sampled_from(["auto", "full", "selective", "none"]),
        kv_window=st.sampled_from(["auto", "whole", "streamed"]),
        gradient_dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    s=st.builds(
        tiny.storage,
        part_bytes=st.sampled_from(["16KiB", "64KiB"]),
        keep_last=st.sampled_from([1, 3]),
        checkpoint_every=st.just(1),
    ),
    budgets=st.builds(
        Budgets,
        gpu=st.integers(100_000, 2_000_000),
        ram=st.integers(100_000, 1_000_000),
        nvme=st.none() | st.integers(1_000_000, 5_000_000),
        why=st.just({}),
    ),
    tie_embeddings=st.booleans(),
)


@sampled(3, 40, derandomize=True)
@given(tasks)
def test_every_suggested_change_is_accepted(task: PlanRequest) -> None:
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
        assert fits(changed)
        changed.search(GENERIC)
        assert all(f"{name}=" in word for name, word in zip(change.values, change.to_json()["set"], strict=True))
    assert len({tuple(change.values) for change in changes}) == len(changes)


def test_what_the_machine_lacks_is_a_change_of_the_machine() -> None:
    budgets = Budgets(100_000, 1 << 30, None, {})
    task = a_task(tiny.data(), tiny.training(), tiny.storage(), budgets)
    roomy = fixes(task, SIZES)[-1]
    assert list(roomy.values) == ["budgets.gpu"]
    assert fits(task.changed(roomy.values))
    assert re.fullmatch(r"\d+[KMG]iB", roomy.values["budgets.gpu"])
    less = {"budgets.gpu": parse_bytes(roomy.values["budgets.gpu"], "budgets.gpu") - 1024}
    assert not fits(task.changed(less)), "the smallest, in whole KiB"
    poor = fixes(task, SIZES | {"gpu": 200_000})[-1]
    assert poor.values == {}
    assert "a machine with" in poor.text
    assert "GPU memory" in poor.text


def test_the_least_change_of_a_field_is_suggested() -> None:
    budgets = Budgets(1 << 30, 1 << 30, None, {})
    d, t = tiny.data(sequence_length=256), tiny.training(chunk_tokens=256, global_batch_size=1)
    roomy = a_task(d, t, tiny.storage(), budgets)
    need = [roomy.changed({"train.chunk_tokens": n, "budgets.gpu": 1}).refusal() for n in (256, 128, 64)]
    assert all(error is not None for error in need)
    wanted = [error.need_bytes for error in need if error is not None]
    assert wanted[0] > wanted[1] > wanted[2]
    task = roomy.changed({"budgets.gpu": wanted[1]})
    assert Change({"train.chunk_tokens": 128}, "shorter chunks") in fixes(task, SIZES)


def test_changes_are_checked_as_recipes_are() -> None:
    task = a_task(tiny.data(), tiny.training(), tiny.storage(), Budgets(1, 1, 1, {}))
    assert task.changed({"budgets.ram": "2KiB"}).budgets.ram == 2048
    assert task.changed({"train.lr": 0.5, "data.sequence_length": 9}).recipe.data.sequence_length == 9
    with pytest.raises((UserError, ValueError), match=r"train\.global_batch_size: 0"):
        task.changed({"train.global_batch_size": 0})


@pytest.mark.long
def test_the_best_change_is_faster_per_token() -> None:
    budgets = Budgets(600_000, 800_000, 1 << 30, {})
    t = tiny.training(activation_checkpointing="auto", kv_window="auto", global_batch_size=1)
    task = a_task(tiny.data(), t, tiny.storage(), budgets)
    found, tokens = task.search(GENERIC), 48
    best = best_change(task, GENERIC, found, tokens)
    assert best["gain"] >= 1.02
    assert best["gain"] == pytest.approx(best["tokens_per_s"] / (tokens / found.best.step_s))
    assert best["text"]
