"""Nothing is asked of another machine that the user has not asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import REPOSITORY
from model_folders import as_users_have_it
from no_network import cut
from recipe_texts import recipe_text
from samples import cases

RECIPE = """
from penstock import AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, TrainConfig

recipe = Recipe(
    name="local",
    model=ModelConfig(path="model", added_tokens=["<|note|>"]),
    data=DataConfig(source="text", path="text.txt", sequence_length=16),
    train=TrainConfig(steps=2, lr=1e-3, compile="off", calibrate=False, device="cpu"),
    budgets=BudgetConfig(gpu="1GiB", ram="1GiB"),
    after=AfterConfig(export=True, export_dtype="float32", sample_prompt="some", sample_tokens=3),
)
"""


def tried(folder: Path, *arguments: str, offline: str | None = None) -> str:
    """What a command that ends well has tried to reach."""
    environment, log = cut(folder / "cut")
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    unset = ("HF_HUB_OFFLINE", "PENSTOCK_OFFLINE_BY_DEFAULT", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    given = {} if offline is None else {"HF_HUB_OFFLINE": offline}
    own = {"HF_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.app.cli", *arguments], env=inherited | own | given | environment, cwd=folder,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text()


def test_the_watch_sees_what_is_tried(tmp_path: Path) -> None:
    environment, log = cut(tmp_path)
    code = "import urllib.request; urllib.request.urlopen('http://huggingface.co', timeout=3)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert "Temporary failure in name resolution" in done.stderr
    assert log.read_text().startswith("getaddrinfo huggingface.co")


@pytest.mark.parametrize("arguments", cases([("--help",), ("plan", "tiny.py", "--machine", "rtx4090-64")], ("--help",)))
def test_help_and_a_plan_ask_nobody(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    budgets = dict.fromkeys(("gpu", "ram", "nvme"))
    text = recipe_text(model={"vocab_size": 300}, data={"source": "random", "path": None}, budgets=budgets)
    (tmp_path / "tiny.py").write_text(text)
    assert tried(tmp_path, *arguments) == ""


@pytest.mark.long
@pytest.mark.parametrize("offline", [None, "0", "1"])
def test_a_fine_tune_from_a_folder_to_an_export_asks_nobody(tmp_path: Path, offline: str | None) -> None:
    as_users_have_it(tmp_path / "model", "llama", True)
    (tmp_path / "text.txt").write_text("some text to train on\n" * 200)
    (tmp_path / "local.py").write_text(RECIPE)
    assert tried(tmp_path, "train", "local.py", "--run-dir", "run", offline=offline) == ""
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
