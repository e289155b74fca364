"""One training step of a long sequence beside its attention alone in plain torch: docs/results/long-step-cpu.md.

At long context attention is nearly all of a step, so a pipeline that hides everything else takes as long as
`scaled_dot_product_attention`, forward and backward, of as many heads over the whole sequence in one call, once per
layer. Both run in this process, in turn.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.parts.cases import Case, shape
from benchmarks.parts.session import open_drawn
from benchmarks.parts.setup import choose
from penstock.app.bench.process import scratch, show
from penstock.app.console.working import Working
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

MODEL = shape("qwen3", 2, 128, 256, (8, 2), 64, 512)


def main(
    tokens: int = 65_536,
    chunk: int = 4096,
    rounds: int = 1,
    compile: bool = True,
    json: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Time --rounds steps over one document of --tokens and torch's attention in turn; print the ratio of the two.

    A step takes minutes at 65,536 tokens.
    """
    if tokens < 2 * chunk:
        raise UserError(f"--tokens {tokens}: give at least two chunks, {2 * chunk}")
    case = Case(shapes={"small": MODEL}, row_tokens=tokens, chunk_tokens=chunk, needs_cuda=False, compiled=compile)
    result: list[dict[str, float]] = []
    with scratch(folder) as path, Working() as shown:
        with shown.step("preparing"):
            setup = choose(case, Path(path))
            _, session = open_drawn(setup, Path(path), short_steps=1, document_tokens=2 * chunk)
        with session:
            with shown.step("a step of short documents"):  # compiles, and leaves a gradient to apply under the next
                train_step(session)
            for number in range(1, rounds + 1):
                with shown.step(f"round {number} of {rounds}: attention of {tokens:,} tokens alone"):
                    alone = _attention_s(session, tokens)
                with shown.step(f"round {number} of {rounds}: a step of {tokens:,} tokens"):
                    step = train_step(session).step_s
                result.append({"step_s": step, "attention_s": alone, "ratio": step / alone})
    report: dict[str, Any] = {key: statistics.median(each[key] for each in result) for key in result[0]}
    report |= {"tokens": tokens, "chunk_tokens": chunk, "rounds": result}
    line = (
        f"a step of {tokens:,} tokens takes {report['step_s']:.2f} s, its attention alone in torch "
        f"{report['attention_s']:.2f} s: {report['ratio']:.3f} x"
    )
    show(report, line, as_json=json)
    return report


def _attention_s(session: Session, tokens: int) -> float:
    """Seconds of forward and backward of every layer's heads, each layer in one call over the whole sequence."""
    total_s = 0.0
    for attended in session.spec.attention:
        assert attended is not None
        heads = (attended.heads, attended.kv_heads, attended.kv_heads)
        widths = (attended.qk_dim, attended.qk_dim, attended.v_dim)
        q, k, v = (
            torch.randn(1, n, tokens, d, dtype=torch.bfloat16, requires_grad=True)
            for n, d in zip(heads, widths, strict=True)
        )
        dout = torch.randn(1, attended.heads, tokens, attended.v_dim, dtype=torch.bfloat16)
        start = time.perf_counter()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(dout)
        total_s += time.perf_counter() - start
    return total_s
