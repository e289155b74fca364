"""Every file of recipes/: what it says of itself, the model it describes, and that it runs when shrunk."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from cli_process import REPOSITORY, done, refusal, started, steps
from real_runs import make_corpus
from recipe_texts import settings
from samples import cases

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import from_json, load_recipe, save_recipe, to_json
from penstock.engine.hf.config import model_config
from penstock.engine.machine.presets import PRESETS
from penstock.engine.model.anatomy import take_apart, validate_context
from penstock.engine.self_check import check_model
from penstock.storage.files.errors import UserError

RECIPES = sorted((REPOSITORY / "recipes").glob("*.py"))

MISSIONS = [path for path in RECIPES if load_recipe(path).model.path is not None]
"""Those that fine-tune a published model."""

BILLIONS = {"quickstart": 0.000342, "text_small": 0.01999, "qwen_1_5b_4gib": 1.544, "8b_8k": 8.030}
BILLIONS |= dict.fromkeys(("7b_512k", "7b_512k_24gb", "7b_1m"), 7.616)
BILLIONS |= {"14b_workstation": 14.770, "32b_workstation": 32.764, "32b_512k": 32.764}
BILLIONS |= {"qwen3_next_80b_24gb": 79.674}
BILLIONS |= dict.fromkeys(("70b_gh200", "70b_lora_24gb", "70b_qlora_24gb"), 70.554)
BILLIONS |= {"120b_gh200": 122.610, "120b_moe": 116.829, "120b_moe_24gb": 116.829}
"""Parameters, as the models' publishers count them."""

TRAIN = {"global_batch_size": 1, "micro_batch_size": 1, "validate_every": 1, "validation_sequences": "none"}
SHRUNK = settings(
    model={"vocab_size": 400},
    data={"validation_documents": 1},
    train=TRAIN | {"warmup_steps": 0, "decay_steps": "none"},
    budgets={"gpu": "least", "ram": "least"},
    storage={"checkpoint_every": 1},
    after={"sample_prompt": "none"},
)


def arguments(recipe: str) -> list[str]:
    """Options that make a recipe tiny."""
    local = dict.fromkeys(("120b_moe", "120b_moe_24gb"), "num_local_experts")
    count = (local | {"qwen3_next_80b_24gb": "num_experts"}).get(recipe)
    moe = [] if count is None else ["--set", f"model.overrides.{count}=4"]
    if recipe == "qwen3_next_80b_24gb":
        moe += ["--set", "model.overrides.num_experts_per_tok=2"]
    return ["--from-scratch", "--run-dir", "run", *SHRUNK, *moe]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder but for some text."""
    make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_seventeen() -> None:
    assert {path.stem for path in RECIPES} == BILLIONS.keys()
    assert (len(RECIPES), len(MISSIONS)) == (17, 14)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs_and_survives_being_saved(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    save_recipe(tmp_path / "saved.json", recipe)
    assert repr(load_recipe(tmp_path / "saved.json")) == repr(recipe)
    assert recipe.name.replace("-", "_").replace(".", "_") == path.stem
    assert from_json(to_json(recipe)) == recipe
    lines = path.read_text().split('"""')[1].splitlines()
    assert len(lines[0]) > 40
    needs = [line.split()[0] for line in lines if re.match(r"(GPU|RAM|NVMe|Model|Use) +\S", line)]
    assert needs == ["GPU", "RAM", "NVMe", "Model", "Use"]
    assert recipe.machine in PRESETS or (recipe.machine == "" and recipe.model.path is None)
    if recipe.model.path is not None:
        assert any(recipe.model.path in line for line in lines)


MODELS = [(path, load_recipe(path).model) for path in RECIPES]
ONE_OF_A_KIND = list({(model.model_type, bool(model.tie_embeddings)): path for path, model in MODELS}.values())
"""Models of one kind differ in sizes alone."""


@pytest.mark.parametrize("path", cases(RECIPES, *ONE_OF_A_KIND), ids=lambda path: path.stem)
def test_the_model_is_the_published_one_and_streamed_what_transformers_computes(path: Path) -> None:
    recipe = load_recipe(path)
    before = to_json(recipe)
    config = model_config(recipe, recipe.data.tokenizer_vocab_size)
    spec = take_apart(config)
    assert to_json(recipe) == before
    assert spec.num_params / 1e9 == pytest.approx(BILLIONS[path.stem], rel=5e-4)
    assert not spec.whole_documents
    validate_context(spec, recipe.data.sequence_length)
    if path in MISSIONS:
        with pytest.raises(UserError, match=r"data\.sequence_length: 2097152 tokens exceed"):
            validate_context(spec, 2**21)
    check = check_model(config)
    assert check.ok, check.reason


TELLING = [path for path in RECIPES if path.stem in ("quickstart", "7b_1m", "70b_qlora_24gb", "120b_moe_24gb")]
"""A model of its own, a stretched context, an adapter on a quantised base, experts in blocks of their own."""


@pytest.mark.parametrize("path", cases(RECIPES, *TELLING), ids=lambda path: path.stem)
def test_a_shrunk_recipe_trains_from_scratch(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script, but for the quickstart, which would kill itself."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments(path.stem)])
    if path.stem == "quickstart":
        assert main(["train", *sys.argv]) == 0
    else:
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert "trained to step 1, " in out
    assert ", validation loss " in out
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "finished"
    assert json.loads((folder / "run" / "recipe.json").read_text())["model"]["path"] is None


@pytest.mark.long
def test_the_quickstart_finds_what_was_said_once(folder: Path) -> None:
    """Killed and resumed on its way, and answered by plain transformers from its export."""
    process = started(folder, sys.executable, str(REPOSITORY / "recipes" / "quickstart.py"), "--run-dir", "run")
    out = done(process).stdout
    assert len(re.findall(r"^killed after step 9\d \(SIGKILL", out, re.M)) == 1
    before, after = json.loads((folder / "run" / "summary.json").read_text())["recall"]
    shares = [[sum(r) / sum(a) for r, a in zip(one["right"], one["queried"], strict=True)] for one in (before, after)]
    assert before["lengths"] == after["lengths"] == [512, 1024, 2048, 4096, 8192]
    assert max(shares[0]) < 0.3
    assert min(shares[1]) >= 0.9
    assert int(re.findall(r"the exported model answer (\d+) of 16 questions", out)[0]) >= 14
    assert steps(folder / "run") == list(range(1, load_recipe("quickstart").train.steps + 1))


@pytest.mark.parametrize("path", MISSIONS, ids=lambda path: path.stem)
def test_without_its_model_and_text_a_recipe_says_what_helps(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that is not there is refused as weights are: in one line, with nothing written."""
    model = ("model.path", str(folder / "models"), "does not exist", "--from-scratch", "--set model.path=")
    data = ("data.path: the recipe names no data", "--set data.path=", "speed test", "--set data.source=random")
    for options, parts in (([], (*model, *data)), (["--from-scratch"], data)):
        message = refusal(capsys, "train", str(path), *options)
        for part in parts:
            assert part in message
        assert not (folder / "runs").exists()
