"""Named checkpoints of a run: made offline, or asked of the process that trains it; and the scrub of its state.

A running run holds its state's lock. `requests/NAME.request` asks it for a checkpoint; it answers at the next step
boundary with `requests/NAME.answer`: {"step": ..., "error": null or a text}.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path

from penstock.app.console.working import Working, working
from penstock.app.runs.directory import RunDir, is_live, read_status, require_own
from penstock.app.runs.files import number, read_object, remove_own, whole
from penstock.engine import preparing
from penstock.engine.config import drive_folders, state_folder
from penstock.engine.events import STEP_MARK as STEP_MARK
from penstock.engine.events import step_name
from penstock.storage.files.disk import atomic_write, reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import is_real_folder, printable

_POLL_S = 0.1
_MANIFEST_BYTES = 1 << 28
"""A manifest takes some 20 bytes for each chunk file."""
_SILENT_S = 60.0
"""A process that says nothing for so long is not waited for: it hangs, or is stopped."""
_OURS = re.compile(r".+\.(request|answer)|\..+\.(request|answer)\.\d+\.tmp", re.DOTALL)


class CheckpointRequests:
    """The training process's side of `requests/`. It touches files of the names above only, and never fails."""

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / "requests"
        for name in self._names():
            if _OURS.fullmatch(name):
                self._remove(name)
        self._taken: set[str] = set()

    def take(self) -> list[str]:
        """Names asked for since the last call; two system calls when there are none."""
        requested = sorted(name for name in self._names() if name.endswith(".request") and not name.startswith("."))
        # One that cannot be removed would be asked for again at every step.
        names = [name.removesuffix(".request") for name in requested if self._remove(name)]
        self._taken.update(names)
        return names

    def answer(self, name: str, step: int, error: str | None) -> str | None:
        """Tell whoever asked for `name`, if anybody did; why that cannot be done, or None."""
        if name not in self._taken:
            return None
        self._taken.remove(name)
        if not is_real_folder(self._folder):
            return f"{self._folder}: no longer exists, so the request for checkpoint {name} cannot be answered"
        try:
            atomic_write(self._folder / f"{name}.answer", json.dumps({"step": step, "error": error}))
        except UserError as failure:
            return str(failure)
        return None

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder) if is_real_folder(self._folder) else []
        except OSError:
            return []

    def _remove(self, name: str) -> bool:
        try:
            remove_own(self._folder / name)
        except OSError:
            return False
        return True


def make_checkpoint(run_path: Path, name: str) -> tuple[str, int]:
    """Make checkpoint `name` of a run, running or not; what it is called (see `step_name`), and its step. UserError for
    a bad or taken name, no generation or no room."""
    from penstock.storage.generations.checkpoints import (
        AUTOMATIC,
        BEST,
        GOOD,
        UPLOADED,
        checkpoint_folder,
        checkpoint_names,
    )

    some = step_name(name, 999_999)
    checkpoint_folder(run_path / "state", some)
    if any(own.step(some) is not None for own in (AUTOMATIC, GOOD, BEST, UPLOADED)) or name in ("last-good", "best"):
        raise UserError(
            f"checkpoint name '{name}': step-N is for storage.keep_last and keep_every, offsite-N for "
            "storage.offsite, good-N and last-good for storage.keep_good, best-N and best for storage.keep_best; "
            "choose another"
        )
    if name in checkpoint_names(run_path / "state"):
        raise UserError(f"{run_path}: has a checkpoint '{name}' already; choose another name, or --delete it")
    if is_live(run_path):
        step = _ask(run_path, name)
        return step_name(name, step), step
    from penstock.storage.generations.store import NvmeStore
    from penstock.storage.tier.manifest import step_of

    with working("keeping the last generation"), RunDir.open(run_path) as run:
        drives = drive_folders(run.path, run.recipe.storage)
        with closing(NvmeStore.open(state_folder(run.path), drives=drives)) as store:
            step = step_of(store.meta) or 0
            store.checkpoint(step_name(name, step))
            return step_name(name, step), step


def make_for_export(run_path: Path) -> str:
    """Make a checkpoint of a running run that an export can read; its name."""
    taken = {name for name, _ in checkpoint_steps(run_path)}
    # Two exports in one second are two checkpoints: each is answered for a name that nobody else asks for.
    stem = f"export-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    name = next(n for n in itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2))) if n not in taken)
    _ask(run_path, name)
    return name


def _ask(run_path: Path, name: str) -> int:
    require_own(run_path)
    folder = run_path / "requests"
    request, answer = folder / f"{name}.request", folder / f"{name}.answer"
    if os.path.lexists(request):
        raise UserError(
            f"{run_path}: checkpoint '{name}' has already been requested; wait for it, or choose another name"
        )
    with reporting(answer, "requesting a checkpoint"):
        folder.mkdir(exist_ok=True)
        remove_own(answer)
    atomic_write(request, "")
    with working("waiting for the run to commit the step under way"):
        _wait_for(answer, request, run_path)
    content = read_object(answer) or {}
    with reporting(answer, "reading the run's answer"):
        remove_own(answer)
    step, failure = whole(content.get("step")), content.get("error", "")
    if step is None or not (failure is None or isinstance(failure, str)):
        raise UserError(f"{answer}: cannot be read; list the run's checkpoints, and try again")
    if failure is not None:
        raise UserError(f"checkpoint {step_name(name, step)} was not made: {failure}")
    return step


def _wait_for(answer: Path, request: Path, run_path: Path) -> None:
    """Until the run has answered. UserError where it ends before, or says nothing any more."""
    while not os.path.lexists(answer):
        if not is_live(run_path):
            request.unlink(missing_ok=True)
            raise UserError(f"{run_path}: the run ended before it made the checkpoint; run the command again")
        heartbeat = number(read_status(run_path).get("heartbeat"))
        if heartbeat is not None and abs(time.time() - heartbeat) > _SILENT_S:
            request.unlink(missing_ok=True)
            raise UserError(
                f"{run_path}: its process is alive but has not responded for {abs(time.time() - heartbeat):.0f} s; "
                "try again when it responds, or end it first"
            )
        time.sleep(_POLL_S)


def export_folder(run_path: Path, step: int | None) -> Path:
    """Where a run's model goes if nobody says where: a folder below the run's that is not there, or empty."""
    plain = run_path / "export"
    stem = f"export-step-{step}" if step is not None else "export"
    numbered = (run_path / f"{stem}-{number}" for number in itertools.count(2))
    return next(folder for folder in itertools.chain([plain, run_path / stem], numbered) if _is_free(folder))


def _is_free(folder: Path) -> bool:
    try:
        return not os.path.lexists(folder) or (is_real_folder(folder) and not any(folder.iterdir()))
    except OSError:
        return False


def checkpoint_named(run_path: Path, name: str | None) -> str | None:
    """The checkpoint of a run that `name` means, which may be `last-good` or `best`. UserError where there is none."""
    if name is None:
        return None
    from penstock.storage.generations.checkpoints import read_checkpoint, resolve_checkpoint  # loads torch: seconds

    name = resolve_checkpoint(run_path / "state", name)
    read_checkpoint(run_path / "state", name)
    return name


def copy_state_of(run: RunDir) -> str:
    """Give a copied run directory a state of its own on its recipe's drives; a line saying what was copied."""
    from penstock.storage.generations.copying import copy_state

    drives = drive_folders(run.path, run.recipe.storage)
    with working("copying the state"):
        copied = copy_state(state_folder(run.path), drives, preparing.report)
    folders = ", ".join(str(folder) for folder in drives)
    return (
        f"{copied:,} bytes of state copied to {folders}"
        if copied
        else "this run already has its own copy of all its state"
    )


def delete_checkpoint_of(run_path: Path, name: str) -> None:
    """Delete checkpoint `name`. Raises UserError when there is no such, or while the run is running."""
    from penstock.storage.generations.checkpoints import delete_checkpoint, read_checkpoint

    read_checkpoint(run_path / "state", name)
    with working(f"deleting checkpoint {name}"), RunDir.open(run_path) as run:
        delete_checkpoint(run.path / "state", name)


def checkpoint_steps(run_path: Path) -> list[tuple[str, int]]:
    """(name, step) of a run's checkpoints that can be read, by step. Reads whole manifests, megabytes of a large model:
    ask again when the folder has changed."""
    result = []
    for manifest in checkpoint_manifests(run_path):
        step = _step_of(manifest, run_path)
        if step is not None:
            result.append((printable(manifest.parent.name), step))
    return sorted(result, key=lambda item: (item[1], item[0]))


def checkpoint_manifests(run_path: Path) -> list[Path]:
    """The manifests of a run's checkpoints; [] where their folder is missing, or reached through a link."""
    folder = run_path / "state" / "checkpoints"
    if not (is_real_folder(folder.parent) and is_real_folder(folder)):
        return []
    return sorted(folder.glob("*/manifest.json"))


def committed_step(run_path: Path) -> int | None:
    """The step of a run's committed generation; None where there is none, or none that can be read."""
    return _step_of(run_path / "state" / "manifest.json", run_path)


def _step_of(manifest: Path, run_path: Path) -> int | None:
    """Without checking the checksum, which takes a library that loads slowly: for showing only."""
    meta = (read_object(manifest, _MANIFEST_BYTES, below=run_path) or {}).get("meta")
    return whole(meta.get("step")) if isinstance(meta, dict) else None


def scrub_run(run_path: Path) -> str:
    """Read the committed generation, every checkpoint and the data; a line of how much and how fast. UserError listing
    every damaged file, or while the run is running."""
    from penstock.engine.verify import run_checks, verify_run_files
    from penstock.storage.generations.checkpoints import checkpoint_folder, checkpoint_names
    from penstock.storage.generations.store import NvmeStore

    failures: list[str] = []
    started, size = time.perf_counter(), 0
    with Working() as shown, RunDir.open(run_path, read_only=True) as run:
        root = state_folder(run.path)
        drives = drive_folders(run.path, run.recipe.storage)
        names = checkpoint_names(root)
        for folder in (root, *(checkpoint_folder(root, name) for name in names)):
            what = "the last generation" if folder == root else f"checkpoint {folder.name}"
            state = closing(NvmeStore.open(folder, drives=drives, read_only=True))
            with shown.step(f"reading {what}"), state as store:
                checks = [partial(store.verify, preparing.report)]
                if folder == root:
                    checks.append(partial(verify_run_files, run.path, store.meta))
                read, result = run_checks(checks)
                size, failures = size + read, [*failures, *result]
    if failures:
        raise UserError("\n".join(failures))
    took_s = time.perf_counter() - started
    kept = f" and {len(names)} checkpoint{'s' * (len(names) != 1)}" if names else ""
    return (
        f"last generation{kept} verified: {size:,} bytes including the data, no damage ({size / took_s / 1e9:.1f} GB/s)"
    )
