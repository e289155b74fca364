"""The step of a suite's case in plain PyTorch, where it fits: the cut model, the same batch, the same GPU memory."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from penstock.app.bench.cases import Case
from penstock.app.bench.plain import PlainBatch, compiled_steps, plain_steps
from penstock.app.bench.setup import Setup
from penstock.engine.machine.compilers import layers_compile, optimizer_compiles
from penstock.engine.machine.device import configure

ComputeDtype = Literal["bfloat16", "float32"]


def plain_step(case: Case, setup: Setup, dtype: ComputeDtype) -> dict[str, Any]:
    """`name` of the plain PyTorch that fits the case's budget and `step_s`, the median of its timed steps.

    The one that keeps every activation is tried first, compiled where this machine has the compilers and the case
    compiles, then the one that checkpoints every layer. Both values are None, with the `reason`, where none is timed:
    whatever fails in plain PyTorch costs no figure of the case's own.
    """
    if not case.plain:
        return {"name": None, "step_s": None, "reason": "plain PyTorch not tried"}
    compiles = (case.needs_cuda or case.compiled) and layers_compile(setup.device).ok and optimizer_compiles().ok
    reason = ""
    for name in ("compiled" if compiles else "eager", "plain"):
        settings = configure(setup.device, setup.plan.tiers["gpu"].budget_bytes, deterministic=False)
        try:
            return {"name": name, "step_s": _median_s(name, case, setup, dtype), "reason": ""}
        except Exception as error:
            first, _, _ = str(error).partition("\n")
            how = "does not fit" if isinstance(error, torch.OutOfMemoryError) else f"failed: {type(error).__name__}"
            reason = f"plain PyTorch {how}: {first}"
        finally:
            settings.restore()
            gc.collect()
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
    return {"name": None, "step_s": None, "reason": reason}


def _median_s(name: str, case: Case, setup: Setup, dtype: ComputeDtype) -> float:
    train = replace(setup.recipe.train, compute_dtype=dtype)
    batches = _batches(case, setup.spec.vocab_size)
    given = (setup.spec.config, batches, train, setup.device)
    steps = compiled_steps(*given) if name == "compiled" else plain_steps(*given, checkpointing=name == "plain")
    times = [seconds for _, _, seconds in itertools.islice(steps, case.warm_up + case.timed)]
    return statistics.median_low(times[case.warm_up :])


def _batches(case: Case, vocab_size: int) -> Iterator[list[PlainBatch]]:
    while True:
        yield [PlainBatch(torch.randint(0, vocab_size, (case.row_tokens,))) for _ in range(case.rows)]
