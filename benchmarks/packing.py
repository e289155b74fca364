"""Short conversations packed into long rows beside one of them per row, the rest padding: docs/results/packing.md.

The same documents in the same order make a step of either, on the same model with the same chunks: packed they fill one
row or a few, apart each has a row of its own, whose padding is at its end. Both are trained by `train_step`, in turn.
What a trained token costs in one over what it costs in the other is the ratio: 1 where padding costs nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.cases import shape
from benchmarks.parts.turns import in_turn, open_given
from penstock.app.bench.process import scratch, show
from penstock.app.console.working import Working
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

VOCAB = 512
MODEL = shape("qwen3", 2, 128, 256, (4, 2), 32, VOCAB)


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
                name: stack.enter_context(open_given(Path(path) / name, MODEL, _step(context, document, count), chunk))
                for name, count in rows.items()
            }
        with shown.step("the first steps, which are not timed"):
            tokens = {name: train_step(session).tokens for name, session in opened.items()}  # touches the memory
        times, cpu_times = in_turn(opened, rounds, shown, "a step of rows that are {}".format)
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


def _step(context: int, document: int, rows: int) -> list[MicroBatch]:
    """The same random documents, packed into a row or each in one of its own."""
    ids = torch.randint(VOCAB, (context // document, document), generator=torch.Generator().manual_seed(0))
    return [_row(some, context) for some in ids.chunk(rows)]


def _row(documents: torch.Tensor, context: int) -> MicroBatch:
    """`documents` [count, tokens] end to end, then padding."""
    count, tokens = documents.shape
    filled = count * tokens
    ids = torch.zeros(context, dtype=torch.int64)
    ids[:filled] = documents.reshape(-1)
    labels = torch.full((context,), IGNORE_LABEL)
    ends = torch.full((count, 1), IGNORE_LABEL)
    labels[:filled] = torch.cat([documents[:, 1:], ends], 1).reshape(-1)
    positions = torch.arange(context)
    positions[:filled] %= tokens
    positions[filled:] -= filled
    return MicroBatch(
        ids=ids,
        labels=labels,
        positions=positions,
        documents=list(range(0, min(filled + 1, context), tokens)),
        num_targets=count * (tokens - 1),
        lengths=[tokens] * count,
        filled=filled if filled < context else None,
    )


def _computed(session: Session) -> int:
    """Tokens that a layer computes in a step."""
    return sum(chunk.end - chunk.start for chunk in session.runtime.data(session.step).cut.values())
