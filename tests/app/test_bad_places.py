"""Folders that a machine does not give: one clear message, whatever was to be done."""

import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny

import penstock.app.cli
from penstock.app.rundir import find_run
from penstock.engine.data.corpus import random_corpus
from penstock.engine.runtime.failures import explain
from penstock.storage.errors import UserError


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A run that one may not look into, in a folder that other users may."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "run").mkdir()
    (folder / "run" / "recipe.json").write_text("{}")
    (folder / "run").chmod(0)
    yield folder / "run"
    (folder / "run").chmod(0o700)
    shutil.rmtree(folder)


def as_another(act: Callable[[], None]) -> None:
    """Carry out `act` as a user who is not root: as this one, or as nobody in a child."""
    if os.geteuid() != 0:
        return act()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_that_one_may_not_look_into_is_not_said_to_be_missing(unreadable: Path) -> None:
    def act() -> None:
        with pytest.raises(UserError, match=rf"{unreadable}: .*no permission to read it"):
            find_run(str(unreadable))

    as_another(act)


def test_no_folder_for_temporary_files_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where /tmp, /var/tmp and the current folder are read-only or full: libraries need one when they are loaded."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    monkeypatch.setattr(penstock.app.cli, "_all_commands", lambda: lambda *args, **kwargs: tempfile.mkdtemp())
    assert penstock.app.cli.main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "/proc/none" in said
    assert "set TMPDIR" in said


def test_tokens_that_find_no_room_are_one_message(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path}/corpus.*ulimit -f"):
            random_corpus(tiny.data(), 300, tmp_path / "corpus")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []
    random_corpus(tiny.data(), 300, tmp_path / "corpus")
    assert (tmp_path / "corpus/meta.json").exists()


def test_a_compiler_without_room_is_the_disks_fault(tmp_path: Path) -> None:
    """What Inductor raises then, with pages of the compiler's command before and after it."""
    said = "C++ compile error\n\ng++ -O3 ...\n<built-in>: fatal error: when writing output to /tmp/x/header.i: "
    with tiny.session(tmp_path) as session:
        found = explain(RuntimeError(f"{said}No space left on device\nmore"), None, session.plan)
        assert found is not None
        assert "/tmp/x/header.i: No space left on device; free some space" in str(found)
        assert "TMPDIR" in str(found)
        assert "g++ -O3" not in str(found)
        assert explain(RuntimeError("C++ compile error: expected ';'"), None, session.plan) is None
