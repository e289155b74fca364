"""Short conversations packed into long rows beside one of them per row, the rest padding: docs/results/packing.md.

The same documents in the same order make a step of either, on the same model with the same chunks: packed they fill one
row or a few, apart each has a row of its own, whose padding is at its end. Both are trained by `train_step`, in turn.
What a trained token costs in one over what it costs in the other is the ratio: 1 where padding costs nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.parts.cases import shape
from benchmarks.parts.session import open_drawn
from benchmarks.parts.setup import Setup, plan_request, random_model
from penstock.app.bench.process import scratch, show
from penstock.app.console.working import Working
from penstock.engine.data.loader import DataLoader
from penstock.engine.machine.budgets import Budgets
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.tier.readers import select_readers

VOCAB = 512
MODEL = shape("qwen3", 2, 128, 256, (4, 2), 32, VOCAB)
_BUDGETS = Budgets(1 << 40, 1 << 40, None, {})
"""More than either needs: everything stays in memory, and pages that padding would have filled are never touched."""


def main(
    context: int = 32_768,
    document: int = 512,
    chunk: int = 2048,
    rounds: int = 3,
    json: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Time --rounds steps of each over one packed row's documents; print the ratio of seconds per trained token.

    `cpu_ratio` is in seconds of the processor, which other work on the machine does not lengthen.
    """
    if context < 2 * document or document < 2:
        raise UserError(f"--context {context}: give room for two documents of {document} tokens, of at least 2 each")
    rows = {"packed": 1, "apart": context // document}
    with scratch(folder) as path, contextlib.ExitStack() as stack, Working() as shown:
        with shown.step("preparing"):
            opened = {
                name: stack.enter_context(_open(Path(path) / name, context, document, chunk, count))
                for name, count in rows.items()
            }
        times: dict[str, list[float]] = {name: [] for name in opened}
        cpu_times: dict[str, list[float]] = {name: [] for name in opened}
        with shown.step("the first steps, which are not timed"):
            tokens = {name: train_step(session).tokens for name, session in opened.items()}  # touches the memory
        for number in range(1, rounds + 1):
            for name, session in opened.items():
                with shown.step(f"round {number} of {rounds}: a step of rows that are {name}"):
                    before_s = time.process_time()
                    times[name].append(train_step(session).step_s)
                    cpu_times[name].append(time.process_time() - before_s)
        computed = {name: _computed(session) for name, session in opened.items()}
    assert len(set(tokens.values())) == 1, "both train the same documents"
    seconds = {name: statistics.median(result) for name, result in times.items()}
    cpu_seconds = {name: statistics.median(result) for name, result in cpu_times.items()}
    report = {
        "ratio": statistics.median(a / p for a, p in zip(times["apart"], times["packed"], strict=True)),
        "cpu_ratio": cpu_seconds["apart"] / cpu_seconds["packed"],
        "documents": rows["apart"],
        "trained_tokens": tokens["packed"],
        "steps_s": times,
        "cpu_s": cpu_seconds,
        "computed_tokens": computed,
        "padded_tokens": rows["apart"] * (context - document),
    }
    line = (
        f"{rows['apart']} conversations of {document:,} tokens: one per row of {context:,} costs {report['ratio']:.2f} "
        f"x what packed ones cost a trained token ({seconds['apart']:.2f} s and {seconds['packed']:.2f} s a step); "
        f"{report['cpu_ratio']:.2f} x in seconds of the processor"
    )
    show(report, line, as_json=json)
    return report


class _Conversations:
    """A loader of steps of the same random documents, packed into rows or each in one of its own."""

    def __init__(self, loader: DataLoader, context: int, document: int, rows: int) -> None:
        self._loader, self._context, self._rows = loader, context, rows
        self._ids = torch.randint(VOCAB, (context // document, document), generator=torch.Generator().manual_seed(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        return [self._row(ids) for ids in self._ids.chunk(self._rows)]

    def _row(self, documents: torch.Tensor) -> MicroBatch:
        """`documents` [count, tokens] end to end, then padding."""
        count, tokens = documents.shape
        filled = count * tokens
        ids = torch.zeros(self._context, dtype=torch.int64)
        ids[:filled] = documents.reshape(-1)
        labels = torch.full((self._context,), IGNORE_LABEL)
        ends = torch.full((count, 1), IGNORE_LABEL)
        labels[:filled] = torch.cat([documents[:, 1:], ends], 1).reshape(-1)
        positions = torch.arange(self._context)
        positions[:filled] %= tokens
        positions[filled:] -= filled
        return MicroBatch(
            ids=ids,
            labels=labels,
            positions=positions,
            documents=list(range(0, min(filled + 1, self._context), tokens)),
            num_targets=count * (tokens - 1),
            lengths=[tokens] * count,
            filled=filled if filled < self._context else None,
        )


def _open(folder: Path, context: int, document: int, chunk_tokens: int, rows: int) -> Session:
    folder.mkdir()
    recipe, spec = random_model(
        MODEL,
        context,
        2,
        steps=10**6,
        global_batch_size=rows,
        chunk_tokens=min(chunk_tokens, context),
        device="cpu",
        compile="off",
        compute_dtype="float32",
        activation_checkpointing="selective",
        kv_window="whole",
    )
    device = torch.device("cpu")
    readers = select_readers("auto", device, [folder])
    plan = plan_request(recipe, spec, _BUDGETS, device, readers).plan(PlanOptions())
    setup = Setup(name="small", recipe=recipe, spec=spec, plan=plan, device=device, readers=readers)
    session = open_drawn(setup, folder)[1]
    session.loader = cast(DataLoader, _Conversations(session.loader, context, document, rows))
    return session


def _computed(session: Session) -> int:
    """Tokens that a layer computes in a step."""
    return sum(chunk.end - chunk.start for chunk in session.runtime.data(session.step).cut.values())
