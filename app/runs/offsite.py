"""Runs at places off this machine: a checkpoint's way there, what is there, and a run directory made of it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.app.console.working import say, working
from penstock.app.recipes.recipe import change_run, from_run_json, to_run_json
from penstock.app.runs.checkpoints import make_checkpoint
from penstock.app.runs.directory import RunLock, fresh_path, is_live, read_recipe, require_own
from penstock.app.runs.files import local_time, read_object, remove_own
from penstock.engine import preparing
from penstock.engine.config import drive_folders, state_folder
from penstock.engine.run_files import HISTORY, INPUTS, RECIPE, run_files
from penstock.storage.files.disk import atomic_write, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import one_line, shell
from penstock.storage.offsite.location import Location, is_location, parse_location

MARK = "fetch.json"
"""File of a run directory that is being made of what is at a place: which generation of which."""
_CONSTANTS = "state/constants.safetensors"
_RUNS = Path("runs")


class _Moved:
    """Tells the step under way how many of its bytes have moved."""

    def __init__(self) -> None:
        self._total = self._moved = 0
        self._began = time.monotonic()

    def begins(self, total: int) -> None:
        self._total = total

    def reported(self, moved: int) -> None:
        self._moved += moved
        rate = self._moved / max(1e-9, time.monotonic() - self._began)
        words = f"of {bytes_text(self._total)}, {bytes_text(int(rate))}/s"
        preparing.report(self._moved / self._total if self._total else 0.0, words)


def location_of(text: str) -> Location | None:
    """The place that an argument RUN names, by a scheme or as a folder that storage.offsite or `--to` wrote to, or a
    generation in it; None for a run. UserError."""
    if is_location(text):
        return parse_location(text, "RUN")
    path = Path(text).expanduser()
    try:
        is_run = (path / "recipe.json").exists()
        if not is_run and any((folder / "penstock.json").is_file() for folder in (path, path.absolute().parent)):
            return parse_location(text, "RUN")
    except (OSError, ValueError):  # no name that a file can have
        pass
    return None


def send(run_path: Path, name: str, to: str) -> str:
    """Upload checkpoint `name`, made where there is none; a line of it. UserError; what is at the place stays whole."""
    from penstock.storage.generations.checkpoints import checkpoint_folder, checkpoint_names, resolve_checkpoint
    from penstock.storage.offsite.index import Claim, require_usable
    from penstock.storage.offsite.link import Link
    from penstock.storage.offsite.send import send_checkpoint
    from penstock.storage.tier.manifest import Manifest

    require_own(run_path)
    location, recipe, root = parse_location(to, "--to"), read_recipe(run_path), state_folder(run_path.resolve())
    store = Manifest.read(root).store
    with Link(location, "--to") as link:
        require_usable(link, root, store)  # before the checkpoint is made
        name = resolve_checkpoint(root, name) if name in ("last-good", "best") else name
        if name not in checkpoint_names(root):
            name, _ = make_checkpoint(run_path, name)
        files = run_files(run_path.resolve(), recipe)
        started = time.monotonic()
        progress = _Moved()
        with working(f"sending to {location}") as shown:

            def waits() -> None:
                shown.clear()
                say("another upload of this run is under way; waiting for it")

            sent = send_checkpoint(
                Claim(link, root, store, recipe.name),
                root,
                drive_folders(run_path.resolve(), recipe.storage),
                name,
                files | {_CONSTANTS: checkpoint_folder(root, name) / Path(_CONSTANTS).name},
                name=name,
                waits=waits,
                begins=progress.begins,
                report=progress.reported,
            )
    took_s, step = time.monotonic() - started, sent.entry.step
    if not sent.moved_bytes:
        return f"checkpoint {name}: step {step:,} is already at {location}"
    return (
        f"checkpoint {name}: step {step:,}, {sent.moved_bytes:,} bytes in {took_s:.1f} s at {location}; "
        f"to continue from there: {shell('penstock', 'resume', f'{location}/{name}')}"
    )


def listed(location: Location) -> list[str]:
    """A line for each generation at a place, oldest first. UserError where there is none."""
    from penstock.storage.offsite.index import read_index
    from penstock.storage.offsite.link import Link

    with working(f"looking at {location}"), Link(location, "RUN") as link:
        index = read_index(link).index
        if index is None:
            raise UserError(f"{location}: contains no state, as penstock.json is missing; check the name")
        return [
            f"{entry.name}  step {'unknown' if entry.step is None else f'{entry.step:,}'}, generation "
            f"{entry.generation}, {bytes_text(entry.bytes)}, {time.strftime('%Y-%m-%d %H:%M', local_time(entry.time))}"
            for entry in index.entries
        ]


def fetch(
    location: Location,
    run_dir: Path | None,
    checkpoint: str | None,
    overrides: Sequence[str],
) -> Path:
    """Make a run directory of the newest generation at `location`, or of `checkpoint`; it, ready to be resumed.

    `run_dir`: new, or where this was begun before; None takes runs/<name>-<time>. `overrides` of the recipe count
    already for where its state goes. It is a run only when all of it was compared with its checksums. UserError.
    """
    from penstock.storage.offsite.fetch import fetch_files, fetch_state, find, read_small
    from penstock.storage.offsite.link import Link

    with working(f"looking at {location}"):
        link, result = find(lambda where: Link(where, "RUN"), location, checkpoint)
    with link, tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        for name in result.files:
            if name not in (RECIPE, *HISTORY, _CONSTANTS) and name.split("/")[0] not in ("data", INPUTS):
                raise UserError(f"{result.location}: names '{one_line(name, 80)}', which is not a file of a run")
        text = read_small(link, result, RECIPE, Path(scratch)).decode("utf-8", errors="replace")
        recipe = from_run_json(text, f"{result.location}/{result.folder}/{RECIPE}")
        recipe = change_run(recipe, overrides, Path.cwd())
        mark = {"place": str(result.location), "folder": result.folder}
        path = _target(run_dir, mark) or fresh_path(_RUNS, recipe.name)
        progress = _Moved()
        with _made(path, mark), working(f"fetching from {result.location}") as shown:
            path = path.resolve()
            shown.clear()
            say(f"run directory {path}: step {result.manifest.step} of {location}")
            progress.begins(result.num_bytes)
            names = [name for name in result.files if name != RECIPE]
            fetch_files(link, result, {name: path / name for name in names}, path, progress.reported)
            if not (state_folder(path) / "manifest.json").exists():
                fetch_state(link, result, state_folder(path), drive_folders(path, recipe.storage), progress.reported)
            status = {"state": "stopped", "step": result.manifest.step or 0, "total_steps": recipe.train.steps}
            atomic_write(path / "status.json", json.dumps(status))
            atomic_write(path / RECIPE, to_run_json(recipe))
            remove_own(path / MARK)
    return path


def _target(run_dir: Path | None, mark: dict[str, str]) -> Path | None:
    """`run_dir`, or where a fetch of the same was broken off, or None. UserError where it is not empty."""
    if run_dir is not None:
        if run_dir.is_dir() and any(run_dir.iterdir()) and not _is_broken_off(run_dir, mark):
            raise UserError(f"run directory {run_dir}: is not empty; choose another --run-dir")
        return run_dir
    result = sorted(_RUNS.iterdir()) if _RUNS.is_dir() else []
    return next((path for path in result if _is_broken_off(path, mark) and not is_live(path)), None)


def _is_broken_off(path: Path, mark: dict[str, str]) -> bool:
    return not (path / RECIPE).exists() and read_object(path / MARK) == mark


@contextlib.contextmanager
def _made(path: Path, mark: dict[str, str]) -> Iterator[None]:
    """A run directory that is being made: locked, and marked as one that is none yet."""
    require_writable(path)
    require_own(path)
    lock = RunLock(path)
    try:
        atomic_write(path / MARK, json.dumps(mark))
        yield
    finally:
        lock.release()
