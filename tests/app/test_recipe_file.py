"""Recipe files: what is written is loaded as an equal recipe, is formatted, and replaces nothing unasked."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.recipe import load_recipe, to_dict
from app.recipe_file import save_recipe, to_python
from engine.config import AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from storage.errors import UserError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))

numbers = st.floats(1e-30, 1e30)
texts = st.text(max_size=40) | st.sampled_from(
    ['"', "'", "\\", "\n", "\r\n\t", '"""', "a'b\"c", "漢字 " * 30, "\u2028"]
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=12,
)
paths = texts.filter(lambda text: "\0" not in text)
folders = paths.filter(bool)
optional_sizes = st.none() | st.sampled_from(["24GiB", "1.5 TB", 2**40, 1])
models = st.builds(
    ModelConfig,
    path=st.none() | paths,
    model_type=texts,
    num_layers=st.none() | st.integers(1, 4096),
    tie_embeddings=st.booleans(),
    overrides=st.dictionaries(texts, json_values, max_size=4),
)
recipes = st.builds(
    Recipe,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    machine=texts,
    model=models,
    data=st.builds(
        DataConfig, path=st.none() | paths, sequence_length=st.integers(2, 10**8), seed=st.integers(0, 2**63 - 1)
    ),
    train=st.builds(TrainConfig, lr=numbers, eps=numbers, steps=st.integers(1, 10**12), clip_norm=st.none() | numbers),
    budgets=st.builds(BudgetConfig, gpu=optional_sizes, ram=optional_sizes, nvme=optional_sizes),
    storage=st.builds(StorageConfig, nvme=st.none() | folders | st.lists(folders, min_size=1, max_size=6)),
    after=st.builds(AfterConfig, export=st.just(True), sample_prompt=st.none() | texts),
)


def ruff(*arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=RECIPES[0].parents[1])


def assert_formatted(text: str) -> None:
    done = ruff("format", "--stdin-filename", "recipes/written.py", "-", text=text)
    assert (done.returncode, done.stdout) == (0, text), done.stderr


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(recipe=recipes, doc=st.text(max_size=60))
def test_what_is_written_is_loaded_again(tmp_path: Path, recipe: Recipe, doc: str) -> None:
    path = tmp_path / "written.py"
    save_recipe(path, recipe, doc, overwrite=True)
    again = load_recipe(path)
    assert again == recipe
    assert repr(to_dict(again)) == repr(to_dict(recipe))
    assert_formatted(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_survive(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    text = to_python(recipe, "As shipped.")
    (tmp_path / path.name).write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / path.name) == recipe
    assert_formatted(text)
    assert ruff("check", "--stdin-filename", "recipes/written.py", "-", text=text).returncode == 0


def test_only_what_differs_is_written() -> None:
    recipe = Recipe(name="mine", train=TrainConfig(lr=3e-4, steps=20), model=ModelConfig(vocab_size=128_256))
    assert to_python(recipe, "Mine.") == (
        '"""Mine."""\n\n'
        "from app.recipe import Recipe\n"
        "from engine.config import ModelConfig, TrainConfig\n\n"
        "recipe = Recipe(\n"
        '    name="mine",\n'
        "    model=ModelConfig(vocab_size=128_256),\n"
        "    train=TrainConfig(steps=20),\n"
        ")\n\n"
        'if __name__ == "__main__":\n'
        "    from app.cli import run_recipe\n\n"
        "    run_recipe(__file__)\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-5, "3e-5"), (1e6, "1e6"), (0.1, "0.1"), (0.95, "0.95"), (1234567.0, "1234567.0"), (2.5e-8, "2.5e-8")],
)
def test_numbers_are_written_short(value: float, text: str) -> None:
    assert f"lr={text})" in to_python(Recipe(name="x", train=TrainConfig(lr=value)), "x")


def test_a_written_recipe_runs_as_a_script(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    save_recipe(path, Recipe(name="mine", train=TrainConfig(steps=7)), "Mine.")
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, cwd=RECIPES[0].parents[1])
    assert done.returncode == 0, done.stderr
    assert "Train a recipe" in done.stdout


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.py"
    save_recipe(path, Recipe(name="first"), "First.")
    with pytest.raises(UserError, match="exists"):
        save_recipe(path, Recipe(name="second"), "Second.")
    assert load_recipe(path).name == "first"
    save_recipe(path, Recipe(name="second"), "Second.", overwrite=True)
    assert load_recipe(path).name == "second"
    assert os.listdir(path.parent) == ["mine.py"]


@pytest.mark.parametrize("name", ["mine", "mine.json"])
def test_a_recipe_file_is_python(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.py"):
        save_recipe(tmp_path / name, Recipe(name="x"), "X.")


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_recipe(tmp_path / "file" / "mine.py", Recipe(name="x"), "X.")


def test_every_section_can_be_written() -> None:
    names = {field.name for field in dataclasses.fields(Recipe)}
    text = to_python(
        Recipe(
            name="x",
            model=ModelConfig(num_layers=1),
            data=DataConfig(seed=1),
            train=TrainConfig(seed=1),
            budgets=BudgetConfig(gpu="1GiB"),
            storage=StorageConfig(keep_last=2),
            after=AfterConfig(export=True),
        ),
        "x",
    )
    assert all(f"    {name}=" in text for name in names - {"machine"})
