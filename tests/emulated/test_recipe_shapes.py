"""Every recipe with what its plan for its own machine uses, on a small model, hybrids of layers that attend and layers
that carry a state, and idle experts: the losses, norms and weights of the CPU,
no two accesses of memory that nothing orders, and under random delays of all streams and lanes the same bits."""

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_plans
import torch
from computes import emulator
from torch import Tensor

from penstock.app.planning.plan import recipe_task
from penstock.app.recipes.recipe import load_recipe
from penstock.engine.config import ModelConfig, Recipe, TrainConfig
from penstock.engine.hf.config import model_config
from penstock.engine.plan.plan import Plan
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.validation import validate
from penstock.storage.files.errors import BudgetError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
CUDA = torch.device("cuda", 0)
STEPS, SEEDS, DELAY_US = 3, range(1, 23), 200
LOSS, NORM, WEIGHT, WEIGHT_RMS = 1e-6, 1e-5, 5e-2, 1e-3
"""How far float32 sums in another order may take a run: relative, and weights in learning rates, as AdamW's first
updates are of that size whatever the gradient's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What `tiny.session` is given, and the plan that comes of it."""

    sections: dict[str, Any]
    features: frozenset[str] | None = None


def small_model(model: ModelConfig) -> ModelConfig:
    """Of the recipe's type, with its rotary tables and its kind of experts."""
    overrides = {
        name: value for name, value in model.overrides.items() if name not in ("num_local_experts", "sliding_window")
    }
    if "num_local_experts" in model.overrides:
        overrides |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}
        overrides["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if model.model_type == "qwen3_next":
        overrides |= tiny.HYBRID
    shape = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
    return replace(model, path=None, **shape, num_heads=4, num_kv_heads=2, head_dim=8, overrides=overrides)


def small_training(recipe: Recipe, plan: Plan) -> TrainConfig:
    """The recipe's settings that a plan depends on, with as many micro-batches and chunks as show them."""
    many = plan.problem.micro_batches > 1
    return tiny.training(
        steps=STEPS,
        global_batch_size=4 if many else 1,
        micro_batch_size=1,
        chunk_tokens=48 if plan.window_chunks == 1 else 7,
        gradient_dtype=recipe.train.gradient_dtype,
        weight_decay=recipe.train.weight_decay,
        activation_checkpointing="full" if plan.recomputed else "auto",
        split_layers=recipe.train.split_layers,
        expert_groups=None if recipe.train.split_layers is None else 2,
        kv_window="streamed" if plan.streamed else "whole",
        validation_sequences=2,
        validate_every=STEPS,
        deterministic=True,
    )


def candidates(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    sizes = [int(100_000 * 1.08**n) for n in range(48)]
    floors = [(tiny.FLOOR, tiny.FLOOR), (tiny.FLOOR, "1GiB"), ("1GiB", tiny.FLOOR), ("1GiB", "1GiB")]
    pairs = itertools.chain(floors, *(((gpu, ram) for gpu in (tiny.FLOOR, *sizes)) for ram in (tiny.FLOOR, "1GiB")))
    for gpu, ram in itertools.chain(pairs, itertools.product(sizes, sizes)):
        yield {"gpu": gpu, "ram": ram, **choice}


@functools.cache
def shape_of(path: Path) -> Shape:
    recipe = load_recipe(path)
    on, task = recipe_task(recipe, recipe.machine or "rtx4090-64")
    try:
        task = task.settled()
        plan = task.search(on).plan
    except BudgetError as refusal:  # planned with compiled layers' sizes, which this machine may not know
        sizes = replace(task.budgets, gpu=refusal.need_bytes)
        plan = replace(task, budgets=sizes).search(on).plan
    wanted = frozenset(tiny_plans.features(plan))
    sections: dict[str, Any] = {
        "m": small_model(recipe.model),
        "d": tiny.data(packing=recipe.data.packing, validation_documents=4),
        "t": small_training(recipe, plan),
    }
    adapter = replace(recipe.adapter, rank=4) if recipe.adapter.is_used else None
    run = tiny.recipe(model=sections["m"], data=sections["d"], train=sections["t"], adapter=recipe.adapter)
    split, groups = run.train.split_layers, run.train.expert_groups or 1
    spec = tiny.spec_of(model_config(run, run.model.vocab_size), (), adapter, split, run.model.frozen_format, groups)
    group = 2 if plan.num_groups > 1 else 0
    choice = {name: getattr(plan.choice, name) for name in ("gpu_first", "ram_first", "offloaded_graphs")}
    choice["group"] = group
    seen = set()
    for budgets in candidates(choice):
        try:
            found = frozenset(tiny_plans.features(tiny.plan_of(spec, run, **budgets)))
        except (BudgetError, AssertionError):
            continue
        seen.add(found)
        if wanted <= found and len(found - wanted) <= 1:  # a small model's state may need one tier more
            return Shape(sections | budgets | {"adapter": adapter}, found)
    raise AssertionError(f"no budgets give a plan with {sorted(wanted)}; there are {[sorted(one) for one in seen]}")


def train(session: Session) -> tuple[list[float], list[float], float]:
    """Losses, gradient norms and the validation loss at the end."""
    metrics = [train_step(session) for _ in range(STEPS)]
    validation = validate(session).loss
    session.finish()
    return [m.loss for m in metrics], [m.grad_norm for m in metrics], validation


def hybrid(model_type: str, overrides: dict[str, Any], **budgets: Any) -> Shape:
    t = tiny.training(
        steps=STEPS,
        chunk_tokens=7,
        micro_batch_size=1,
        validation_sequences=2,
        validate_every=STEPS,
        deterministic=True,
    )
    model = tiny.model(model_type=model_type, overrides=overrides)
    return Shape({"m": model, "d": tiny.data(packing="best_fit", validation_documents=4), "t": t, **budgets})


def idle_experts() -> Shape:
    """A mixture of which each step leaves groups of experts idle, which are skipped."""
    overrides = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    few = tiny.training(
        steps=STEPS, global_batch_size=2, split_layers="experts", expert_groups=4, skip_idle_experts=True,
        validation_sequences=2, validate_every=STEPS, deterministic=True,
    )  # fmt: skip
    model, data = (
        tiny.model(model_type="qwen3_moe", overrides=overrides),
        tiny.data(sequence_length=4, validation_documents=4),
    )
    return Shape({"m": model, "d": data, "t": few, "gpu": tiny.FLOOR, "ram": tiny.FLOOR, "group": 1})


OTHERS = {
    "idle experts": idle_experts,
    "qwen3_next": lambda: hybrid("qwen3_next", tiny.HYBRID, gpu=tiny.FLOOR, ram=tiny.FLOOR),
    "falcon_h1": lambda: hybrid("falcon_h1", tiny.FALCON, gpu=tiny.FLOOR),
}
SHAPES = {path.stem: functools.partial(shape_of, path) for path in RECIPES} | OTHERS


@pytest.mark.parametrize("name", SHAPES)
def test_it_trains_as_on_the_cpu_and_delays_change_no_bit(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]()
    with tiny.session(tmp_path / "cpu", **shape.sections) as session:
        losses, norms, validation = train(session)
        weights = tiny.parameters(session.store, session.spec)

    def on_cuda(dtype: str, seed: int) -> tuple[str, Any, dict[str, Tensor]]:
        """A digest of the state, what `train` returns, and the master weights."""
        sections = shape.sections | {"t": replace(shape.sections["t"], compute_dtype=dtype)}
        folder = tmp_path / f"{dtype}-{seed}"
        with emulator.delays(seed, DELAY_US if seed else 0), tiny.session(folder, **sections, device=CUDA) as session:
            if dtype == "float32" and shape.features is not None:  # the same budgets hold more in half precision
                assert frozenset(tiny_plans.features(session.plan)) == shape.features
            if seed:
                tiny.delay(session, random.Random(seed))
            found = train(session)
            return tiny.digest(session.store), found, tiny.parameters(session.store, session.spec)

    with emulator.races() as races:
        digest, found, cuda_weights = on_cuda("float32", 0)
    assert races == []
    assert found[0] == pytest.approx(losses, rel=LOSS)
    # A sum on the other side of a rounding to bfloat16 is 2^-8 of one gradient, of thousands.
    rounded = shape.sections["t"].gradient_dtype == "bfloat16"
    assert found[1] == pytest.approx(norms, rel=10 * NORM if rounded else NORM)
    assert found[2] == pytest.approx(validation, rel=LOSS)
    lr = shape.sections["t"].lr
    apart = [(cuda_weights[name] - weights[name]).double() / lr for name in weights]
    furthest, size = max(float(part.abs().max()) for part in apart), sum(part.numel() for part in apart)
    rms = (sum(float(part.square().sum()) for part in apart) / size) ** 0.5
    print(f"{name}: {sorted(shape.features or ())}: weights within {furthest:.1e} of the learning rate, rms {rms:.1e}")
    assert furthest <= WEIGHT
    assert rms <= WEIGHT_RMS

    half_digest, half, _ = on_cuda("bfloat16", 0)
    assert half[0] == pytest.approx(losses, rel=2**-8)
    for seed in SEEDS:
        dtype, expected = ("bfloat16", (half_digest, half)) if seed % 3 == 0 else ("float32", (digest, found))
        assert on_cuda(dtype, seed)[:2] == expected, f"{dtype}, delays by seed {seed}"
