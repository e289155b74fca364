"""A recipe that is run as a script: killed on its way and resumed, where it says so."""

import json
import sys
from pathlib import Path

from cli_process import done, started
from real_runs import make_corpus
from recipe_texts import recipe_text

KILLED = """
if __name__ == "__main__":
    run_recipe(__file__, kill_after=3)
"""


def test_a_script_kills_its_run_and_resumes_it(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    text = recipe_text(train={"steps": 60}, storage={"checkpoint_every": 10})
    (tmp_path / "mine.py").write_text(text + KILLED)
    out = done(started(tmp_path, sys.executable, "mine.py", "--run-dir=run", OMP_NUM_THREADS="1")).stdout
    killed, rest = out.split(" (SIGKILL: nothing was saved, no handler ran); resuming the run\n")
    assert 3 <= int(killed.rpartition("killed after step ")[2]) < 60
    assert "trained to step 60, " in rest
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))
    before = (tmp_path / "run" / "summary.json").read_bytes()
    said = done(started(tmp_path, sys.executable, "mine.py", "--run-dir", "run"), code=2).stderr
    assert "already contains a run" in said
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_a_run_that_ends_before_is_not_resumed(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    (tmp_path / "mine.py").write_text(recipe_text(train={"steps": 2}) + KILLED)
    out = done(started(tmp_path, sys.executable, "mine.py")).stdout
    assert "trained to step 2, " in out
    assert "killed" not in out
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-")
