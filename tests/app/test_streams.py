"""Standard output and error that nobody reads, and recipes that do more than build one: real processes."""

import json
import re
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
from cli_process import FAKE, REAL, Cli, Done, done, json_lines

from penstock.app import run_commands
from penstock.app.cli import main
from penstock.app.recipe import load_recipe
from penstock.storage.errors import UserError


def shell(folder: Path, words: str, code: int) -> Done:
    """A line for bash, in which PENSTOCK is the command line and FAKE that around the stand-in."""
    line = words.replace("PENSTOCK", " ".join(REAL)).replace("FAKE", " ".join(FAKE))
    return Cli(folder, program=("bash", "-o", "pipefail", "-c")).run(line, code=code)


@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", "2>/dev/full", ">/dev/full"])
def test_a_refusal_survives_streams_that_are_closed(tmp_path: Path, redirections: str) -> None:
    found = shell(tmp_path, f"PENSTOCK plan nothing.py {redirections}", code=2)
    assert "Traceback" not in found.stdout + found.stderr
    if "2>" not in redirections:
        assert found.stderr.startswith("error: recipe nothing.py: no such file")


@pytest.mark.parametrize("redirections", [">&- 2>&-", "| head -c 1"])
def test_a_reader_that_is_gone_stops_nothing(tmp_path: Path, redirections: str) -> None:
    """Nor is anything that is printed written over a file that is opened in the place of a closed standard output."""
    found = shell(tmp_path, f"FAKE train tiny.py --run-dir out {redirections}", code=0)
    assert "Traceback" not in found.stderr
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"
    for path in (tmp_path / "out").rglob("*.json*"):
        json_lines(path) if path.suffix == ".jsonl" else json.loads(path.read_text())


def test_ctrl_c_ends_a_recipe_that_loops(cli: Cli) -> None:
    (cli.folder / "loop.py").write_text("import os\nos.write(2, b'begun\\n')\nwhile True: pass\n")
    process = Cli(cli.folder, program=REAL).start("plan", "loop.py")
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    err = done(process, code=2).stderr
    assert re.fullmatch(r"error: recipe loop\.py, line [23]: interrupted while the recipe was built\n", err)


def test_what_a_recipe_prints_is_no_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loud.py"
    path.write_text("from penstock.app.recipe import Recipe\nprint('loud')\nrecipe = Recipe(name='x')\n")
    load_recipe(path)
    assert capsys.readouterr() == ("", "loud\n")
    path.write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match="line 2: ends the process"):
        load_recipe(path)


def test_a_mistake_of_ours_gives_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for ours in (RecursionError(), OverflowError(), UnicodeError(), FileNotFoundError(2, "gone", "x"), OSError(5, "?")):
        with patch.object(run_commands, "list_runs", side_effect=ours), pytest.raises(type(ours)):
            main(["runs"])
    for theirs in (MemoryError(), PermissionError(13, "not yours", "x"), OSError(28, "full", "x")):
        with patch.object(run_commands, "list_runs", side_effect=theirs):
            assert main(["runs"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_gone_and_output_that_is_not_printed_are_told(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    found = shell(tmp_path, "cd gone && rmdir ../gone && PENSTOCK runs", code=2)
    assert found.stderr.startswith("error: the current folder no longer exists")
    found = shell(tmp_path, "PENSTOCK train --fields >/dev/full", code=2)
    assert found == ("", "error: standard output: No space left on device; the output is incomplete\n")
