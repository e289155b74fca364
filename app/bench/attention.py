"""`penstock bench attention`: one training step of a long sequence against its attention alone in plain torch.

At long context attention is nearly all of a step, so a pipeline that hides everything else takes as long as
`scaled_dot_product_attention`, forward and backward, of as many heads over the whole sequence in one call, once per
layer. Both run in this process, in turn.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from penstock.app.bench.cases import Case, Shape
from penstock.app.bench.process import scratch, show
from penstock.app.bench.setup import choose
from penstock.app.bench.suite_worker import open_case
from penstock.app.console.working import Working
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

TOKENS = 65_536
CHUNK_TOKENS = 4096
SHAPE = Shape("2 layers, 8 heads over 2 of 64", "qwen3", 2, 128, 256, 8, 2, 64, 512)


def bench_attention(
    *,
    tokens: int = TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    rounds: int = 1,
    compile: bool = True,
    json: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Time `rounds` steps over one document of `tokens` tokens and torch's attention in turn; print the ratio.

    Returns `ratio` (median of the rounds' step over attention), `step_s`, `attention_s` (all layers), and the rounds.
    """
    if tokens < 2 * chunk_tokens:
        raise UserError(f"--tokens {tokens}: give at least two chunks, {2 * chunk_tokens}")
    case = Case(
        name="attention",
        shapes=(SHAPE,),
        row_tokens=tokens,
        chunk_tokens=chunk_tokens,
        needs_cuda=False,
        compiled=compile,
    )
    found: list[dict[str, float]] = []
    with scratch(folder) as path, ExitStack() as stack, Working() as shown:
        with shown.step("preparing"):
            setup = choose(case, Path(path))
            _, session = open_case(setup, Path(path), short_steps=1, document_tokens=2 * chunk_tokens)
            stack.enter_context(session)
            train_step(session)  # of short documents: compiles, and leaves a gradient to apply under the next
        for number in range(1, rounds + 1):
            with shown.step(f"round {number} of {rounds}: attention of {tokens:,} tokens alone"):
                alone = _attention_s(session, tokens)
            with shown.step(f"round {number} of {rounds}: a step of {tokens:,} tokens"):
                step = train_step(session).step_s
            found.append({"step_s": step, "attention_s": alone, "ratio": step / alone})
    report: dict[str, Any] = {key: statistics.median(each[key] for each in found) for key in found[0]}
    report |= {"tokens": tokens, "chunk_tokens": chunk_tokens, "model": SHAPE.name, "rounds": found}
    line = (
        f"a step of {tokens:,} tokens takes {report['step_s']:.2f} s, its attention alone in torch "
        f"{report['attention_s']:.2f} s: {report['ratio']:.3f} x"
    )
    show(report, line, as_json=json)
    return report


def _attention_s(session: Session, tokens: int) -> float:
    """Seconds of forward and backward of every layer's heads, each layer in one call over the whole sequence."""
    total_s = 0.0
    for shape in session.spec.attention:
        assert shape is not None
        sizes = ((shape.heads, shape.qk_dim), (shape.kv_heads, shape.qk_dim), (shape.kv_heads, shape.v_dim))
        q, k, v = (torch.randn(1, n, tokens, d, dtype=torch.bfloat16, requires_grad=True) for n, d in sizes)
        dout = torch.randn(1, shape.heads, tokens, shape.v_dim, dtype=torch.bfloat16)
        start = time.perf_counter()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(dout)
        total_s += time.perf_counter() - start
    return total_s
