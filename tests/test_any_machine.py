"""The first two recipes start, train, survive their kill and export on any CPU, in any environment."""

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import PATIENCE_S
from transformers import AutoModelForCausalLM

from penstock.app.planning.plan import plan_stages
from penstock.app.recipes.recipe import apply_overrides, load_recipe

UNWRITABLE = "/proc"
"""A folder in which not even root can make a file."""
OWN_FOLDERS = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_STATE_HOME")
TEXT = "model.num_layers=2 model.hidden_size=64 model.intermediate_size=96 data.max_documents=12 "
TEXT += "data.validation_documents=2 data.sequence_length=256 data.tokenizer_vocab_size=400 after.sample_tokens=4 "
TEXT += "train.chunk_tokens=64 train.compile=auto"
FACTS = "train.chunk_tokens=128 data.sequence_length=512 data.validation_documents=4 train.decay_steps=none"
SMALL = {"quickstart": FACTS.split(), "text_small": TEXT.split()}
"""Recipe -> settings with which three steps of it are quick."""
STEPS = ["train.steps=3", "train.warmup_steps=1", "train.validate_every=3", "train.validation_sequences=1"]
STEPS += ["storage.checkpoint_every=1", "storage.part_bytes=64KiB"]


STARTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "float32": {"settings": ["train.compute_dtype=float32"]},
    "bfloat16": {"settings": ["train.compute_dtype=bfloat16"]},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "default instructions": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no C++ compiler": {"PATH": "/nonexistent", "CXX": None},
    "read-only home": {"HOME": UNWRITABLE, **dict.fromkeys(OWN_FOLDERS)},
    "odd path": {"folder": "-à la carte", "run": "-läuft gut"},
    "TERM=dumb": {"TERM": "dumb", "terminal": True},
    "LC_ALL=C": {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": None, "PYTHONIOENCODING": None},
    "no terminal": {"TERM": None, "COLUMNS": None},
}
"""Way -> what is not as usual: variables in capitals (None: not set), and what `Commands` has else."""
TOGETHER = {
    "quickstart": ("float32", "default instructions", "one thread", "no C++ compiler", "LC_ALL=C"),
    "text_small": ("bfloat16", "AVX2", "odd path", "read-only home", "TERM=dumb"),
}
"""By recipe each of STARTS once, several at a time."""


class Commands:
    """Commands that are started in all these ways at once, in a folder of its own."""

    def __init__(self, parent: Path, names: Sequence[str]) -> None:
        how: dict[str, Any] = {"settings": [], "folder": "work", "run": "run", "terminal": False}
        for name in names:
            how |= STARTS[name]
        variables = {**os.environ, **{name: value for name, value in how.items() if name.isupper()}}
        self.environment = {name: value for name, value in variables.items() if value is not None}
        self.settings, self.terminal, self.name = how["settings"], how["terminal"], how["run"]
        self.folder = parent / how["folder"]
        self.folder.mkdir(exist_ok=True)
        self.run = self.folder / self.name
        self.output = ""

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command whose output `self.output` gathers."""
        outside, inside = pty.openpty() if self.terminal else os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.app.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=inside if self.terminal else subprocess.DEVNULL,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        threading.Thread(target=self._gather, args=(outside,), daemon=True).start()
        return process

    def _gather(self, fd: int) -> None:
        with contextlib.suppress(OSError), open(fd, "rb", buffering=0) as file:  # a terminal whose last process is gone
            while data := file.read(1 << 16):
                self.output += data.decode(errors="replace")

    def steps(self) -> int:
        """How many steps the run has metrics of."""
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0


def survives(recipe: str, folder: Path, *names: str) -> None:
    """Train three steps of a recipe in all these ways at once, kill the process after one, resume the run to its end,
    and load its export."""
    commands = Commands(folder, names)
    texts = [word for text in (*SMALL[recipe], *STEPS, *commands.settings) for word in ("--set", text)]
    process = commands.begin("train", recipe, f"--run-dir={commands.name}", *texts)
    while commands.steps() < 1:
        assert process.poll() is None, f"it ended before it was killed:\n{commands.output}"
        time.sleep(0.05)
    process.kill()
    process.wait(timeout=PATIENCE_S)
    assert not (commands.run / "export").exists()
    code = commands.begin("resume", os.path.join(".", commands.name)).wait(timeout=PATIENCE_S)
    assert code == 0, f"exit code {code}:\n{commands.output}"
    assert commands.steps() == 3
    assert AutoModelForCausalLM.from_pretrained(commands.run / "export").num_parameters() > 0


def test_every_start_is_one_of_those_together() -> None:
    together = [name for names in TOGETHER.values() for name in names]
    assert sorted([*together, "as it is", "no terminal"]) == sorted(STARTS)  # the others have no terminal either


@pytest.mark.parametrize("recipe", TOGETHER)
def test_it_starts_anywhere(tmp_path: Path, recipe: str) -> None:
    survives(recipe, tmp_path, *TOGETHER[recipe])


@pytest.mark.long
@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("name", STARTS)
def test_each_recipe_starts_anywhere(tmp_path: Path, recipe: str, name: str) -> None:
    survives(recipe, tmp_path, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipes_as_they_are_fit_in_either_dtype(recipe: str, dtype: str) -> None:
    wanted = apply_overrides(load_recipe(recipe), [f"train.compute_dtype={dtype}"])
    found = next(plan_stages(wanted))
    assert found["fits"]
    assert all(found["tiers"][tier]["peak_bytes"] <= found["tiers"][tier]["budget_bytes"] for tier in ("gpu", "ram"))
