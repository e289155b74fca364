"""A model trained for six steps with its state in all three tiers, beside plain PyTorch on this card: for gpu-check.

Both start from the same drawn weights and train on the same rows, the same ones at every step, so that the loss falls
by much more than rounding moves it. Both compute in bfloat16 with float32 master weights, moments and sums of
gradients, clip by the global norm and step with AdamW. They differ in kernels (attention cut into chunks and merged,
compiled layers) and with that in the rounding of bfloat16 results, 2^-9 each.

What is asked of every step: a loss within LOSS_TOLERANCE of the fall of plain PyTorch's loss over the steps, and a
gradient norm within NORM_TOLERANCE. Measured on a CPU with 0.85M parameters (SMALL): rounding alone moves losses by up
to 0.04 % of the fall and norms by 0.4 %; a learning rate a tenth too high moves losses by 3.4 %.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.parts.cases import QWEN3_600M, TINY, shape
from benchmarks.parts.session import DrawnState, loader_of, open_drawn
from benchmarks.parts.setup import Setup, plan_request, random_model
from penstock.app.bench.plain import PlainBatch, plain_steps
from penstock.engine.config import ModelConfig, Recipe, TrainConfig
from penstock.engine.forecast.least import need
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine.budgets import free_budgets
from penstock.engine.machine.device import resolve_device
from penstock.engine.machine.limits import free_disk
from penstock.engine.model.spec import ModelSpec, layouts
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import FP32, PlanOptions
from penstock.engine.train import train_step
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.tier.readers import select_readers

STEPS = 6
LOSS_TOLERANCE = 0.02
"""Of the fall of the loss from the first step to the last."""
NORM_TOLERANCE = 0.05
TIERS = ("gpu", "ram", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """A model and its batch."""

    name: str
    model: ModelConfig
    parameters: int
    """About so many."""
    rows: int = 2
    row_tokens: int = 4096
    chunk_tokens: int = 2048
    lr: float = 2e-4
    part: str = "32MiB"
    """storage.part_bytes."""

    @property
    def plain_bytes(self) -> int:
        """GPU memory that plain PyTorch takes: weights, masters, moments, gradients twice, one row's logits."""
        assert self.model.vocab_size is not None
        return 24 * self.parameters + 16 * self.row_tokens * self.model.vocab_size + (2 << 30)


QWEN25_1_5B = shape("qwen2", 28, 1536, 8960, (12, 2), 128, 151936, tie_embeddings=True)
_70M = replace(QWEN3_600M, num_layers=12, hidden_size=512, intermediate_size=1536, vocab_size=32768)
SMOKES = (
    Smoke(name="Qwen2.5-1.5B", model=QWEN25_1_5B, parameters=1_550_000_000),
    Smoke(name="Qwen3-0.6B", model=QWEN3_600M, parameters=600_000_000),
    Smoke(name="Qwen3 shape, 70M", model=_70M, parameters=70_000_000, row_tokens=1024, chunk_tokens=512),
)
"""Largest first; the first that this machine holds is run."""
SMALL = Smoke(
    name="tiny",
    model=replace(TINY, num_layers=4, hidden_size=128, intermediate_size=384, vocab_size=1024, head_dim=32),
    parameters=850_000,
    row_tokens=128,
    chunk_tokens=64,
    lr=1e-3,
    part="64KiB",
)
CHOICE = PlanOptions(gpu_first="blocks", ram_first="state")
CAPACITY = {"gpu": 0.5, "ram": 0.6}
"""Of all state's bytes, what a tier has beside what the plan needs there at least: for state, and in RAM before that
for weights and gradients of what is not on the GPU."""


def report(**values: Any) -> None:
    """Print a finding at once, for what may end this before its time."""
    print(json.dumps(values), flush=True)


def choose(folder: Path, device: torch.device) -> Setup:
    """The largest that GPU, RAM and drive hold. Raises UserError where none is."""
    free, disk = free_budgets(device), free_disk(folder)
    for smoke in SMOKES:
        if smoke.plain_bytes <= free.gpu and 24 * smoke.parameters <= disk:
            with suppress(BudgetError):
                return prepare(smoke, folder, device)
    raise UserError(f"no smoke test fits {free.gpu:,} bytes of GPU, {free.ram:,} of RAM, {disk:,} of disk")


def modelled(smoke: Smoke, device: torch.device, compile: str = "auto") -> tuple[Recipe, ModelSpec]:
    """Its recipe and model."""
    return random_model(
        smoke.model,
        smoke.row_tokens,
        smoke.rows,
        part_bytes=smoke.part,
        lr=smoke.lr,
        steps=STEPS,
        global_batch_size=smoke.rows,
        chunk_tokens=smoke.chunk_tokens,
        device=device.type,
        compile=compile,
    )


def placed(task: PlanRequest) -> Plan:
    """A plan with state in each tier, by CAPACITY. Raises BudgetError where GPU or RAM has less than that."""
    problem = task.problem(task.chunks[-1])
    state = sum(len(problem.state_kinds) * FP32 * buffer.numel for buffer in problem.buffers)
    for tier, share in CAPACITY.items():
        least = need(problem, CHOICE, tier)
        if least is None:
            break
        had, size = getattr(problem, f"{tier}_budget"), least + int(share * state)
        if size > had:
            raise BudgetError(f"{tier}: {size:,} bytes are needed, {had:,} are free")
        changed: dict[str, Any] = {f"{tier}_budget": size}
        problem = replace(problem, **changed)
    return make_plan(problem, CHOICE)


def prepare(smoke: Smoke, folder: Path, device: torch.device, compile: str = "auto") -> Setup:
    """Its plan on this machine. Raises BudgetError."""
    recipe, spec = modelled(smoke, device, compile)
    readers = select_readers("auto", device, [folder])
    plan = placed(plan_request(recipe, spec, free_budgets(device), device, readers))
    return Setup(name=smoke.name, recipe=recipe, spec=spec, plan=plan, device=device, readers=readers)


def penstock(setup: Setup, folder: Path) -> dict[str, Any]:
    """Losses, gradient norms and seconds of the steps."""
    steps = []
    with open_drawn(setup, folder)[1] as session:
        for _ in range(STEPS):
            metrics = train_step(session)
            steps.append((metrics.loss, metrics.grad_norm, metrics.step_s))
            report(penstock=_columns(steps))
        session.executor.drain()
    return _columns(steps)


def plain(setup: Setup, folder: Path) -> dict[str, Any]:
    """The same of plain PyTorch, from the weights that `open_drawn` draws, float32, by the model's own names."""
    loader = loader_of(setup, folder)
    batches = [[PlainBatch(batch.ids, batch.labels) for batch in loader.next_step()] for _ in range(STEPS)]
    flat, drawn = layouts(setup.spec), DrawnState(setup.plan, setup.spec.buffers)
    weights = {name: values for buffer in flat for name, values in drawn.weights(buffer).items()}
    steps = []
    # cuDNN's kernel is one of those that Penstock chooses among: not what it is compared with.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for step in plain_steps(setup.spec.config, batches, setup.recipe.train, setup.device, weights):
            steps.append(step)
            report(plain=_columns(steps))
    return _columns(steps)


def _columns(steps: Sequence[tuple[float, float, float]]) -> dict[str, list[float]]:
    losses, norms, seconds = zip(*steps, strict=True)
    return {"losses": list(losses), "grad_norms": list(norms), "steps_s": list(seconds)}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What is further apart than rounding explains, in words; nothing where all is well."""
    numbers = [*ours["losses"], *theirs["losses"], *ours["grad_norms"], *theirs["grad_norms"]]
    if not all(math.isfinite(number) for number in numbers):
        return ["a loss or a gradient norm is not finite"]
    fall = theirs["losses"][0] - theirs["losses"][-1]
    if fall <= 0:
        return [f"plain PyTorch's loss does not fall ({theirs['losses'][0]:.4f} to {theirs['losses'][-1]:.4f})"]
    wrong = []
    for number, (a, b) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), start=1):
        if abs(a - b) > LOSS_TOLERANCE * fall:
            wrong.append(f"step {number}: loss {a:.5f} and {b:.5f}, {abs(a - b) / fall:.1%} of the fall apart")
    for number, (a, b) in enumerate(zip(ours["grad_norms"], theirs["grad_norms"], strict=True), start=1):
        if abs(a - b) > NORM_TOLERANCE * b:
            wrong.append(f"step {number}: gradient norm {a:.5f} and {b:.5f}, {abs(a / b - 1):.1%} apart")
    return wrong


def state_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of master weights and moments that live in each tier."""
    buffers = plan.buffers.values()
    return {tier: sum(12 * b.numel for b in buffers if b.state == tier) for tier in TIERS}


def check(setup: Setup, folder: Path) -> dict[str, Any]:
    """Everything: figures, and in `wrong` what is not as it should be."""
    held = state_bytes(setup.plan)
    report(model=setup.name, parameters=setup.spec.num_params, state_bytes=held)
    ours = penstock(setup, folder)
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    theirs = plain(setup, folder)
    wrong = [f"no state lives in the {tier} tier" for tier in TIERS if not held[tier]] + compare(ours, theirs)
    return {"penstock": ours, "plain": theirs, "wrong": wrong}


def main(small: bool = False) -> None:
    """Check this card in the current folder. Exits with words where something is wrong, or nothing fits."""
    device, folder = resolve_device(TrainConfig()), Path.cwd()
    wrong = check(prepare(SMALL, folder, device) if small else choose(folder, device), folder)["wrong"]
    report(wrong=wrong)
    if wrong:
        sys.exit(f"{len(wrong)} figures beyond the tolerance, the first: {wrong[0]}")
