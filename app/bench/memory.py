"""`penstock bench memory`: the compute device's memory against the sequence's length, measured on the CPU.

A step is run for every length, depth and treatment of the K/V window, each in a process of its own. Two things are
measured: what the arena of the "gpu" tier handed out, and the process's own peak resident memory, less what it was
before the session and less what does not belong to the tier: RAM tier, the step's own tokens, Python's objects (queued
ops, spans). Budgets are the least that the planner accepts, so that nothing of what is left over becomes resident
blocks or kept activations, and malloc gives back what is freed.

The law is 12 x kv_heads x head_dim bytes per token (K and V in bfloat16, their gradients in float32) and a constant,
which is taken from the shortest sequence. Documents are short, so that 131,072 tokens take seconds on two cores: the
window spans the whole sequence wherever documents end.
"""

from __future__ import annotations

import gc
import json as json_module
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.app.bench.cases import Shape
from penstock.app.bench.process import call, require_folders, require_matplotlib, resident_bytes, scratch, show
from penstock.app.bench.setup import Setup, random_recipe, shape_model
from penstock.app.bench.suite_worker import open_case
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
CHUNK_TOKENS = 1024
DOCUMENT_TOKENS = 2048
SHAPE = Shape("narrow, with the keys and values of Qwen2.5-7B", "qwen3", 1, 128, 256, 4, 4, 128, 512)

_MEASURED = ("arena_bytes", "resident_bytes")
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""glibc's malloc returns freed memory at once: else temporaries of many sizes leave holes that look like use."""


def bench_memory(
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Mapping[str, Sequence[int]] = DEPTHS,
    document_tokens: int = DOCUMENT_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    json: bool = False,
    save: Path | None = None,
) -> dict[str, Any]:
    """Measure, print how near the law is (JSON with `json`), and with `save` write SAVE.json and the plot SAVE.svg.

    Returns the report of `report_of`.
    """
    require_folders(None if save is None else save.parent)
    rows = []
    cases = list(wanted(lengths, depths, chunk_tokens))
    with Working() as shown:
        for number, (tokens, depth, window) in enumerate(cases, start=1):
            about = f"{tokens:,} tokens, {depth} layers, K/V window {window}"
            with shown.step(f"measurement {number} of {len(cases)}: {about}"):
                rows.append(_measured(tokens, depth, window, document_tokens, chunk_tokens))
            print(_row(rows[-1]), file=sys.stderr, flush=True)
    report = report_of(rows, document_tokens, chunk_tokens)
    if save is not None:
        save.with_suffix(".json").write_text(json_module.dumps(report, indent=1) + "\n")
        plot(report, save.with_suffix(".svg"))
    off = ", ".join(f"{window} {share:.2%}" for window, share in report["deviation"]["arena_bytes"].items())
    line = f"{report['bytes_per_token']:,} bytes a token; the arena is off by at most, K/V window {off}"
    show(report, line, as_json=json)
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


def report_of(rows: Sequence[dict[str, Any]], document_tokens: int, chunk_tokens: int) -> dict[str, Any]:
    """The rows, and how far they are from the law and from one another."""
    per_token = 12 * SHAPE.kv_heads * SHAPE.head_dim
    windows = sorted({row["window"] for row in rows}, reverse=True)
    return {
        "bytes_per_token": per_token,
        "chunk_tokens": chunk_tokens,
        "document_tokens": document_tokens,
        "rows": rows,
        "deviation": {
            key: {window: deviation(rows, window, key, per_token) for window in windows} for key in _MEASURED
        },
        "depth_difference": {
            key: {window: depth_difference(rows, window, key) for window in windows} for key in _MEASURED
        },
    }


def deviation(rows: Sequence[dict[str, Any]], window: str, key: str, per_token: int) -> float:
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


def _row(row: dict[str, Any]) -> str:
    return (
        f"{row['window']:<9}{row['depth']:>6}{row['tokens']:>9,}{bytes_text(row['arena_bytes']):>12}"
        f"{bytes_text(row['resident_bytes']):>12}{bytes_text(row['process_bytes']):>12}{row['step_s']:>8.1f}"
    )


def plot(report: dict[str, Any], file: Path) -> None:
    require_matplotlib("the plot")
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "penstock", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharex=True)
    rows, per_token = report["rows"], report["bytes_per_token"]
    for axis, key, title in zip(
        axes,
        _MEASURED,
        ('"gpu" tier, as its arena counts it', "the process, less RAM tier, batch and Python objects"),
        strict=True,
    ):
        for window, depth in sorted({(row["window"], row["depth"]) for row in rows}, reverse=True):
            found = sorted((r["tokens"], r[key]) for r in rows if (r["window"], r["depth"]) == (window, depth))
            x, y = [tokens for tokens, _ in found], [size / 2**20 for _, size in found]
            mark = "o" if depth == max(row["depth"] for row in rows if row["window"] == window) else "x"
            layers = f"{depth} layer{'s' if depth > 1 else ''}"
            axis.plot(
                x, y, mark, color="C0" if window == "whole" else "C1", fillstyle="none", label=f"{window}, {layers}"
            )
            if window == "whole" and depth == min(row["depth"] for row in rows):
                law = [(y[0] * 2**20 + per_token * (tokens - x[0])) / 2**20 for tokens in x]
                axis.plot(x, law, "-", color="C0", linewidth=0.8, label=f"{per_token:,} bytes a token")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = sorted({row["tokens"] for row in rows})
        axis.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
        axis.set_xlabel("tokens of the sequence")
        axis.set_ylabel("MiB")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


# ---------------------------------------------------------------------- one measurement, in a process of its own


def _measured(tokens: int, depth: int, window: str, document_tokens: int, chunk_tokens: int) -> dict[str, Any]:
    what = f"bench memory, {tokens:,} tokens, {depth} layers, {window} window"
    work = "penstock.app.bench.memory:measure_here"
    row: dict[str, Any] = call(work, tokens, depth, window, document_tokens, chunk_tokens, more=_GIVE_BACK, what=what)
    return row


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
    shape, device = replace(SHAPE, layers=depth), torch.device("cpu")
    recipe = random_recipe(
        tokens,
        1,
        steps=1,
        chunk_tokens=chunk_tokens,
        device="cpu",
        compile="off",
        activation_checkpointing="selective",
        kv_window=window,
    )
    recipe, spec = shape_model(recipe, shape, depth)

    def plan(gpu_bytes: int) -> Plan | None:
        try:
            budgets = Budgets(gpu_bytes, 64 * 2**30, None, {})
            task = PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type="cpu")
            return task.plan(PlanOptions(streamed=window == "streamed"))
        except BudgetError:
            return None

    low, high = 0, 1 << 40  # refused, accepted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if plan(middle) else (middle, high)
    least = plan(high)
    assert least is not None
    readers = select_readers("direct", device, [folder])
    setup = Setup(shape, spec, spec, least, least, recipe, device, readers)
    return open_case(setup, folder, short_steps=1, document_tokens=document_tokens)[1]
