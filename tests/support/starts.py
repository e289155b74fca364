"""Ways in which a run may be started on other machines than this one, and a run that survives them.

python tests/support/starts.py OUT     trains the real recipes in each way and writes a table to OUT/starts.md
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNWRITABLE = "/proc"
"""A folder in which not even root can make a file."""
OWN_FOLDERS = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_STATE_HOME")
LIMIT_S = 1800
"""After which a process hangs."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a command is started."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variable -> value; None: not set."""
    settings: Sequence[str] = ()
    """As --set takes them."""
    folder: str = "work"
    """Name of the current folder."""
    run: str = "run"
    """Run directory, below it."""
    terminal: bool = False
    """Output goes to a terminal."""


STARTS = {
    "as it is": Start(),
    "float32": Start(settings=["train.compute_dtype=float32"]),
    "bfloat16": Start(settings=["train.compute_dtype=bfloat16"]),
    "one thread": Start({"OMP_NUM_THREADS": "1"}),
    "default instructions": Start({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "AVX2": Start({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "no C++ compiler": Start({"PATH": "/nonexistent", "CXX": None}),
    "read-only home": Start({"HOME": UNWRITABLE, **dict.fromkeys(OWN_FOLDERS)}),
    "odd path": Start(folder="-à la carte", run="-läuft gut"),
    "TERM=dumb": Start({"TERM": "dumb"}, terminal=True),
    "LC_ALL=C": Start({"LC_ALL": "C", "LANG": None, "PYTHONUTF8": None, "PYTHONIOENCODING": None}),
    "no terminal": Start({"TERM": None, "COLUMNS": None}),
}

TOGETHER = {
    "float32, default instructions, one thread, no compiler": (
        "float32",
        "default instructions",
        "one thread",
        "no C++ compiler",
    ),
    "bfloat16, AVX2, odd path, LC_ALL=C": ("bfloat16", "AVX2", "odd path", "LC_ALL=C"),
    "read-only home, dumb terminal": ("read-only home", "TERM=dumb"),
}
"""Each of STARTS once, several at a time."""


def combined(names: Sequence[str]) -> Start:
    """The start that is all of these at once."""
    starts = [STARTS[name] for name in names]
    return Start(
        environment={key: value for start in starts for key, value in start.environment.items()},
        settings=[text for start in starts for text in start.settings],
        folder=next((start.folder for start in starts if start.folder != "work"), "work"),
        run=next((start.run for start in starts if start.run != "run"), "run"),
        terminal=any(start.terminal for start in starts),
    )


class Commands:
    """Commands that are started so in a folder of its own."""

    def __init__(self, start: Start, parent: Path) -> None:
        self.start, self.folder = start, parent / start.folder
        self.folder.mkdir(exist_ok=True)
        self.run = self.folder / start.run
        self.output = ""

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """A process whose output `self.output` gathers."""
        environment = {**os.environ, **self.start.environment}
        inside, outside = pty.openpty() if self.start.terminal else os.pipe()[::-1]
        inside, outside = (outside, inside) if self.start.terminal else (inside, outside)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env={key: value for key, value in environment.items() if value is not None},
            stdin=inside if self.start.terminal else subprocess.DEVNULL,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        threading.Thread(target=self._gather, args=(outside,), daemon=True).start()
        return process

    def _gather(self, fd: int) -> None:
        try:
            while data := os.read(fd, 1 << 16):
                self.output += data.decode(errors="replace")
        except OSError:  # a terminal whose last process is gone
            pass
        finally:
            os.close(fd)

    def done(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a command that succeeds."""
        code = process.wait(timeout=LIMIT_S)
        assert code == 0, f"exit code {code}:\n{self.output}"

    def train_killed(self, recipe: str, settings: Sequence[str], kill_after: int) -> None:
        """Train a recipe, kill the process after a step, and resume the run to its end."""
        texts = [word for text in (*settings, *self.start.settings) for word in ("--set", text)]
        process = self.begin("-m", "penstock.app.cli", "train", recipe, f"--run-dir={self.start.run}", *texts)
        while self.steps < kill_after:
            assert process.poll() is None, f"it ended before it was killed:\n{self.output}"
            time.sleep(0.05)
        process.kill()
        process.wait(timeout=LIMIT_S)
        assert not (self.run / "export").exists()
        self.done(self.begin("-m", "penstock.app.cli", "resume", os.path.join(".", self.start.run)))

    @property
    def steps(self) -> int:
        """The last step of which the run has metrics."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return next((int(json.loads(line)["step"]) for line in reversed(lines) if line.endswith("\n")), 0)


def main(out: Path) -> None:
    """Train the real recipes in every way and write a table; text_small takes 12 of its 84 steps."""
    rows = []
    for name, start in STARTS.items():
        for recipe in ("quickstart", "text_small"):
            with tempfile.TemporaryDirectory() as parent:
                commands, began = Commands(start, Path(parent)), time.monotonic()
                try:
                    result = _train(commands, recipe)
                except AssertionError as error:
                    result = f"**failed**: {str(error)[-300:]}"
                rows.append(f"| {name} | {recipe} | {result} | {time.monotonic() - began:.0f} |")
                print(rows[-1], flush=True)
    head = ["| start | recipe | result | seconds |", "|---|---|---|---|"]
    (out / "starts.md").write_text("\n".join([*head, *rows]) + "\n")


def _train(commands: Commands, recipe: str) -> str:
    if recipe == "quickstart":
        file = Path(__file__).parents[2] / "recipes" / "quickstart.py"
        texts = [word for text in commands.start.settings for word in ("--set", text)]
        commands.done(commands.begin(str(file), f"--run-dir={commands.start.run}", *texts))
        last = json.loads((commands.run / "validation.jsonl").read_text().splitlines()[-1])
        from penstock.app.recall_view import recall_of

        found = recall_of(last)
        assert found is not None
        assert found.share >= 0.9, f"retrieves {found.share:.0%}"
        assert "killed after step" in commands.output
        return f"killed, resumed, exported; retrieves {found.share:.0%}"
    commands.train_killed(recipe, ["train.steps=12", "train.validate_every=6", "storage.checkpoint_every=3"], 7)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) -> ([\d.]+)", commands.output)[-1]]
    assert losses[1] < losses[0]
    assert (commands.run / "export" / "model.safetensors").exists()
    return f"killed, resumed, exported; loss {losses[0]:.2f} -> {losses[1]:.2f} in 12 steps"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
