"""A recipe that is run as a script: killed on its way and resumed, where it says so."""

import sys
from pathlib import Path

import pytest
from cli_process import FAKE, steps
from real_runs import make_corpus
from recipe_texts import recipe_text

from penstock.app.script import run_recipe
from penstock.storage import child


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)


def run(capfd: pytest.CaptureFixture[str], steps: int, *, code: int = 0) -> tuple[str, str]:
    """What mine.py and the process that trains it print."""
    Path("mine.py").write_text(recipe_text(train={"steps": steps}, storage={"checkpoint_every": 10}))
    with pytest.raises(SystemExit) as ended:
        run_recipe("mine.py", kill_after=3)
    assert ended.value.code == code
    return capfd.readouterr()


@pytest.mark.long
def test_a_script_kills_and_resumes_its_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--run-dir=run"])
    killed, rest = run(capfd, 30)[0].split(" (SIGKILL: nothing was saved, no handler ran); resuming the run\n")
    assert 3 <= int(killed.rpartition("killed after step ")[2]) < 30
    assert "trained to step 30, " in rest
    assert steps(Path("run")) == list(range(1, 31))
    before = Path("run/summary.json").read_bytes()
    monkeypatch.setattr(child, "command", lambda module, *arguments: [*FAKE, *arguments])
    assert "already contains a run" in run(capfd, 30, code=2)[1]
    assert Path("run/summary.json").read_bytes() == before


def test_what_ends_before_is_not_resumed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.setattr(child, "command", lambda module, *arguments: [*FAKE, *arguments])
    out = run(capfd, 2)[0]
    assert "trained to step 2, " in out
    assert "killed" not in out
    (made,) = Path("runs").iterdir()
    assert made.name.startswith("tiny-")
