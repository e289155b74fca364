"""Every file of recipes/: what it says of itself, the model it describes, and that it runs when shrunk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from app.recipe import from_json, load_recipe, to_json
from engine.hf.config import model_config
from engine.machine.presets import PRESETS
from engine.model.anatomy import take_apart, validate_context
from engine.model.check import check_model
from storage.errors import UserError

REPOSITORY = Path(__file__).parents[1]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.py"))

MISSIONS = [path for path in RECIPES if load_recipe(path).model.path is not None]
"""Those that fine-tune a published model."""

BILLIONS = {
    "quickstart": 0.01999,
    "qwen_1_5b_4gib": 1.544,
    "7b_512k": 7.616,
    "7b_512k_24gb": 7.616,
    "7b_1m": 7.616,
    "8b_8k": 8.030,
    "14b_workstation": 14.770,
    "32b_workstation": 32.764,
    "32b_512k": 32.764,
    "70b_gh200": 70.554,
    "120b_gh200": 122.610,
    "120b_moe": 116.829,
}
"""Parameters, as the models' publishers count them."""

SHRUNK = [
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.vocab_size=400",
    "data.source=text",
    "data.path=corpus",
    "data.tokenizer_vocab_size=300",
    "data.sequence_length=64",
    "data.validation_documents=1",
    "train.steps=1",
    "train.warmup_steps=0",
    "train.global_batch_size=1",
    "train.chunk_tokens=32",
    "train.validate_every=1",
    "train.validation_sequences=none",
    "train.compile=off",
    "train.device=cpu",
    "budgets.gpu=8MiB",
    "budgets.ram=8MiB",
    "budgets.nvme=64MiB",
    "storage.part_bytes=64KiB",
    "storage.checkpoint_every=1",
    "after.sample_prompt=none",
]


def arguments(recipe: str) -> list[str]:
    """Options that make a recipe tiny."""
    moe = ["model.overrides.num_local_experts=4"] if recipe == "120b_moe" else []
    return ["--from-scratch", "--run-dir", "run", *(part for item in SHRUNK + moe for part in ("--set", item))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder but for some text."""
    (tmp_path / "corpus").mkdir()
    for name in ("launch", "rundir"):
        (tmp_path / "corpus" / f"{name}.txt").write_text((REPOSITORY / "app" / f"{name}.py").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_twelve() -> None:
    assert {path.stem for path in RECIPES} == BILLIONS.keys()
    assert (len(RECIPES), len(MISSIONS)) == (12, 10)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name.replace("-", "_").replace(".", "_") == path.stem
    assert from_json(to_json(recipe)) == recipe
    lines = path.read_text().split('"""')[1].splitlines()
    assert len(lines[0]) > 40
    needs = [line.split()[0] for line in lines if re.match(r"(GPU|RAM|NVMe|Model|Use) +\S", line)]
    assert needs == ["GPU", "RAM", "NVMe", "Model", "Use"]
    assert recipe.machine in PRESETS or (recipe.machine == "" and recipe.model.path is None)
    if recipe.model.path is not None:
        assert any(recipe.model.path in line for line in lines)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_model_is_the_published_one(path: Path) -> None:
    recipe = load_recipe(path)
    before = to_json(recipe)
    spec = take_apart(model_config(recipe, recipe.data.tokenizer_vocab_size))
    assert to_json(recipe) == before
    assert spec.num_params / 1e9 == pytest.approx(BILLIONS[path.stem], rel=5e-4)
    assert not spec.recurrent
    validate_context(spec, recipe.data.sequence_length)
    check = check_model(spec.config)
    assert check.ok, check.reason


@pytest.mark.parametrize("path", MISSIONS, ids=lambda path: path.stem)
def test_a_context_beyond_the_recipe_s_positions_is_refused(path: Path) -> None:
    recipe = load_recipe(path)
    spec = take_apart(model_config(recipe, None))
    with pytest.raises(UserError, match=r"data\.sequence_length: 2097152 tokens do not fit"):
        validate_context(spec, 2**21)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shrunk_recipe_trains_from_scratch(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(path), *arguments(path.stem)]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "trained to step 1, " in out
    assert ", validation loss " in out
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("stem", ["7b_512k", "120b_moe"])
def test_a_recipe_is_a_script(stem: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "recipes" / f"{stem}.py"), *arguments(stem)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "trained to step 1, " in done.stdout
    assert json.loads((folder / "run" / "recipe.json").read_text())["model"]["path"] is None


@pytest.mark.parametrize("path", MISSIONS, ids=lambda path: path.stem)
def test_without_its_model_and_text_a_recipe_says_what_helps(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that is not there is refused as weights are: in one line, with nothing written."""
    model = ("model.path", str(folder / "models"), "does not exist", "--from-scratch", "--set model.path=")
    data = ("data.path: the recipe names no text", "--set data.path=", "speed trial", "--set data.source=random")
    for options, parts in (([], (*model, *data)), (["--from-scratch"], data)):
        assert main(["train", str(path), *options]) == 2
        message = capsys.readouterr().err
        for part in parts:
            assert part in message
        assert message.count("\n") == 1
        assert not (folder / "runs").exists()


def test_what_is_missing_is_said_before_torch_is_loaded(folder: Path) -> None:
    code = "import sys; from app.cli import main; sys.exit(main(sys.argv[1:]) + 10 * ('torch' in sys.modules))"
    command = [sys.executable, "-c", code, "train", str(REPOSITORY / "recipes" / "7b_512k.py"), "--from-scratch"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
