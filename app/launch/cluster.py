"""`penstock cluster` and `penstock import-dcp`: a run on several machines, and the way back to one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.app.console.loading import loading
from penstock.app.console.printing import short_path
from penstock.app.launch.api import ready_recipe
from penstock.app.launch.run import RunObserver
from penstock.app.launch.signals import StopRequested, StopSignals
from penstock.app.recipes.recipe import change_run, from_dict
from penstock.app.runs import control
from penstock.app.runs.directory import RunDir, find_run, read_recipe
from penstock.app.runs.files import JsonLines, json_text
from penstock.engine.config import Recipe, dcp_folder, dcp_folders, idle_notes
from penstock.engine.events import Observer, Want
from penstock.engine.preparing import Checklist
from penstock.engine.run_files import STEP_FILES
from penstock.storage.files.disk import atomic_write, reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import shell

if TYPE_CHECKING:
    from penstock.engine.cluster.ranks import Ranks
    from penstock.engine.cluster.train import ClusterResult


class _Quiet(Observer):
    """The observer of every rank but the first: it stops when its machine gets a signal, and reports nothing."""

    def __init__(self) -> None:
        self.signals = StopSignals(lambda number: None, lambda: None)

    def on_begin(self) -> None:
        self.signals.interrupts_main = False

    def checkpoint_requests(self) -> list[str]:
        return []

    def wanted(self) -> Want:
        return "stop" if self.signals.requested.is_set() else "run"


def run_cluster(
    given: str,
    *,
    run_dir: Path | None,
    overrides: Sequence[str] = (),
    from_scratch: bool = False,
    context_parallel: int = 1,
) -> bool:
    """Train a recipe, or go on with a run, with all processes of torchrun; False where another of them says why not.

    `given`: a recipe, or a DCP checkpoint of a run, with `run_dir` on a disk that all machines share; or a run's
    directory. A directory that holds a run already goes on, so that a restart is the same command. Raises UserError.
    """
    with loading():
        from penstock.engine.cluster.ranks import SaidElsewhereError, joined
    try:
        with joined() as ranks:
            recipe, path, said = ranks.first_then_all(lambda: _resolve(given, run_dir, overrides, from_scratch))
            if ranks.first:
                with _enter(recipe, path, Path(given), ranks) as run:
                    _train_first(run, ranks, context_parallel, said)
            else:
                _run_other(recipe, path, ranks, context_parallel)
    except SaidElsewhereError:
        return False
    return True


def _resolve(
    given: str, run_dir: Path | None, overrides: Sequence[str], from_scratch: bool
) -> tuple[Recipe, Path, list[str]]:
    """The recipe, the run directory, and what to tell of the recipe."""
    if run_dir is None:
        path = _run_named(given)
        if from_scratch:
            raise UserError(f"--from-scratch: {path} is a run, which already has weights; leave --from-scratch out")
        before = read_recipe(path)
        recipe = change_run(before, overrides, Path.cwd())
        return recipe, path, idle_notes(recipe, before)
    if (Path(given) / "recipe.json").is_file():
        raise UserError(f"--run-dir: {given} is a run, which continues in its own directory; leave --run-dir out")
    from penstock.engine.cluster.layout import RECORD_NAME, read_record

    if (Path(given) / RECORD_NAME).is_file():
        before = from_dict(read_record(Path(given)).recipe, given, is_run=True)
        recipe = change_run(before, overrides, Path.cwd())
        return recipe, run_dir.absolute(), idle_notes(recipe, before)
    recipe, said = ready_recipe(given, overrides, from_scratch)
    return recipe, run_dir.absolute(), said


def _run_named(given: str) -> Path:
    try:
        return find_run(given).resolve()
    except UserError as error:
        raise UserError(
            f"{error}. For a recipe, add --run-dir DIR, a directory on a disk that all machines share"
        ) from None


def _enter(recipe: Recipe, path: Path, given: Path, ranks: Ranks) -> RunDir:
    """Make or open the run directory, which the first rank holds while all of them train."""
    from penstock.engine.cluster.layout import RECORD_NAME, bring, read_record

    def enter() -> RunDir:
        if (path / "recipe.json").is_file():
            run = RunDir.open(path)
            run.recipe = recipe
        else:
            run = RunDir.create(recipe, path)
        if (given / RECORD_NAME).is_file() and not dcp_folders(path):
            to = dcp_folder(path, read_record(given).step)
            with reporting(to, "copying the checkpoint"):
                bring(given, to)
        return run

    return ranks.together(enter)


def _train_first(run: RunDir, ranks: Ranks, context_parallel: int, said_before: list[str]) -> None:
    """Rank 0: it writes to the run directory, and says what there is to say."""
    from penstock.engine.cluster.train import train_cluster
    from penstock.engine.train import TrainResult

    control.forget(run.path)
    observer = RunObserver(run, max(dcp_folders(run.path), default=0), Console())

    def work() -> tuple[TrainResult, str]:
        result = train_cluster(
            run.recipe, ranks, run_dir=run.path, observer=observer, context_parallel=context_parallel
        )
        trained = TrainResult(steps=result.step, stopped=result.stopped, early_end=result.early_end)
        return trained, _outcome(result)

    if (trained := observer.train(work, said_before, "the same command continues the run")) is not None:
        observer.display.message(trained[1])


def _run_other(recipe: Recipe, path: Path, ranks: Ranks, context_parallel: int) -> None:
    from penstock.engine.cluster.train import train_cluster

    ranks.together(lambda: None)  # while the first rank enters the run directory
    observer = _Quiet()  # type: ignore[abstract]  # what it does not define does nothing
    with observer.signals:
        try:
            train_cluster(recipe, ranks, run_dir=path, observer=observer, context_parallel=context_parallel)
        except StopRequested:
            return


def _outcome(result: ClusterResult) -> str:
    if result.folder is None:
        if result.stopped:
            return f"stopped after step {result.step:,}; the same command continues the run"
        return f"finished after step {result.step:,}; nothing left to do"
    back = shell("penstock", "import-dcp", short_path(result.folder), "--run-dir", "DIR")
    if result.stopped:
        return f"stopped after step {result.step:,}; the same command continues it, or on one machine: {back}"
    return f"finished after step {result.step:,}; to export it, or to continue on one machine: {back}"


def import_dcp(given: Path, *, run_dir: Path | None, overrides: Sequence[str] = ()) -> tuple[Path, int]:
    """Make a run directory of a DCP checkpoint, or of the newest one of a run; it, and its step. `overrides`: as of a
    resumed run. Raises UserError; then nothing is left."""
    with loading():
        from penstock.engine.cluster.convert import read_dcp
        from penstock.engine.cluster.layout import read_record
        from penstock.engine.run_model import describe_run
    given = given.expanduser()
    folder = _newest(given)
    record = read_record(folder)
    recipe = from_dict(record.recipe, str(folder), is_run=True)
    recipe = change_run(recipe, overrides, Path.cwd())
    with RunDir.create(recipe, run_dir) as run:
        try:
            observer = RunObserver(run, record.step, Console(stderr=True))
            checklist = Checklist(observer)
            try:
                spec = describe_run(recipe, run.path, checklist).spec
                with checklist.step("writing the first generation"):
                    read_dcp(folder, record, spec, recipe, run.path)
            finally:
                observer.display.close()
                observer.log.drain()  # its thread would write to the directory of a run that is discarded
            _take_history(folder, run.path, record.step)
            observer.close("stopped")
        except BaseException:
            run.discard()
            raise
        return run.path, record.step


def _newest(given: Path) -> Path:
    folders = dcp_folders(given)
    if not folders and (given / "recipe.json").is_file():
        raise UserError(f"{given}: is a run without a DCP checkpoint; continue it with penstock resume")
    return folders[max(folders)] if folders else given


def _take_history(folder: Path, run: Path, step: int) -> None:
    """Copy what the run of a checkpoint, where it lies in one's directory, reported up to the checkpoint's step."""
    source = folder.resolve().parent.parent
    if folder.resolve() not in dcp_folders(source).values():
        return
    for name in STEP_FILES:
        lines = [line for line in JsonLines(source / name).steps() if line["step"] <= step]
        if lines:
            atomic_write(run / name, "".join(json_text(line) for line in lines))
