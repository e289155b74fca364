"""Calibration: every kind of op that a plan computes is timed, and what is learnt changes no bit of the training."""

import gc
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from compiled import compiled_afresh
from samples import cases

from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loading import make_loader
from penstock.engine.forecast.costs import Calibration, Conditions, Costs, op_kind
from penstock.engine.forecast.simulate import simulate
from penstock.engine.hf.config import model_config
from penstock.engine.machine.presets import GENERIC
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.runtime.calibrate import calibrate
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.memory import allocate_gpu
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import WHOLE
from penstock.engine.schedule.passes import training
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.tier.manifest import Manifest

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE: dict[str, Any] = {"model_type": "qwen3_moe", "overrides": EXPERTS}
HALVES = ["*embed*", "*.layers.0.*", "*.mlp.*"]
STREAMED: dict[str, Any] = {"kv_window": "streamed", "chunk_tokens": 7}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "whole window": ({}, {}, tiny.FLOOR),
    "attention recomputed": ({}, {"activation_checkpointing": "full"}, tiny.FLOOR),
    "saved graphs": ({}, {"activation_checkpointing": "none"}, "1GiB"),
    "streamed, attention recomputed": ({}, STREAMED | {"activation_checkpointing": "full"}, tiny.FLOOR),
    "streamed, saved graphs": ({}, STREAMED | {"activation_checkpointing": "none"}, "1GiB"),
    "experts": (MOE, {}, tiny.FLOOR),
    "automatic": ({}, {"activation_checkpointing": "auto"}, "1GiB"),
    "frozen halves": ({}, {"freeze": HALVES}, tiny.FLOOR),
    "frozen halves, quantised": ({"frozen_format": "nf4"}, {"freeze": HALVES}, tiny.FLOOR),
}
"""Model, settings, budget of the GPU."""


def measured(
    folder: Path, model: dict[str, Any], settings: dict[str, Any], gpu: str, **choice: Any
) -> tuple[Plan, list[list[int]], Calibration]:
    """A plan, its batch's documents, and what is measured of it."""
    t, cpu = tiny.training(**settings), tiny.CPU
    run = tiny.recipe(model=tiny.model(**model), train=t)
    spec = tiny.spec_of(model_config(run, None), t.freeze, frozen_format=run.model.frozen_format)
    plan = tiny.plan_of(spec, run, gpu, "1GiB")
    plan = make_plan(plan.problem, replace(plan.choice, **choice))
    loader = make_loader(prepare_data(run, folder).corpus, spec, run)
    compute, batch = Compute.make(spec, t, cpu, {}), loader.next_step()
    with closing(Lanes.open(cpu, plan.tiers["gpu"].budget_bytes)) as lanes:
        found = calibrate(plan, compute, t, batch, GENERIC, lanes.executor)
    return plan, [m.documents for m in batch], found


@pytest.mark.parametrize("case", cases(CASES, "frozen halves"))
def test_every_kind_of_compute_op_is_timed(tmp_path: Path, case: str) -> None:
    require_all_timed(*measured(tmp_path, *CASES[case]))


def require_all_timed(plan: Plan, documents: list[list[int]], found: Calibration) -> None:
    costs = Costs(plan, Conditions(GENERIC, documents=documents))
    ops = [op for op in ScheduleBuilder(plan).ops(training(plan, 1, documents=documents)) if op.lane == "compute"]
    kinds = {op_kind(op, costs.representative(op.block)) for op in ops if op.index != WHOLE}
    assert kinds <= found.samples.keys()
    assert all(sample.seconds > 0 for samples in found.samples.values() for sample in samples)
    assert {sample.tokens for samples in found.samples.values() for sample in samples} == {plan.max_chunk_tokens}
    assert all(rate is not None and rate > 0 for rate in (found.h2d_bytes_per_s, found.d2h_bytes_per_s))
    # The update in RAM is measured, which takes a compilation, where the plan has one.
    assert (found.update_params_per_s is not None) == any(b.state in ("ram", "nvme") for b in plan.buffers.values())
    # The plan's step can be told from it.
    calibrated = simulate(Costs(plan, Conditions(GENERIC, found, documents)))
    assert calibrated.busy_s["compute"] > 0
    assert found.to_json()["samples"].keys() == found.samples.keys()


@pytest.mark.parametrize("case", cases(["saved graphs", "streamed, saved graphs"], "streamed, saved graphs"))
def test_what_saved_graphs_take_is_what_is_counted_when_layers_run(tmp_path: Path, case: str) -> None:
    _, settings, gpu = CASES[case]
    plan, documents, found = measured(tmp_path / "data", *CASES[case])
    require_all_timed(plan, documents, found)
    with tiny.session(tmp_path / "run", t=tiny.training(**settings), gpu=gpu) as session:
        train_step(session)
        peak_bytes = session.runtime.layer_ops.graphs_peak_bytes
    tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
    layers = [block for block in plan.blocks if block.saved_inputs]
    assert found.graph_bytes_per_token == {"layers.0": pytest.approx(peak_bytes / tokens / len(layers), rel=0.02)}
    # Found on the meta device: everything that may be saved, keys and values that stay in the window included.
    planned = layers[0].graph_bytes_per_token
    if plan.streamed:  # cut at its attention, a graph holds the layer's output, keys and values as well
        planned += plan.problem.hidden_size * plan.problem.compute_bytes + layers[0].kv_bytes_per_token
    assert 0.9 * planned <= found.graph_bytes_per_token["layers.0"] <= planned + layers[0].lse_bytes_per_token


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_graphs_fit_the_slots_in_which_they_leave(tmp_path: Path, dtype: str) -> None:
    settings = {"activation_checkpointing": "auto", "compute_dtype": dtype}
    _, _, found = measured(tmp_path / "data", {}, settings, "1GiB")
    options: dict[str, Any] = {"gpu": tiny.FLOOR, "offloaded_graphs": "all", "graph_bytes": found.graph_bytes_per_token}
    with tiny.session(tmp_path / "run", t=tiny.training(**settings), **options) as session:
        assert session.plan.offloaded_graphs
        train_step(session)
        assert not session.runtime.layer_ops.outgrown


def test_graphs_are_measured_before_any_is_saved(tmp_path: Path) -> None:
    """A plan that may save graphs and saves none, as it fills the GPU with blocks first, learns what they take."""
    plan, _, found = measured(tmp_path, {}, {"activation_checkpointing": "auto"}, "4MiB", gpu_first="saved activations")
    assert not plan.saved_graphs
    assert set(found.graph_bytes_per_token) == {"layers.0"}


def run(folder: Path, *, steps: int = 2, gpu: str = "1GiB", stop_after: int | None = None, **changes: Any) -> Any:
    """A run, or the rest of one; (its observer, digest of its last generation, what that records)."""
    settings = {"steps": steps, "activation_checkpointing": "auto", "kv_window": "auto"} | changes
    observer, resume = tiny.Silent(stop_after), (folder / "state").exists()
    sections = {"model": tiny.model(num_layers=1), "train": tiny.training(**settings), "storage": tiny.storage()}
    sections["budgets"] = tiny.BudgetConfig(gpu=gpu, ram="64MiB", nvme="1GiB")
    tiny.train_run(folder, observer, resume=resume, **sections)
    return observer, tiny.digest_of(folder), Manifest.read(folder / "state").meta


def test_a_calibrated_run_trains_to_the_same_bits(tmp_path: Path) -> None:
    """Where the choice is fixed: a deterministic run keeps the one that it made before it measured."""
    plain, plain_digest, _ = run(tmp_path / "plain", deterministic=True, calibrate=False)
    fitted, fitted_digest, _ = run(tmp_path / "calibrated", deterministic=True, calibrate=True)
    assert plain.plan["calibration"] is None
    assert fitted.plan["calibration"]["samples"]
    assert fitted.plan["calibrated"]
    assert [m.loss for m in plain.metrics] == [m.loss for m in fitted.metrics]
    assert plain_digest == fitted_digest


@pytest.mark.long
def test_a_resumed_run_keeps_its_recorded_choice(tmp_path: Path) -> None:
    tight = {"gpu": "700KiB", "chunk_tokens": None}
    _, _, recorded = run(tmp_path / "run", stop_after=1, **tight)
    _, _, other = run(tmp_path / "other", gpu="64MiB", chunk_tokens=None)
    assert recorded["plan"] != other["plan"], "or there would be nothing to keep"
    _, _, resumed = run(tmp_path / "run", gpu="64MiB", chunk_tokens=None)
    assert resumed["step"] == 2
    assert resumed["plan"] == recorded["plan"]
    _, _, measured = run(tmp_path / "run", steps=3, gpu="64MiB", chunk_tokens=None, calibrate=True)
    assert measured["plan"] == recorded["plan"]


def test_a_resumed_run_saves_the_graphs_that_it_saved_whatever_is_measured_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, a graph that is saved and one that is computed again may differ by rounding."""
    tight = {"gpu": "750KiB", "calibrate": True, "chunk_tokens": 16}
    first, _, recorded = run(tmp_path / "run", stop_after=1, **tight)

    def other(*args: Any, **options: Any) -> Calibration:
        found = calibrate(*args, **options)
        return replace(found, graph_bytes_per_token={name: 3 * n for name, n in found.graph_bytes_per_token.items()})

    monkeypatch.setattr("penstock.engine.runtime.tuning.calibrate", other)
    anew, *_ = run(tmp_path / "other", stop_after=1, **tight)
    resumed, _, again = run(tmp_path / "run", **tight)
    assert saved(anew) != saved(first), "or there would be nothing to keep"
    assert saved(resumed) == saved(first)
    assert again["graph_bytes"] == recorded["graph_bytes"] == first.plan["calibration"]["graph_bytes_per_token"]


def saved(observer: tiny.Silent) -> list[Any]:
    """What the plan says of how the activations of each block are saved."""
    return [block["activation_checkpointing"] for block in observer.plan["blocks"]]


def test_calibration_gives_the_plans_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and whether Python collects garbage by itself or not: the run's own slots come next."""
    slots: list[weakref.ref[Any]] = []

    def allocate(*args: Any) -> Any:
        gpu = allocate_gpu(*args)
        every = [
            *gpu.slots["gpu.hidden"],
            *gpu.slots["gpu.saved"],
            *(slot for pool in gpu.weights.values() for slot in pool),
        ]
        slots.extend(weakref.ref(slot.untyped_storage()) for slot in every)
        return gpu

    monkeypatch.setattr("penstock.engine.runtime.calibrate.allocate_gpu", allocate)
    gc.disable()
    try:
        measured(tmp_path, *CASES["automatic"])
    finally:
        gc.enable()
    assert slots
    assert not [slot for slot in slots if slot() is not None]


@pytest.mark.long
@pytest.mark.parametrize("freeze", [[], HALVES])
def test_nothing_is_compiled_after_calibration(tmp_path: Path, freeze: list[str]) -> None:
    t = tiny.training(compile="on", freeze=freeze)
    with compiled_afresh() as counters, tiny.session(tmp_path, t=t, ram="16MiB", gpu=tiny.FLOOR) as session:
        runtime, loader = session.runtime, session.loader
        assert runtime.optimizer is not None
        compute = Compute(runtime.runner, runtime.optimizer)
        cursor, batch = loader.cursor, loader.next_step()
        loader.seek(cursor)
        calibrate(session.plan, compute, t, batch, GENERIC, session.executor)
        before = counters["unique_graphs"]
        assert before > 0
        tiny.steps(session, 3)
        assert counters["unique_graphs"] == before


def test_a_compiler_without_room_for_its_files_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("g++ -O3 ...\nfatal error: when writing output to /x/y.i: No space left on device\nmore")

    monkeypatch.setattr("penstock.engine.runtime.tuning.calibrate", fails)
    with pytest.raises(UserError, match=r"torch\.compile has no room for its files.*/x/y\.i: No space left on device;"):
        run(tmp_path / "run", calibrate=True)
