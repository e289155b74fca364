"""Named checkpoints of a run: made offline, or asked of the process that trains it; and the scrub of its state.

A running run holds its state's lock. `requests/NAME.request` asks it for a checkpoint; it answers at the next step
boundary with `requests/NAME.answer`: {"step": ..., "error": null or a text}.
"""

from __future__ import annotations

import itertools
import json
import time
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from app.rundir import RunDir, is_live, read_object
from storage.disk import atomic_write
from storage.errors import UserError

if TYPE_CHECKING:
    from storage.checkpoints import CheckpointInfo

_POLL_S = 0.1
_MANIFEST_BYTES = 1 << 28
"""A manifest takes some 20 bytes for each chunk file."""


class CheckpointRequests:
    """The training process's side of `requests/`."""

    def __init__(self, run_path: Path) -> None:
        self._folder = run_path / "requests"
        for leftover in self._folder.glob("*"):
            leftover.unlink()
        self._taken: set[str] = set()

    def take(self) -> list[str]:
        """Names asked for since the last call; one system call when there are none."""
        names = sorted(path.stem for path in self._folder.glob("*.request"))
        for name in names:
            (self._folder / f"{name}.request").unlink()
        self._taken.update(names)
        return names

    def answer(self, name: str, step: int, error: str | None) -> None:
        """Tell whoever asked for `name`, if anybody did."""
        if name in self._taken:
            self._taken.remove(name)
            atomic_write(self._folder / f"{name}.answer", json.dumps({"step": step, "error": error}))


def make_checkpoint(run_path: Path, name: str) -> int:
    """Make checkpoint `name` of a run, running or not; the step that it holds.

    Raises UserError for a bad or taken name, a run without a generation, or a disk without room.
    """
    from engine.retention import AUTOMATIC
    from storage.checkpoints import LAST_GOOD, checkpoint_folder, checkpoint_names

    checkpoint_folder(run_path / "state", name)
    if AUTOMATIC.fullmatch(name) or LAST_GOOD.fullmatch(name) or name == "last-good":
        raise UserError(
            f"checkpoint name '{name}': step-N is for storage.keep_last and keep_every, good-N and last-good for "
            "storage.keep_good; choose another"
        )
    if name in checkpoint_names(run_path / "state"):
        raise UserError(f"{run_path}: has a checkpoint '{name}' already; choose another name, or --delete it")
    if is_live(run_path):
        return _ask(run_path, name)
    from engine.folders import drive_folders, state_folder
    from storage.nvme import NvmeStore

    with RunDir.open(run_path) as run:
        drives = drive_folders(run.path, run.recipe.storage)
        with closing(NvmeStore.open(state_folder(run.path), drives=drives)) as store:
            store.checkpoint(name)
            return int(store.meta["step"])


def make_for_export(run_path: Path) -> str:
    """Make a checkpoint of a running run that an export can read; its name."""
    taken = {name for name, _ in checkpoint_steps(run_path)}
    stem = f"export-{datetime.now():%Y%m%d-%H%M%S}"
    name = next(n for n in itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2))) if n not in taken)
    _ask(run_path, name)
    return name


def _ask(run_path: Path, name: str) -> int:
    folder = run_path / "requests"
    answer = folder / f"{name}.answer"
    folder.mkdir(exist_ok=True)
    answer.unlink(missing_ok=True)
    atomic_write(folder / f"{name}.request", "")
    while not answer.exists():
        if not is_live(run_path):
            (folder / f"{name}.request").unlink(missing_ok=True)
            raise UserError(f"{run_path}: the run ended before it made the checkpoint; ask again, now that it is over")
        time.sleep(_POLL_S)
    content = json.loads(answer.read_text())
    answer.unlink()
    if content["error"] is not None:
        raise UserError(f"checkpoint {name} was not made: {content['error']}")
    return int(content["step"])


def list_checkpoints_of(run_path: Path) -> list[CheckpointInfo]:
    """The checkpoints of a run, oldest first."""
    from storage.checkpoints import list_checkpoints

    return list_checkpoints(run_path / "state")


def checkpoint_named(run_path: Path, name: str | None) -> str | None:
    """The checkpoint of a run that `name` means, which may be `last-good`. Raises UserError where there is none."""
    from storage.checkpoints import read_checkpoint, resolve_checkpoint

    if name is None:
        return None
    name = resolve_checkpoint(run_path / "state", name)
    read_checkpoint(run_path / "state", name)
    return name


def copy_state_of(run: RunDir) -> str:
    """Give a copied run directory a state of its own on its recipe's drives; a line saying what was copied."""
    from engine.folders import drive_folders, state_folder
    from storage.copying import copy_state

    drives = drive_folders(run.path, run.recipe.storage)
    copied = copy_state(state_folder(run.path), drives)
    folders = ", ".join(str(folder) for folder in drives)
    return f"{copied:,} bytes of state copied to {folders}" if copied else "all of this run's state is its own already"


def delete_checkpoint_of(run_path: Path, name: str) -> None:
    """Delete checkpoint `name`. Raises UserError when there is no such, or while the run is running."""
    from storage.checkpoints import delete_checkpoint, read_checkpoint

    read_checkpoint(run_path / "state", name)
    with RunDir.open(run_path) as run:
        delete_checkpoint(run.path / "state", name)


def checkpoint_steps(run_path: Path) -> list[tuple[str, int]]:
    """(name, step) of a run's checkpoints, by step; whatever cannot be read is left out.

    Reads whole manifests, some megabytes of a large model: ask again when the folder has changed.
    """
    found = []
    for manifest in (run_path / "state" / "checkpoints").glob("*/manifest.json"):
        step = _step_of(manifest)
        if step is not None:
            found.append((manifest.parent.name, step))
    return sorted(found, key=lambda item: (item[1], item[0]))


def committed_step(run_path: Path) -> int | None:
    """The step of a run's committed generation; None where there is none, or none that can be read."""
    return _step_of(run_path / "state" / "manifest.json")


def _step_of(manifest: Path) -> int | None:
    """Without checking the checksum, which takes a library that loads slowly: for showing only."""
    meta = (read_object(manifest, _MANIFEST_BYTES) or {}).get("meta")
    step = meta.get("step") if isinstance(meta, dict) else None
    return step if isinstance(step, int) else None


def scrub_run(run_path: Path) -> str:
    """Read the committed generation, every checkpoint and the data of a run; a line saying how much and how fast.

    Raises UserError listing every damaged file, or while the run is running.
    """
    from engine.folders import drive_folders, state_folder
    from engine.verify import verify_run_files
    from storage.checkpoints import checkpoint_folder, checkpoint_names
    from storage.nvme import NvmeStore

    started, size, failures = time.perf_counter(), 0, []
    with RunDir.open(run_path) as run:
        root = state_folder(run.path)
        drives = drive_folders(run.path, run.recipe.storage)
        names = checkpoint_names(root)
        for folder in (root, *(checkpoint_folder(root, name) for name in names)):
            with closing(NvmeStore.open(folder, drives=drives, read_only=True)) as store:
                checks = [store.verify]
                if folder == root:
                    checks.append(partial(verify_run_files, run.path, store.meta))
                for check in checks:
                    try:
                        size += check()
                    except UserError as error:
                        failures.append(str(error))
    if failures:
        raise UserError("\n".join(failures))
    took_s = time.perf_counter() - started
    kept = f" and {len(names)} checkpoint{'s' * (len(names) != 1)}" if names else ""
    return f"the last generation{kept}: {size:,} bytes with the data, all as written ({size / took_s / 1e9:.1f} GB/s)"
