"""The compute device's memory against the sequence's length, measured on the CPU: docs/results/memory-law.md.

A step is run for every length, depth and treatment of the K/V window, each in a process of its own. Two things are
measured: what the arena of the "gpu" tier handed out, and the process's own peak resident memory, less what it was
before the session and less what does not belong to the tier: RAM tier, the step's own tokens, Python's objects (queued
ops, spans). Budgets are the least that the planner accepts, so that nothing of what is left over becomes resident
blocks or saved activations, and malloc gives back what is freed.

The law is 12 x kv_heads x head_dim bytes per token (K and V in bfloat16, their gradients in float32) and a constant,
which is taken from the shortest sequence. Documents are short, so that 131,072 tokens take seconds on two cores: the
window spans the whole sequence wherever documents end.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.cases import shape
from benchmarks.parts.process import call, require_matplotlib, two_plots
from benchmarks.parts.process import save as save_plots
from benchmarks.parts.session import open_drawn
from benchmarks.parts.setup import Setup, random_model
from penstock.app.bench.process import require_folders, resident_bytes, scratch
from penstock.app.console.working import Working
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine.budgets import Budgets
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import KV_SLOTS, PlanOptions
from penstock.engine.runtime import views
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text
from penstock.storage.tier.readers import select_readers

LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
DEPTHS = {"whole": (1, 3), "streamed": (1, 2)}
"""By window; the longest streamed sequences at the first depth only, see `wanted`."""
MODEL = shape("qwen3", 1, 128, 256, (4, 4), 128, 512)
"""Narrow, with the keys and values of Qwen2.5-7B."""
BYTES_PER_TOKEN = 12 * 4 * 128
_MEASURED = ("arena_bytes", "resident_bytes")
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""glibc's malloc returns freed memory at once: else temporaries of many sizes leave holes that look like use."""


def main(save: Path) -> None:
    """Measure at 4k to 128k tokens, ten minutes; write the figures to SAVE.json and their plot to SAVE.svg."""
    measure(save)


def measure(
    save: Path,
    lengths: Sequence[int] = LENGTHS,
    depths: Mapping[str, Sequence[int]] = DEPTHS,
    document_tokens: int = 2048,
    chunk_tokens: int = 1024,
) -> dict[str, Any]:
    """Measure and write SAVE.json and SAVE.svg; print how near the law is."""
    require_folders(save.parent)
    require_matplotlib()
    rows = []
    cases = list(wanted(lengths, depths, chunk_tokens))
    with Working() as shown:
        for number, (tokens, depth, window) in enumerate(cases, start=1):
            about = f"{tokens:,} tokens, {depth} layers, K/V window {window}"
            with shown.step(f"measurement {number} of {len(cases)}: {about}"):
                given = (tokens, depth, window, document_tokens, chunk_tokens)
                rows.append(call(measure_here, *given, more=_GIVE_BACK, what=about))
            print(f"{about}: {bytes_text(rows[-1]['arena_bytes'])}", file=sys.stderr, flush=True)
    report = report_of(rows)
    save_plots(report, plotted(report), save)
    off = ", ".join(f"{window} {share:.2%}" for window, share in report["deviation"]["arena_bytes"].items())
    print(f"{BYTES_PER_TOKEN:,} bytes a token; the arena is off by at most, K/V window {off}")
    return report


def wanted(
    lengths: Sequence[int], depths: Mapping[str, Sequence[int]], chunk_tokens: int
) -> Iterator[tuple[int, int, str]]:
    """(tokens, depth, window) of every measurement.

    A streamed window's slots hold all of a few chunks, which then do not stream. There every chunk meets every earlier
    one, visible or not, so that beyond the first depth only the shorter lengths are affordable.
    """
    for window, layers in depths.items():
        for depth in layers:
            for tokens in lengths:
                chunks = -(-tokens // chunk_tokens)
                if window == "whole" or (chunks > KV_SLOTS and (depth == layers[0] or chunks <= 32)):
                    yield tokens, depth, window


def report_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows, and how far they are from the law and from one another."""
    windows = sorted({row["window"] for row in rows}, reverse=True)
    differences = {"deviation": deviation, "depth_difference": depth_difference}
    return {"bytes_per_token": BYTES_PER_TOKEN, "rows": rows} | {
        name: {key: {window: difference(rows, window, key) for window in windows} for key in _MEASURED}
        for name, difference in differences.items()
    }


def deviation(rows: Sequence[dict[str, Any]], window: str, key: str, per_token: int = BYTES_PER_TOKEN) -> float:
    """Largest distance of a size from the law (whole) or from a constant (streamed), as a share of it."""
    worst = 0.0
    for depth in {row["depth"] for row in rows if row["window"] == window}:
        sizes = {r["tokens"]: r[key] for r in rows if (r["window"], r["depth"]) == (window, depth)}
        first = min(sizes)
        constant = sizes[first] - (per_token * first if window == "whole" else 0)
        for tokens, size in sizes.items():
            law = constant + (per_token * tokens if window == "whole" else 0)
            worst = max(worst, abs(size - law) / law)
    return worst


def depth_difference(rows: Sequence[dict[str, Any]], window: str, key: str) -> float:
    """Largest difference between depths at one length, as a share of the smaller size."""
    worst = 0.0
    for tokens in {row["tokens"] for row in rows if row["window"] == window}:
        sizes = [row[key] for row in rows if (row["window"], row["tokens"]) == (window, tokens)]
        worst = max(worst, max(sizes) / min(sizes) - 1)
    return worst


def plotted(report: dict[str, Any]) -> Any:
    """The figure: both sizes over the length, and the law."""
    figure, axes = two_plots(
        '"gpu" tier, as its arena counts it', "the process, less RAM tier, batch and Python objects"
    )
    rows = report["rows"]
    for axis, key in zip(axes, _MEASURED, strict=True):
        for window, depth in sorted({(row["window"], row["depth"]) for row in rows}, reverse=True):
            result = sorted((r["tokens"], r[key]) for r in rows if (r["window"], r["depth"]) == (window, depth))
            x, y = [tokens for tokens, _ in result], [size / 2**20 for _, size in result]
            color, mark = "C0" if window == "whole" else "C1", "x" if depth == 1 else "o"
            label = f"{window}, {depth} layer{'s' if depth > 1 else ''}"
            axis.plot(x, y, mark, color=color, fillstyle="none", label=label)
            if (window, depth) == ("whole", 1):
                law = [y[0] + BYTES_PER_TOKEN * (tokens - x[0]) / 2**20 for tokens in x]
                axis.plot(x, law, "-", color=color, linewidth=0.8, label=f"{BYTES_PER_TOKEN:,} bytes a token")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = sorted({row["tokens"] for row in rows})
        axis.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
        axis.set_xlabel("tokens of the sequence")
        axis.set_ylabel("MiB")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.legend(fontsize=8)
    return figure


# ---------------------------------------------------------------------- one measurement, in a process of its own


def measure_here(tokens: int, depth: int, window: str, document_tokens: int, chunk_tokens: int) -> dict[str, Any]:
    """One row, in a process that does nothing else: a step, after one of two chunks that loads what any step does."""
    vars(views)["INPUTS_CACHE_BYTES"] = 0  # else up to 64 MiB of rotary tables would be found in the process, too
    with scratch() as folder:
        return _measure(tokens, depth, window, document_tokens, chunk_tokens, Path(folder))


def _measure(
    tokens: int, depth: int, window: str, document_tokens: int, chunk_tokens: int, folder: Path
) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "depth": depth, "window": window}
    for name, length in (("warm-up", 2 * chunk_tokens), ("measured", tokens)):
        (folder / name).mkdir()
        before, objects = resident_bytes("VmRSS"), _objects_bytes()
        session = _session(length, depth, window, document_tokens, chunk_tokens, folder / name)
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak
        try:
            step_s = train_step(session).step_s
            session.executor.drain()
            others = {
                "ram_bytes": session.ram.arena.used_bytes,
                "batch_bytes": _batch_bytes(session),
                "objects_bytes": _objects_bytes() - objects,
            }
            grown = resident_bytes("VmHWM") - before
            row |= others | {
                "arena_bytes": session.gpu.arena.used_bytes,
                "process_bytes": grown,
                "resident_bytes": grown - sum(others.values()),
                "step_s": step_s,
            }
        finally:
            session.close()
        del session
        gc.collect()
    return row


def _objects_bytes() -> int:
    """Most bytes that Python's allocator of small objects ever held in this process."""
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        text = file.read().decode()
    arenas = re.search(r"# arenas highwater mark\s*=\s*([\d,]+)", text)
    size = re.search(r"arenas \* (\d+) bytes/arena", text)
    assert arenas is not None, text
    assert size is not None, text
    return int(arenas[1].replace(",", "")) * int(size[1])


def _batch_bytes(session: Session) -> int:
    """Bytes of the step's tokens and what is known about them, each storage once."""
    data = session.runtime.data(session.step)
    tensors = [tensor for batch in data.micro_batches for tensor in (batch.ids, batch.labels, batch.positions)]
    tensors += [tensor for chunk in data.chunks.values() for tensor in chunk.tensors()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _session(tokens: int, depth: int, window: str, document_tokens: int, chunk_tokens: int, folder: Path) -> Session:
    """A session on the least GPU budget that the planner accepts, everything else in RAM."""
    device = torch.device("cpu")
    recipe, spec = random_model(
        replace(MODEL, num_layers=depth),
        tokens,
        1,
        steps=1,
        chunk_tokens=chunk_tokens,
        device="cpu",
        compile="off",
        activation_checkpointing="selective",
        kv_window=window,
    )

    def plan(gpu_bytes: int) -> Plan | None:
        try:
            budgets = Budgets(gpu_bytes, 64 * 2**30, None, {})
            task = PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type="cpu")
            return task.plan(PlanOptions(streamed=window == "streamed"))
        except BudgetError:
            return None

    least = plan(bisect_left(range(1 << 40), True, key=lambda size: plan(size) is not None))
    assert least is not None
    readers = select_readers("direct", device, [folder])
    setup = Setup(name="narrow", recipe=recipe, spec=spec, plan=least, device=device, readers=readers)
    return open_drawn(setup, folder, short_steps=1, document_tokens=document_tokens)[1]
