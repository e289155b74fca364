"""Sessions on the CPU whose steps are of given batches, and their steps in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from benchmarks.parts.session import open_drawn
from benchmarks.parts.setup import Setup, plan_request, random_model
from penstock.app.console.working import Working
from penstock.engine.config import ModelConfig
from penstock.engine.data.loader import DataLoader
from penstock.engine.machine.budgets import Budgets
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.tier.readers import select_readers

_BUDGETS = Budgets(1 << 40, 1 << 40, None, {})
"""More than any needs: everything stays in memory, and pages that padding would have filled are never touched."""


class Turns(NamedTuple):
    """By session, of each of its steps in order."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    """Of the processor, which other work on the machine does not lengthen."""


def in_turn(sessions: Mapping[str, Session], rounds: int, shown: Working, says: Callable[[str], str]) -> Turns:
    """Time `rounds` steps of each, one after the other; `says` what a step of a session is."""
    turns = Turns({name: [] for name in sessions}, {name: [] for name in sessions})
    for number in range(1, rounds + 1):
        for name, session in sessions.items():
            with shown.step(f"round {number} of {rounds}: {says(name)}"):
                before_s = time.process_time()
                turns.seconds[name].append(train_step(session).step_s)
                turns.cpu_seconds[name].append(time.process_time() - before_s)
    return turns


class _Given:
    """A loader whose steps are all of the same micro-batches."""

    def __init__(self, loader: DataLoader, step: Sequence[MicroBatch]) -> None:
        self._loader, self._step = loader, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        return list(self._step)


def open_given(
    folder: Path, model: ModelConfig, step: Sequence[MicroBatch], chunk_tokens: int, **train: Any
) -> Session:
    """A session of a random model in float32 whose steps are all of the micro-batches `step`, of a row each."""
    folder.mkdir()
    row = len(step[0].ids)
    recipe, spec = random_model(
        model,
        row,
        2,
        steps=10**6,
        global_batch_size=len(step),
        chunk_tokens=min(chunk_tokens, row),
        device="cpu",
        compile="off",
        compute_dtype="float32",
        activation_checkpointing="selective",
        kv_window="whole",
        **train,
    )
    device = torch.device("cpu")
    readers = select_readers("auto", device, [folder])
    plan = plan_request(recipe, spec, _BUDGETS, device, readers).plan(PlanOptions())
    setup = Setup(name="small", recipe=recipe, spec=spec, plan=plan, device=device, readers=readers)
    session = open_drawn(setup, folder)[1]
    session.loader = cast(DataLoader, _Given(session.loader, step))
    return session
