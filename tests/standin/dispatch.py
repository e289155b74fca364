"""Host time per op, at the shapes of an 8B model on a GPU that takes no time: `python tests/standin/dispatch.py`.

Run it on the stand-in with STANDIN_COPIES=0, on a machine that does nothing else:

    STANDIN_COPIES=0 build/standin/run PYTHON tests/standin/dispatch.py [--layers 2] [--vocab 8192]

A model of a few layers of width 4,096 (MLP 14,336, 32 heads, 8 K/V heads) with its state in RAM, compiled, is trained
on chunks of 4,096 tokens; every op of the lanes that hand out work is timed on its lane. "quiet" is with the
optimizer's updates left out, "beside AdamW" as in a run. Instructions are those that the process executes in user space
while an op is handed out and nothing else is: a busy machine changes the times, not them.

Needs 4 GB of disk and 11 GB of RAM at 2 layers and 8,192 words; an 8B model's vocabulary of 128,256 would take 15 GB
more and changes the work of no op but the number of the head's rows at once, which `--vocab` shows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import struct
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import standin
import tiny
import torch

from penstock.engine.machine import device as compute_device
from penstock.engine.schedule.actions import UPDATE
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step

OPS = ("embed_forward", "layer_forward", "head", "layer_backward", "embed_backward", "norm")
LINKS = ("load_weights", "load_x", "load_dy", "load_saved", "load_kv", "store_x", "store_dy", "store_saved", "store_kv")
WARM_STEPS, STEPS, REPEATS = 3, 5, 20
GOAL_MS = {"embed_forward": 2.0, "layer_forward": 1.5, "layer_backward": 3.0}


class Instructions:
    """Counts the instructions that this process executes in user space; nothing where the kernel does not let it."""

    _PERF_EVENT_OPEN, _INSTRUCTIONS, _INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 298, 1, 1 << 1, 1 << 5, 1 << 6

    def __init__(self) -> None:
        # struct perf_event_attr: type, size, config, sample_period, sample_type, read_format, flags, and zeros.
        flags = self._INHERIT | self._EXCLUDE_KERNEL | self._EXCLUDE_HV
        attributes = struct.pack("IIQQQQQ72x", 0, 120, self._INSTRUCTIONS, 0, 0, 0, flags)
        self._file = ctypes.CDLL(None).syscall(self._PERF_EVENT_OPEN, attributes, 0, -1, -1, 0)

    def read(self) -> int:
        """Since the start, of all threads made since then."""
        count: int = struct.unpack("q", os.read(self._file, 8))[0] if self._file >= 0 else 0
        return count


class Meter:
    """Times every op on its lane; on `dissect` hands one op of each kind out again and again, alone."""

    def __init__(self, session: Session, instructions: Instructions) -> None:
        self._perform = session.executor._perform
        session.executor._perform = self.perform
        self._instructions = instructions
        self.phase = ""
        self.dissect = False
        self.times_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
        """(phase, action) -> milliseconds of each op on its lane."""
        self.alone: dict[str, tuple[float, float, float]] = {}
        """Action -> least milliseconds, millions of instructions, launches of an op that is handed out alone."""

    def perform(self, op: Op) -> Any:
        if self.dissect and op.action.name in OPS and op.action.name not in self.alone:
            self.alone[op.action.name] = self._dissected(op)
        begin = time.perf_counter()
        result = self._perform(op)
        self.times_ms[self.phase, op.action.name].append((time.perf_counter() - begin) * 1e3)
        return result

    def _dissected(self, op: Op) -> tuple[float, float, float]:
        best_s, best_instructions, before = float("inf"), float("inf"), standin.counts()
        for _ in range(10):
            begin, executed = time.perf_counter(), self._instructions.read()
            for _ in range(REPEATS):
                self._perform(op)
            best_s = min(best_s, (time.perf_counter() - begin) / REPEATS)
            best_instructions = min(best_instructions, (self._instructions.read() - executed) / REPEATS)
        made = (standin.counts() - before).total("launch", "triton_launch", "product") / (10 * REPEATS)
        return best_s * 1e3, best_instructions / 1e6, made


def measure(layers: int, vocab: int, width: int, tokens: int, chunks: int, threads: int | None) -> Meter:
    """Train for some steps with the updates, by that many threads, and some without; then every op alone."""
    # Temporaries take no memory here, and the least budget that a plan accepts keeps the state in RAM.
    compute_device.LEAST_LIMIT_BYTES = 1 << 37
    instructions = Instructions()  # counts threads that are made from now on
    shape = {"num_layers": layers, "hidden_size": width, "intermediate_size": width * 7 // 2, "vocab_size": vocab}
    heads = {"num_heads": width // 128, "num_kv_heads": width // 512, "head_dim": 128}
    train = {"global_batch_size": 1, "chunk_tokens": tokens, "compute_dtype": "bfloat16", "compile": "on"}
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        sections = {"m": tiny.model(**shape, **heads), "d": tiny.data(sequence_length=tokens * chunks)}
        sections |= {"t": tiny.training(**train, steps=100), "s": tiny.storage(part_bytes="32MiB")}
        device = torch.device("cuda", 0)
        with tiny.session(Path(folder), gpu=tiny.FLOOR, ram="64GiB", device=device, **sections) as session:  # type: ignore[arg-type]
            assert all(buffer.state == "ram" for buffer in session.plan.buffers.values())
            if threads is not None:
                session.executor.call("optimizer", lambda: torch.set_num_threads(threads))
            meter = Meter(session, instructions)

            def steps(phase: str, count: int) -> None:
                meter.phase = phase
                for _ in range(count):
                    train_step(session)

            steps("warm", WARM_STEPS)
            gc.freeze()
            gc.disable()  # as a run does: engine/train.py
            steps("beside AdamW", STEPS)
            session.runtime.handlers[UPDATE] = lambda op: None
            steps("warm", 1)
            steps("quiet", STEPS)
            session.executor.drain()
            meter.dissect = True
            steps("warm", 1)
    return meter


def table(meter: Meter, about: str) -> str:
    """Markdown."""
    lines = [
        f"Host time per op on {about}; {STEPS} steps each.",
        "",
        "| op | goal | quiet: median | max | beside AdamW: median | max | alone: least | instructions | launches |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for action in (*OPS, *LINKS):
        quiet, beside = (meter.times_ms[phase, action] for phase in ("quiet", "beside AdamW"))
        if not quiet or not beside:
            continue
        goal = f"{GOAL_MS[action]:.1f} ms" if action in GOAL_MS else ""
        alone = ("", "", "")
        if action in meter.alone:
            ms, instructions, launches = meter.alone[action]
            alone = (f"{ms:.2f} ms", f"{instructions:.2f} M" if instructions else "n/a", f"{launches:.0f}")
        cells = [f"{statistics.median(found):.2f} | {max(found):.1f}" for found in (quiet, beside)]
        lines.append(f"| {action} | {goal} | {' | '.join(cells)} | {' | '.join(alone)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096, help="of a chunk")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, help="of AdamW, where it would take the lanes' cores")
    options = parser.parse_args()
    if not standin.running() or os.environ.get("STANDIN_COPIES") != "0":
        sys.exit("run it as: STANDIN_COPIES=0 build/standin/run PYTHON tests/standin/dispatch.py")
    standin.name_threads()
    meter = measure(options.layers, options.vocab, options.width, options.tokens, options.chunks, options.threads)
    cores = len(os.sched_getaffinity(0))
    about = (
        f"{cores} cores (load {os.getloadavg()[0]:.1f}), torch {torch.__version__}: {options.layers} layers of width "
        f"{options.width:,}, {options.vocab:,} words, {options.chunks} chunks of {options.tokens:,} tokens"
    )
    if options.threads:
        about += f", AdamW on {options.threads} thread{'s' if options.threads > 1 else ''}"
    print(table(meter, about))


if __name__ == "__main__":
    main()
