"""Pairs of answers whose prompt is computed once beside the same pairs with it computed for each answer:
docs/results/alignment.md.

The same pairs make a step of either, on the same model, and are trained by `train_step`, in turn. Their loss is the
mean over the answers of each one's mean, by two visits of the head as DPO's has them.
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
from penstock.engine.attention.spans import Documents, Prefix
from penstock.engine.forecast.flops import model_flops
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

VOCAB = 4096


def main(
    prompt: int = 512,
    answer: int = 128,
    pairs: int = 4,
    chunk: int = 512,
    hidden: int = 512,
    layers: int = 4,
    rounds: int = 3,
    json: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Time --rounds steps of each over one row of --pairs; print tokens, FLOPs and seconds of one over the other.

    `cpu_ratio` is in seconds of the processor, which other work on the machine does not lengthen.
    """
    if prompt < 2 or answer < 1 or pairs < 1:
        raise UserError("--prompt: give at least 2 tokens, and for --answer and --pairs at least 1")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(VOCAB, (pairs, prompt + 2 * answer), generator=generator)
    streams = {"twice": _stream(drawn, prompt, answer, 0), "once": _stream(drawn, prompt, answer, prompt - 1)}
    heads = max(2, hidden // 64)
    model = shape("llama", layers, hidden, hidden * 11 // 4, (heads, heads // 2), hidden // heads, VOCAB)
    with scratch(folder) as path, contextlib.ExitStack() as stack, Working() as shown:
        with shown.step("preparing"):
            opened = {
                name: stack.enter_context(
                    open_given(Path(path) / name, model, [stream], chunk, objective="sequence_mean")
                )
                for name, stream in streams.items()
            }
        with shown.step("the first steps, which are not timed"):
            losses = {name: train_step(session).loss for name, session in opened.items()}
        times, cpu_times = in_turn(opened, rounds, shown, "prompts computed {}".format)
        spec = opened["once"].spec
    tokens = {name: len(stream.ids) for name, stream in streams.items()}
    flops = {name: model_flops(spec, stream.lengths, stream.continued) for name, stream in streams.items()}
    report = {
        "losses": losses,
        "tokens": tokens,
        "tokens_ratio": tokens["once"] / tokens["twice"],
        "flops_ratio": flops["once"] / flops["twice"],
        "seconds_ratio": statistics.median(o / t for o, t in zip(times["once"], times["twice"], strict=True)),
        "cpu_ratio": statistics.median(o / t for o, t in zip(cpu_times["once"], cpu_times["twice"], strict=True)),
        "steps_s": times,
    }
    line = (
        f"{pairs} pairs of {prompt:,} + {answer:,} tokens: {tokens['twice']:,} tokens with prompts twice, "
        f"{tokens['once']:,} with prompts once ({report['tokens_ratio']:.3f}); FLOPs {report['flops_ratio']:.3f}, "
        f"seconds {report['seconds_ratio']:.3f} ({statistics.median(times['twice']):.2f} s, "
        f"{statistics.median(times['once']):.2f} s), of the processor {report['cpu_ratio']:.3f}"
    )
    show(report, line, as_json=json)
    return report


def _stream(drawn: torch.Tensor, prompt: int, answer: int, shared: int) -> MicroBatch:
    """The pairs of `drawn` [pairs, prompt and both answers]; second sides leave out `shared` tokens of the prompt."""
    ids, labels, positions, documents, lengths = [], [], [], Documents(), []
    total = 0
    for row in drawn:
        for side in (0, 1):
            whole = torch.cat([row[:prompt], row[prompt + side * answer :][:answer]])
            left_out = side * shared
            next_ = torch.cat([whole[1:], torch.tensor([IGNORE_LABEL])])
            next_[: prompt - 1] = IGNORE_LABEL
            if left_out:
                documents.prefixes.append(Prefix(total, documents[-1], documents[-1] + left_out))
            documents.append(total)
            lengths.append(len(whole) - left_out)
            total += lengths[-1]
            ids.append(whole[left_out:])
            labels.append(next_[left_out:])
            positions.append(torch.arange(left_out, len(whole)))
    return MicroBatch(
        ids=torch.cat(ids),
        labels=torch.cat(labels),
        positions=torch.cat(positions),
        documents=documents,
        num_targets=2 * len(drawn) * answer,
        lengths=lengths,
    )
