"""Random programs of what people do to runs, checked after every step against a model of what must exist.

A run trains, is killed, copied, moved, removed, put back from a backup, given checkpoints, moved to other drives,
scrubbed. The store and the commands' functions are real; training writes content that follows from a number, so that a
program takes a fraction of a second.
"""

import contextlib
import copy
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from nvme_state import SPECS, advance, assert_holds, content
from samples import samples

from penstock.app.recipes.recipe import to_json
from penstock.app.runs.checkpoints import copy_state_of, delete_checkpoint_of, make_checkpoint, scrub_run
from penstock.app.runs.directory import RunDir, read_recipe
from penstock.engine.config import Recipe, StorageConfig, drive_folders, state_folder
from penstock.engine.hf.constants import CONSTANTS_FILE, write_constants
from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import checkpoint_folder, checkpoint_names
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import Manifest

PROGRAMS = 200
EXPLORED = int(os.environ.get("PENSTOCK_PROGRAMS", "0"))
"""That many programs which nobody has run yet, in place of the same ones each time."""
STEPS = 20
CHECKPOINTS = st.sampled_from(["one", "two"])
DRIVES = st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=2, unique=True)
NAMES = "abcdef"
another = precondition(lambda self: len(self.runs) < len(NAMES))
MOMENTS = st.none() | st.none() | st.integers(0, 90)
CHANGING = ("open", "write", "pwrite", "pwritev", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "link")


def read_state(folder: Path, drives: list[Path]) -> int:
    """The number of the state in the store, or the checkpoint, in `folder`, every element of which is right."""
    with closing(NvmeStore.open(folder, drives=drives, read_only=True)) as store:
        number = int(store.meta["step"])
        assert_holds(store, number)
        return number


def look_at(folder: Path, number: int) -> None:
    """That the files which the manifest in `folder` names hold state `number`: without our reading code, and fast."""
    manifest = Manifest.read(folder)
    assert manifest.meta["step"] == number
    places = {record.id: Path(os.path.normpath(folder / record.path)) for record in manifest.drives}
    for index, (spec, stored) in enumerate(manifest.arrays.items()):
        expected = content(spec, number)
        for part, (start, stop) in enumerate(spec.parts()):
            drive = places[stored.drives[(index + part) % len(stored.drives)]]
            path = drive / spec.buffer / spec.kind / str(stored.slot) / f"c.{part}.0"
            assert path.read_bytes().startswith(expected[start:stop].view(torch.uint8).numpy().tobytes()), path


def in_child(act: Callable[[], Any], moment: int | None) -> Exception | None:
    """Carry out `act` in this process, or in a child that dies before its call number `moment` that changes the disk.

    Returns what was refused. A child that lives through it refuses nothing.
    """
    if moment is None:
        try:
            act()
        except UserError as error:
            return error
        return None
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            _die_at(moment)
            act()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL, status
    return None


def _die_at(moment: int) -> None:
    calls = itertools.count(1)

    def patched(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) > moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, patched(getattr(os, name)))


@dataclass
class Run:
    """What must exist of a run directory."""

    name: str
    state: int
    checkpoints: dict[str, int] = field(default_factory=dict)
    owns: bool = True
    """Whether it is no copy: what it names is its own."""
    stale: bool = False
    """Whether an older run directory was put in its place, and its drives may know better."""
    unlisted: set[str] = field(default_factory=set)
    """Checkpoints on its drives that the older run directory does not list."""


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.world = Path(tempfile.mkdtemp(prefix="penstock-programs-", dir=shm if os.access(shm, os.W_OK) else None))
        self.runs: dict[str, Run] = {}
        self.known: dict[str, Run] = {}
        """As the drives of a run know it, whichever run directory is there."""
        self.backups: list[tuple[Run, Path]] = []
        self.numbers = itertools.count(1)

    def teardown(self) -> None:
        try:
            self.all_can_be_read()
        finally:
            shutil.rmtree(self.world, ignore_errors=True)

    # ------------------------------------------------------------------ helpers

    def path(self, name: str) -> Path:
        return self.world / "runs" / name

    def root(self, run: Run) -> Path:
        return state_folder(self.path(run.name))

    def drives(self, run: Run) -> list[Path]:
        return drive_folders(self.path(run.name), read_recipe(self.path(run.name)).storage)

    def write_recipe(self, run_path: Path, drives: list[str]) -> None:
        nvme = [str(self.world / "drives" / drive) for drive in drives]
        recipe = Recipe(name="r", storage=StorageConfig(nvme=nvme or None))
        (run_path / "recipe.json").write_text(to_json(recipe))

    def places(self, run: Run) -> set[Path]:
        """Folders that the manifests of a run name."""
        root, found = self.root(run), set[Path]()
        for folder in (root, *(root / "checkpoints" / name for name in checkpoint_names(root))):
            found |= {Path(os.path.normpath(folder / drive.path)) for drive in Manifest.read(folder).drives}
        return found

    def is_inside(self, run: Run) -> bool:
        return all(place.is_relative_to(self.path(run.name)) for place in self.places(run))

    def taken(self, run: Run | None, folders: list[Path]) -> bool:
        """Whether another run's state is in one of the drives' folders, or may be."""
        used = [folder for folder in folders if (folder / "drive.json").exists()]
        return any(run is None or folder not in self.places(run) for folder in used)

    def pick(self, data: Any) -> Run:
        return self.runs[data.draw(st.sampled_from(sorted(self.runs)))]

    def free_name(self, data: Any) -> str:
        return data.draw(st.sampled_from([name for name in NAMES if name not in self.runs]))

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """Everything but locks, with inode, size and time of change."""
        found = {}
        for folder, _, names in os.walk(self.world):
            for name in [*names, "."]:
                path = os.path.join(folder, name)
                status = os.stat(path)
                if name != "run.lock" and not (name == "." and Path(folder).parent == self.world / "runs"):
                    found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return found

    def committed(self, run: Run) -> int:
        return int(Manifest.read(self.root(run)).meta["step"])

    def remember(self, run: Run) -> None:
        """What is committed is what the drives know."""
        self.known[run.name] = copy.deepcopy(run)

    def adopt(self, name: str, old: Run, folder: Path) -> Run:
        """A copy of `folder`, which holds `old`, is the run directory of that name."""
        shutil.copytree(folder, self.path(name), symlinks=True)
        run = self.runs[name] = copy.deepcopy(old)
        run.name = name
        return run

    def change(self, run: Run, act: Callable[[NvmeStore], object], moment: int | None, allowed: list[int]) -> bool:
        """Open a run to change it, which leaves it in one of the states `allowed`; whether nothing was refused."""
        folders = self.drives(run)
        may_refuse, must_refuse = not run.owns or run.stale or self.taken(run, folders), self.must_refuse(run)
        error = in_child(lambda: self.open(run, folders, act), moment)
        assert error is None or may_refuse, error
        assert error is not None or not must_refuse or moment is not None
        self.settle(run, [run.state] if must_refuse else [run.state, *allowed])
        return error is None

    def open(self, run: Run, folders: list[Path], act: Callable[[NvmeStore], object]) -> None:
        path = self.path(run.name)
        with RunDir.open(path), closing(NvmeStore.open(state_folder(path), drives=folders)) as store:
            act(store)

    # ------------------------------------------------------------------ what people do

    @initialize(drives=DRIVES)
    def begin(self, drives: list[str]) -> None:
        (self.world / "runs").mkdir()
        self.create("a", drives)
        self.create("b", [])

    @another
    @rule(data=st.data(), drives=DRIVES | st.just([]))
    def begin_another(self, data: Any, drives: list[str]) -> None:
        self.create(self.free_name(data), drives)

    def create(self, name: str, drives: list[str]) -> None:
        path, number = self.path(name), next(self.numbers)
        path.mkdir()
        self.write_recipe(path, drives)
        folders = drive_folders(path, read_recipe(path).storage)
        taken = self.taken(None, folders)

        def act() -> None:
            with closing(NvmeStore.create(state_folder(path), SPECS, budget_bytes=None, drives=folders)) as store:
                advance(store, number, constants=write_constants(store.root / CONSTANTS_FILE, {}))

        error = in_child(act, None)
        assert (error is not None) == taken, error
        if error is None:
            self.runs[name] = Run(name, number)
            self.remember(self.runs[name])
        else:
            shutil.rmtree(path)

    @rule(data=st.data(), commits=st.integers(1, 3), drives=st.none() | DRIVES, moment=MOMENTS)
    def train(self, data: Any, commits: int, drives: list[str] | None, moment: int | None) -> None:
        run = self.pick(data)
        path, numbers = self.path(run.name), [next(self.numbers) for _ in range(commits)]
        if drives is not None and not self.is_inside(run):
            self.write_recipe(path, drives)

        def act(store: NvmeStore) -> None:
            advance(store, *numbers, constants=store.meta["constants"])

        if self.change(run, act, moment, numbers) and moment is None:
            assert run.state == numbers[-1]

    def must_refuse(self, run: Run) -> bool:
        """Whether changing anything would take a newer state, or that of another run directory."""
        if run.owns:
            return run.stale and self.known[run.name].state != run.state
        places = self.places(run)
        return any(other.owns and places & self.places(other) for other in self.runs.values())

    def settle(self, run: Run, allowed: list[int]) -> None:
        """After a process that may have died: the committed state is one of those that it may be."""
        state = self.committed(run)
        assert state in allowed, (state, allowed)
        if state != run.state:  # it was let in: it has taken over what nobody else owned
            if not run.owns:  # the owner, which is gone, may have deleted what it lists
                run.checkpoints = {name: n for name, n in run.checkpoints.items() if self.is_there(run, name, n)}
            run.owns, run.stale = True, False
            run.state = state
            self.remember(run)

    def is_there(self, run: Run, name: str, number: int) -> bool:
        try:
            look_at(checkpoint_folder(self.root(run), name), number)
        except (OSError, UserError, AssertionError):
            return False
        return True

    @rule(data=st.data(), name=CHECKPOINTS, moment=MOMENTS)
    def keep(self, data: Any, name: str, moment: int | None) -> None:
        run = self.pick(data)
        had = name in checkpoint_names(self.root(run))
        error = in_child(lambda: make_checkpoint(self.path(run.name), name), moment)
        if error is not None:
            listed = "that this run does not list" in str(error)
            assert had or listed or not run.owns or run.stale or self.taken(run, self.drives(run)), error
        if not had and name in checkpoint_names(self.root(run)):
            assert run.owns or error is None
            run.checkpoints[name] = run.state
            if run.owns:
                self.known[run.name].checkpoints[name] = run.state

    @rule(data=st.data(), name=CHECKPOINTS, moment=MOMENTS)
    def delete(self, data: Any, name: str, moment: int | None) -> None:
        run = self.pick(data)
        had = name in checkpoint_names(self.root(run))
        error = in_child(lambda: delete_checkpoint_of(self.path(run.name), name), moment)
        assert (error is not None) == (not had) or moment is not None, error
        if had and name not in checkpoint_names(self.root(run)):
            del run.checkpoints[name]
            if run.owns and not run.stale:
                self.remember(run)
            elif run.owns:
                self.known[run.name].checkpoints.pop(name, None)

    @rule(data=st.data(), name=CHECKPOINTS, moment=MOMENTS)
    def go_back(self, data: Any, name: str, moment: int | None) -> None:
        run = self.pick(data)
        if name not in run.checkpoints:
            name = data.draw(st.sampled_from(sorted(run.checkpoints) or [name]))
        if name in run.checkpoints:
            self.change(run, lambda store: store.restore(name), moment, [run.checkpoints[name]])
        else:
            error = in_child(lambda: self.open(run, self.drives(run), lambda store: store.restore(name)), moment)
            assert moment is not None or error is not None, "there is no such checkpoint"

    @another
    @rule(data=st.data())
    def copy(self, data: Any) -> None:
        run = self.pick(data)
        other = self.adopt(self.free_name(data), run, self.path(run.name))
        other.owns = self.is_inside(other) and (not run.stale or self.is_inside(run))
        self.remember(other)

    @precondition(lambda self: len(self.runs) > 1)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        """What lies on drives outside of it stays there, for a copy or a backup that names it."""
        run = self.pick(data)
        shutil.rmtree(self.path(run.name))
        del self.runs[run.name], self.known[run.name]

    @another
    @precondition(lambda self: bool(self.backups))
    @rule(data=st.data())
    def restore_elsewhere(self, data: Any) -> None:
        old, folder = data.draw(st.sampled_from(self.backups))
        run = self.adopt(self.free_name(data), old, folder)
        run.owns = self.is_inside(run)
        self.remember(run)

    @another
    @rule(data=st.data())
    def move(self, data: Any) -> None:
        run, name = self.pick(data), self.free_name(data)
        self.path(run.name).rename(self.path(name))
        del self.runs[run.name]
        self.known[name] = self.known.pop(run.name)
        run.name = name
        self.runs[name] = run

    @rule(data=st.data())
    def back_up(self, data: Any) -> None:
        run = self.pick(data)
        target = self.world / "backups" / str(len(self.backups))
        shutil.copytree(self.path(run.name), target, symlinks=True)
        self.backups.append((copy.deepcopy(run), target))

    @precondition(lambda self: any(run.name in self.runs for run, _ in self.backups))
    @rule(data=st.data())
    def put_back(self, data: Any) -> None:
        """An older copy of a run directory takes the place of what is there under its name."""
        old, folder = data.draw(st.sampled_from([item for item in self.backups if item[0].name in self.runs]))
        before = self.runs[old.name]
        same_run = Manifest.read(folder / "state").store == Manifest.read(self.path(old.name) / "state").store
        if not same_run or not before.owns or not old.owns:
            return
        known = self.known[old.name]
        shutil.rmtree(self.path(old.name))
        run = self.adopt(old.name, old, folder)
        if self.is_inside(run):
            self.remember(run)
            return
        run.stale = True
        run.unlisted = known.checkpoints.keys() - run.checkpoints.keys()
        run.checkpoints = {name: n for name, n in run.checkpoints.items() if known.checkpoints.get(name) == n}

    @precondition(lambda self: any(run.stale for run in self.runs.values()))
    @rule(data=st.data())
    def do_what_the_message_says(self, data: Any) -> None:
        run = self.runs[data.draw(st.sampled_from(sorted(name for name, run in self.runs.items() if run.stale)))]
        root, folders = self.root(run), self.drives(run)
        if self.taken(run, folders):
            return

        def act(store: NvmeStore) -> None:
            for said in store.warnings:
                command = said.partition("To list it: ")[2].partition("; to drop")[0]
                assert not command or os.system(command) == 0

        places = self.places(run)
        shared = any(other is not run and places & self.places(other) for other in self.runs.values())
        must_refuse = not run.owns and self.must_refuse(run)
        error = in_child(lambda: self.open(run, folders, act), None)
        if must_refuse or (shared and "--copy-state" in str(error)):  # whose state it is comes first
            assert "--copy-state" in str(error), error
            return
        if error is not None and not any((place / "drive.json").exists() for place in self.places(run)):
            assert "is it mounted" in str(error), error  # every drive that it names was given up since
            return
        if error is not None:
            command = str(error).partition("from the newer generation: ")[2].partition(". Nothing")[0]
            assert command, error
            assert os.system(command) == 0
            self.open(run, folders, act)
        listed = set(checkpoint_names(root))
        assert run.unlisted <= listed
        run.checkpoints |= {name: self.known[run.name].checkpoints[name] for name in run.unlisted}
        run.unlisted = set()
        run.state = self.committed(run)
        assert run.state == self.known[run.name].state
        run.stale = False

    @rule(data=st.data(), drives=DRIVES, moment=MOMENTS)
    def copy_state(self, data: Any, drives: list[str], moment: int | None) -> None:
        run = self.pick(data)
        path = self.path(run.name)
        if run.owns or run.stale:
            return
        self.write_recipe(path, drives)

        def act() -> None:
            with RunDir.open(path) as directory:
                copy_state_of(directory)

        error = in_child(act, moment)
        assert self.committed(run) == run.state
        if error is None and moment is None:
            # What it could be copied from may have gone, with its owner: then all of it was its own.
            run.owns = True
            assert read_state(self.root(run), self.drives(run)) == run.state
            listed = checkpoint_names(self.root(run))
            run.checkpoints = {name: number for name, number in run.checkpoints.items() if name in listed}
            self.remember(run)

    @rule(data=st.data())
    def scrub(self, data: Any) -> None:
        run = self.pick(data)
        before = self.tree()
        error = in_child(lambda: scrub_run(self.path(run.name)), None)
        assert self.tree() == before
        assert error is None or not run.owns or run.stale, error

    # ------------------------------------------------------------------ what must be

    @invariant()
    def nothing_is_lost(self) -> None:
        for run in self.runs.values():
            if run.owns and not run.stale:
                look_at(self.root(run), run.state)
            for name, number in run.checkpoints.items() if run.owns else ():
                look_at(checkpoint_folder(self.root(run), name), number)

    def all_can_be_read(self) -> None:
        for run in self.runs.values():
            root = self.root(run)
            if not run.owns or not run.stale:
                with contextlib.nullcontext() if run.owns else contextlib.suppress(UserError):  # never the wrong bytes
                    assert read_state(root, self.drives(run)) == run.state
            for name, number in run.checkpoints.items() if run.owns else ():
                assert read_state(checkpoint_folder(root, name), self.drives(run)) == number


@pytest.mark.sampled
def test_random_programs() -> None:
    checks = settings(
        max_examples=EXPLORED or samples(6, PROGRAMS), derandomize=not EXPLORED, stateful_step_count=STEPS,
        deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=False,
        phases=[Phase.generate],  # a program that fails is printed as it is: making it smaller takes many minutes
    )  # fmt: skip
    stateful.run_state_machine_as_test(Programs, settings=checks)
