"""Ways in which a run may be started on other machines than this one, and a run that survives them.

python tests/support/starts.py OUT     trains the first two recipes in each way and writes a table to OUT/starts.md
"""

import json
import os
import pty
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

SMALL = {
    "quickstart": ["train.chunk_tokens=128", "data.sequence_length=512", "data.validation_documents=4"],
    "text_small": [
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.intermediate_size=96",
        "data.max_documents=12",
        "data.validation_documents=2",
        "data.sequence_length=256",
        "data.tokenizer_vocab_size=400",
        "after.sample_tokens=4",
        "train.chunk_tokens=64",
        "train.compile=auto",
    ],
}
"""Recipe -> settings with which three steps of it are quick."""
STEPS = ["train.steps=3", "train.warmup_steps=1", "train.validate_every=3", "train.validation_sequences=1"]
STEPS += ["storage.checkpoint_every=1", "storage.part_bytes=64KiB"]


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
    "float32, default instructions, one thread, no compiler, LC_ALL=C": (
        "float32",
        "default instructions",
        "one thread",
        "no C++ compiler",
        "LC_ALL=C",
    ),
    "bfloat16, AVX2, odd path, read-only home, dumb terminal": (
        "bfloat16",
        "AVX2",
        "odd path",
        "read-only home",
        "TERM=dumb",
    ),
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


def survives(recipe: str, folder: Path, *names: str) -> None:
    """Train three steps of a recipe in all these ways at once, with a kill and a resume, and load its export."""
    from transformers import AutoModelForCausalLM

    commands = Commands(combined(names), folder)
    decay = ["train.decay_steps=none"] if recipe == "quickstart" else []
    commands.train_killed(recipe, [*SMALL[recipe], *STEPS, *decay], kill_after=1)
    assert commands.steps == 3
    assert AutoModelForCausalLM.from_pretrained(commands.run / "export").num_parameters() > 0


def retrieves(folder: Path, name: str) -> float:
    """Train the whole quickstart as `make quickstart` does; the share of the facts that it finds."""
    from penstock.app.recall_view import recall_of

    commands = Commands(STARTS[name], folder)
    texts = [word for text in commands.start.settings for word in ("--set", text)]
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.py"
    commands.done(commands.begin(str(recipe), f"--run-dir={commands.start.run}", *texts))
    assert "killed after step" in commands.output
    found = recall_of(json.loads((commands.run / "validation.jsonl").read_text().splitlines()[-1]))
    assert found is not None
    assert found.share >= 0.9, f"retrieves {found.share:.0%}"
    return found.share


def main(out: Path) -> None:
    """Write the table."""
    ways = [(name, recipe) for name in STARTS for recipe in SMALL]
    rows = []
    for name, recipe in [*ways, ("float32", "whole quickstart"), ("bfloat16", "whole quickstart")]:
        began, result = time.monotonic(), "trained, killed, resumed, exported"
        with tempfile.TemporaryDirectory() as folder:
            try:
                if recipe in SMALL:
                    survives(recipe, Path(folder), name)
                else:
                    result += f"; finds {retrieves(Path(folder), name):.0%} of the facts"
            except AssertionError as error:
                result = f"**failed**: {str(error)[-300:]}"
        rows.append(f"| {name} | {recipe} | {result} | {time.monotonic() - began:.0f} |")
        print(rows[-1], flush=True)
    head = ["| start | recipe | result | seconds |", "|---|---|---|---|"]
    (out / "starts.md").write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
