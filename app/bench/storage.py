"""`penstock bench storage`: the NVMe tier's reads and writes against what the drives give without it, in the same run.

Raw: direct writes and reads of existing files of the chunk files' size, not synced, by as many threads as the store
has. Store: `NvmeStore.write` of every part from arena slots and the commit, all of it timed; `NvmeStore.read`, cold.

Both take turns and each round gives one ratio, so that a change in load or in the drive's mood meets both. Every second
round runs the other way round: a drive (or a host's cache under a virtual one) reads faster what was written last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.app.bench.process import raised_by_signals, scratch, show
from penstock.app.bench.raw_io import LOOP_THREADS, RawFiles, Timed, drop_cached, move_files, sync_files, timed
from penstock.app.console.working import working
from penstock.engine import preparing
from penstock.storage.files.disk import require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import real_path
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.chunk import ChunkFormat
from penstock.storage.tier.filesystem import check_folder, device_of
from penstock.storage.tier.layout import ALIGN_NUMEL
from penstock.storage.tier.manifest import ArraySpec
from penstock.storage.tier.readers import DirectReader, Reader, Readers, select_readers

_SLOTS = 2 * LOOP_THREADS
"""Parts that the caller keeps in flight on each drive: twice the store's threads, so that none waits for work."""
_MIN_PARTS = 4
"""Parts on each drive below which nothing is measured."""
_CAPACITY = 3.3
"""Disk needed, times the size: two generations and as many raw files, with the store's margin."""
_ARRAY = ("bench", "master")


@dataclass(frozen=True, slots=True)
class _Plan:
    name: str
    folders: tuple[Path, ...]
    num_parts: int
    part_bytes: int


def bench_storage(
    paths: Sequence[Path],
    *,
    json: bool = False,
    size_bytes: int = 2 << 30,
    part_bytes: int = 32 << 20,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure the folders `paths`, one on each drive: each by itself and, if several, all together.

    `size_bytes` is moved in each direction per measurement (less where space is short), in chunk files of `part_bytes`
    of payload, `rounds` times. Prints a line, or JSON with `json`; in the figures `read_ratio` and `write_ratio` are
    store over raw, medians of the rounds, of all drives together. What is made below `paths` is removed, also when
    interrupted. UserError.
    """
    if part_bytes <= 0 or part_bytes % (ALIGN_NUMEL * 4):
        raise UserError(f"chunk size {part_bytes:,}: give a multiple of {ALIGN_NUMEL * 4:,} bytes, for example 32MiB")
    if rounds < 1:
        raise UserError(f"rounds {rounds}: give at least 1")
    folders = _checked(paths)
    warnings = [warning for folder in folders for warning in check_folder(folder)]
    parts_per_drive, note = _parts_that_fit(folders, size_bytes, part_bytes)
    if note:
        warnings.append(note)
    if len({os.stat(folder).st_dev for folder in folders}) < len(folders):
        warnings.append("several of the folders lie on one drive, whose speed they share")
    with contextlib.ExitStack() as cleanup:
        # As Ctrl-C does by itself.
        cleanup.enter_context(raised_by_signals(lambda number: SystemExit(128 + number), signal.SIGTERM, signal.SIGHUP))
        plans = [_Plan(str(folder), (folder,), parts_per_drive, part_bytes) for folder in folders]
        if len(folders) > 1:
            plans.append(_Plan("all drives", tuple(folders), parts_per_drive * len(folders), part_bytes))
        readers, skipped = _readers(folders)
        load_before = os.getloadavg()[0]
        cases = []
        for plan in plans:
            with working(f"measuring {plan.name}"):
                cases.append(_run_case(plan, readers, rounds))
    figures: dict[str, Any] = {
        "read_ratio": cases[-1]["ratios"]["direct_read"],
        "write_ratio": cases[-1]["ratios"]["store_write"],
        "write_ratio_raw_synced": cases[-1]["ratios"]["store_write_raw_synced"],
        "part_bytes": part_bytes,
        "rounds": rounds,
        "raw": f"O_DIRECT, {LOOP_THREADS} threads for each drive",
        "skipped_readers": skipped,
        "load_average": [load_before, os.getloadavg()[0]],
        "drives": {
            str(folder): {"device": device.name, "filesystem": device.filesystem, "model": device.model}
            for folder, device in zip(folders, map(device_of, folders), strict=True)
        },
        "warnings": warnings,
        "cases": cases,
    }
    if len(folders) > 1:
        figures["sum_of_drives"] = _against_sum(cases)
    for warning in warnings:
        print(f"note: {warning}", file=sys.stderr)
    reads, writes = (cases[-1]["measured"][name]["gbps"] for name in ("direct_read", "store_write"))
    line = (
        f"{cases[-1]['name']}: reads {figures['read_ratio']:.2f} of raw direct I/O ({reads:.2f} GB/s), durable writes "
        f"{figures['write_ratio']:.2f} ({writes:.2f} GB/s)"
    )
    show(figures, line, as_json=json)
    return figures


def _checked(paths: Sequence[Path]) -> list[Path]:
    """The folders, made absolute; UserError on one that is missing, not writable or given twice."""
    if not paths:
        raise UserError("bench storage: give at least one folder, one on each drive")
    folders: list[Path] = []
    for path in paths:
        folder = real_path(path)
        if not folder.is_dir():
            raise UserError(f"{path}: no such folder; give an existing folder on the drive to measure")
        if folder in folders:
            raise UserError(f"{path}: given twice; give each drive once")
        require_writable(folder)
        folders.append(folder)
    return folders


def _parts_that_fit(folders: Sequence[Path], size_bytes: int, part_bytes: int) -> tuple[int, str | None]:
    """Parts on each drive, and a remark where they are fewer than wanted; UserError when too few fit."""
    wanted = max(_MIN_PARTS, size_bytes // (len(folders) * part_bytes))
    fitting, where = wanted, folders[0]
    for folder in folders:
        sharing = sum(os.stat(other).st_dev == os.stat(folder).st_dev for other in folders)
        parts = int(shutil.disk_usage(folder).free / (sharing * _CAPACITY * part_bytes))
        if parts < fitting:
            fitting, where = parts, folder
    if fitting < _MIN_PARTS:
        need = int(_MIN_PARTS * _CAPACITY * part_bytes)
        free = shutil.disk_usage(where).free
        raise UserError(
            f"{where}: the benchmark needs {need:,} bytes for each folder on this disk and {free:,} are free"
        )
    if fitting == wanted:
        return wanted, None
    total = bytes_text(fitting * len(folders) * part_bytes)
    return fitting, f"{where}: little space is free, so {total} are moved per measurement"


def _readers(folders: Sequence[Path]) -> tuple[dict[str, Reader], dict[str, str]]:
    """Every reader that works here, and why the others do not."""
    readers: dict[str, Reader] = {"direct": DirectReader()}
    if not torch.cuda.is_available():
        return readers, {"kvikio": "no CUDA device"}
    with contextlib.ExitStack() as cleanup:
        scratch_folders = [Path(cleanup.enter_context(scratch(folder))) for folder in folders]
        chosen = select_readers("kvikio", torch.device("cuda"), scratch_folders)
    if chosen.device is None:
        return readers, {"kvikio": chosen.warning or "not available"}
    return readers | {"kvikio": chosen.device}, {}


def _run_case(plan: _Plan, readers: dict[str, Reader], rounds: int) -> dict[str, Any]:
    """Measure one set of drives; everything made for it is gone afterwards."""
    num_drives, part_numel = len(plan.folders), plan.part_bytes // 4
    with contextlib.ExitStack() as cleanup:
        scratch_folders = [Path(cleanup.enter_context(scratch(folder))) for folder in plan.folders]
        file_bytes = ChunkFormat(plan.part_bytes).file_bytes
        raw = [
            RawFiles(scratch_folder / "raw", plan.num_parts // num_drives, file_bytes)
            for scratch_folder in scratch_folders
        ]
        num_slots = num_drives * _SLOTS
        arena = HostArena(num_slots * file_bytes, budget_bytes=num_slots * file_bytes)
        cleanup.callback(arena.close)
        memory = [arena.slot(f"slot {index}", file_bytes) for index in range(num_slots)]
        for index, slot in enumerate(memory):  # real data is not compressible, and a drive might compress
            slot.random_(generator=torch.Generator().manual_seed(index))
        for files in raw:
            files.create(memory[0])
        stores = [scratch_folder / "store" for scratch_folder in scratch_folders]
        store = NvmeStore.create(
            scratch_folders[0] / "root",
            [ArraySpec(*_ARRAY, plan.num_parts * part_numel, "float32", part_numel)],
            budget_bytes=None,
            drives=stores,
            readers=Readers(readers["direct"], readers.get("kvikio")),
        )
        cleanup.callback(store.close)
        for _ in range(2):  # both slots: from here on every write overwrites
            _write_store(store, plan, memory)
        chunk_files = [path for folder in stores for path in folder.glob("*/*/*/c.*.0")]
        spread = {
            str(folder): sum(path.stat().st_size for path in chunk_files if path.is_relative_to(scratch_folder))
            for folder, scratch_folder in zip(plan.folders, stores, strict=True)
        }
        jobs = _jobs(plan, store, raw, memory, readers, chunk_files)
        runs: dict[str, list[Timed]] = {name: [] for name in jobs}
        for number in range(rounds):
            for phase in ("_write", "_read"):
                order = [name for name in jobs if name.endswith(phase)]
                for name in order if number % 2 == 0 else reversed(order):
                    done = sum(len(runs[each]) for each in jobs) / (rounds * len(jobs))
                    preparing.report(done, f"round {number + 1} of {rounds}, {name.replace('_', ' ')}")
                    runs[name].append(jobs[name]())
                    if name == "raw_write":  # the same and the time to make it durable
                        written = runs[name][-1]
                        seconds = written.seconds + sync_files([path for files in raw for path in files.paths()])
                        runs.setdefault("raw_write_synced", []).append(replace(written, seconds=seconds))
    return {
        "name": plan.name,
        "drives": [str(folder) for folder in plan.folders],
        "moved_bytes": plan.num_parts * plan.part_bytes,
        "file_bytes_on_drive": spread,
        "measured": {name: _summary(timings) for name, timings in runs.items()},
        "ratios": _ratios(runs, readers),
    }


def _jobs(
    plan: _Plan,
    store: NvmeStore,
    raw: Sequence[RawFiles],
    memory: Sequence[torch.Tensor],
    readers: dict[str, Reader],
    chunk_files: Sequence[Path],
) -> dict[str, Callable[[], Timed]]:
    """What one round measures, by name, raw beside what it is compared with."""
    payload_bytes = plan.num_parts * plan.part_bytes
    raw_paths = [path for files in raw for path in files.paths()]

    def raw_read() -> Timed:
        drop_cached(raw_paths)
        return move_files(raw, memory, write=False)

    def store_read(reader: Reader) -> Timed:
        drop_cached(chunk_files)
        into = memory
        if reader.name == "kvikio":
            into = [torch.empty_like(slot, device="cuda") for slot in memory]
            torch.cuda.synchronize()
        return timed(payload_bytes, lambda: _stream(plan, into, store.read))

    return {
        "raw_write": partial(move_files, raw, memory, write=True),
        "store_write": lambda: timed(payload_bytes, lambda: _write_store(store, plan, memory)),
        "raw_read": raw_read,
        **{f"{name}_read": partial(store_read, reader) for name, reader in readers.items()},
    }


def _write_store(store: NvmeStore, plan: _Plan, memory: Sequence[torch.Tensor]) -> None:
    _stream(plan, memory, store.write)
    store.commit({})


def _stream(
    plan: _Plan, slots: Sequence[torch.Tensor], move: Callable[[str, str, int, torch.Tensor], Future[None]]
) -> None:
    """Move every part through the slots, each reused as soon as its part is done."""
    pending: deque[Future[None]] = deque()
    for part in range(plan.num_parts):
        if len(pending) == len(slots):
            pending.popleft().result()
        payload = slots[part % len(slots)][: plan.part_bytes]
        pending.append(move(*_ARRAY, part, payload.view(torch.float32)))
    for future in pending:
        future.result()


def _ratios(runs: dict[str, list[Timed]], readers: Iterable[str]) -> dict[str, float]:
    """Medians over the rounds of speed over raw speed in the same round."""

    def ratio(name: str, base: str) -> float:
        return statistics.median(own.gbps / raw.gbps for own, raw in zip(runs[name], runs[base], strict=True))

    return {
        "store_write": ratio("store_write", "raw_write"),
        "store_write_raw_synced": ratio("store_write", "raw_write_synced"),
        **{f"{reader}_read": ratio(f"{reader}_read", "raw_read") for reader in readers},
    }


def _summary(timings: Sequence[Timed]) -> dict[str, Any]:
    speeds = [timing.gbps for timing in timings]
    return {
        "gbps": statistics.median(speeds),
        "gbps_rounds": speeds,
        "cpu_s_per_gb": statistics.median(timing.cpu_s / timing.num_bytes * 1e9 for timing in timings),
    }


def _against_sum(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Speed of all drives together over the sum of each by itself."""
    *single, together = (case["measured"] for case in cases)
    return {name: one["gbps"] / sum(case[name]["gbps"] for case in single) for name, one in together.items()}
