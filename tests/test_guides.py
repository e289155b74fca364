"""Every command of docs/guide/ runs, in the order of its page, on small stand-ins; test_pages.py checks options."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import make_chat_model, write_talks
from cli_process import PATIENCE_S, REAL, REPOSITORY, default_signals
from recipe_texts import settings
from transformers import AutoModelForCausalLM

from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.hf.config import model_config

GUIDES = sorted((REPOSITORY / "docs" / "guide").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SMALL = settings(
    model={"vocab_size": 400},
    train={"warmup_steps": 0, "global_batch_size": 2, "steps": 2},
    storage={"checkpoint_every": 1, "keep_every": 2},
    budgets={"gpu": "least", "ram": "least", "nvme": "512MiB"},
)
CHOICES = ("data.source=", "data.path=", "data.tokenizer_vocab_size=", "train.steps=")
"""Of `SMALL` what a page's command says for itself, or the model's folder."""


def pairs(words: list[str]) -> list[str]:
    """The values of `--set` in a command's words."""
    return [value for flag, value in itertools.pairwise(words) if flag == "--set"]


def arguments_for(verb: str, words: list[str]) -> list[str]:
    """What makes a page's command small: behind its own arguments, so that it counts."""
    said = {value.partition("=")[0] for value in pairs(words)}
    if verb == "train" and words[0] != "quickstart":
        kept = [value for value in pairs(SMALL) if not value.startswith(CHOICES)]
        kept += [] if "train.steps" in said else ["train.steps=2"]
        if "--from-scratch" not in words:
            kept.append(f"model.path=stand-ins/{words[0]}")
        return [word for value in kept for word in ("--set", value)]
    if verb == "fit":
        return ["--machine", "rtx4090-128"]
    if verb == "plan" and "machine.json" in words:
        return ["--machine", "gh200-480"]
    if verb == "probe":
        return ["--seconds", "1", "--size", "1GiB"]
    return []


def make_files(folder: Path) -> None:
    """Models for shipped recipes whose own is not there, a model that chats, texts and conversations."""
    words = (REPOSITORY / "README.md").read_text() + " <|im_start|> <|im_end|> "
    for name in ("7b_512k", "70b_gh200"):
        recipe, place = apply_overrides(load_recipe(name), pairs(SMALL)), folder / "stand-ins" / name
        recipe.model.path = None
        AutoModelForCausalLM.from_config(model_config(recipe, None)).save_pretrained(place)
        train_tokenizer([words], 400, place)
    make_chat_model(folder / "models" / "Qwen3-0.6B")
    write_talks(folder / "chats.jsonl", 150)
    texts = [f"{a} and {b} make {a + b}. " * 40 for a in range(12) for b in range(12)]
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "books").mkdir()
    for number in range(3):
        (folder / "books" / f"{number}.txt").write_text(" ".join(texts[number::3]))


def commands(page: Path) -> list[str]:
    """The lines that a reader types, in order; one that ends in a backslash goes on in the next."""
    blocks = [body for language, body in BLOCK.findall(page.read_text()) if language == "sh"]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines() if line.strip()]


def test_there_are_five_and_their_code_is_right() -> None:
    assert len(GUIDES) == 5
    for page in GUIDES:
        assert len(commands(page)) >= 4, page
        assert f"guide/{page.name}" in (REPOSITORY / "docs" / "guide.md").read_text(), "the guide leads to it"
        for language, body in BLOCK.findall(page.read_text()):
            if language == "python":
                exec(f"from penstock import *\n{body}", {})  # what it builds is checked as it is built


@pytest.mark.long
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_files(tmp_path)
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "penstock":
            line = line.replace("penstock", shlex.join(REAL), 1)
            verb, *rest = words[1:]
            more = shlex.join(arguments_for(verb, rest))
            line = line.replace(" || true", f" {more} || true") if " || true" in line else f"{line} {more}"
        elif words[0] == "python":
            line = line.replace("python ", f"{sys.executable} ")
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "cwd": tmp_path}
        env = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(REPOSITORY / "src"),
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.run(["sh", "-c", line], env=env, preexec_fn=default_signals, **how)
        said = f"{page.name}: {line}\n{process.stdout[-2000:]}{process.stderr[-2000:]}"
        assert process.returncode == 0, said
        assert "Traceback" not in process.stderr, said


SHORTER = {"steps=60": "steps=6", "=20,": "=2,", "global_batch_size=8": "global_batch_size=2"}


@pytest.mark.parametrize("short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as it is"])
def test_the_notebook_runs(
    tmp_path: Path, short: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in order, in `make test` with fewer steps."""
    (notebook,) = (REPOSITORY / "docs" / "notebooks").glob("*.ipynb")
    assert f"notebooks/{notebook.name}" in (REPOSITORY / "docs" / "python.md").read_text(), "a page leads to it"
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "committed without output"
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = "".join(cell["source"])
        for text, instead in SHORTER.items() if short else ():
            code = code.replace(text, instead)
        if cell["cell_type"] == "code":
            exec(compile(code, f"cell {number}", "exec"), space)
    said = capsys.readouterr().out
    assert "\x1b" not in said, "plain output"
    assert f"samples kept: {[2, 4, 6] if short else [20, 40, 60]}" in said
    parts = "fits: True", "trained to step", "best validation loss: {", "'After May comes' -> ", "After Friday comes"
    assert [part for part in parts if part not in said] == []
