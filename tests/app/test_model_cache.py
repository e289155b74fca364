"""What a model is made of, kept between plans: the same forecasts sooner, and never from a file that is not right."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
from bad_model_files import CONFIG
from cli_process import REPOSITORY, done, started
from recipe_texts import recipe_text
from samples import cases
from transformers import Qwen3Config

from penstock.app import model_cache
from penstock.app.launch import from_scratch
from penstock.app.model_cache import kept_spec
from penstock.app.plan import plan_recipe
from penstock.app.recipe import load_recipe
from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.storage.errors import UserError
from penstock.storage.sealed import seal, unseal

SPEC = tiny.spec_of(Qwen3Config(**CONFIG))
KEPT = replace(SPEC, config=None)


class Maker:
    """Takes the model apart, and counts how often."""

    calls = 0

    def __call__(self) -> ModelSpec:
        self.calls += 1
        return SPEC


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "models"


@pytest.fixture
def recipe() -> Recipe:
    return from_scratch(load_recipe(REPOSITORY / "recipes" / "8b_8k.py"))


def test_it_is_taken_apart_once_and_a_refusal_is_not_kept(folder: Path, recipe: Recipe) -> None:
    long = replace(recipe, data=replace(recipe.data, sequence_length=1 << 20))
    for _ in range(2):
        with pytest.raises(UserError, match="positions of model type"):
            plan_recipe(long)
    assert not folder.exists()
    make = Maker()
    for _ in range(3):
        found = kept_spec(recipe, make)
        assert (found, found.graph_bytes) == (KEPT, SPEC.graph_bytes)
    assert make.calls == 1
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("model", {"num_layers": 2}), ("model", {"overrides": {"rope_theta": 1e6}}), ("data", {"sequence_length": 4096}),
    ("data", {"tokenizer_vocab_size": 5000}), ("train", {"freeze": ["*.mlp.*"]}),
    ("train", {"compute_dtype": "float32"}),
]  # fmt: skip


def test_another_model_config_or_version_is_another_file(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, version = Maker(), importlib.metadata.version
    kept_spec(recipe, make)
    for calls, (section, changes) in enumerate(CHANGES, start=2):
        part: Any = {section: replace(getattr(recipe, section), **changes)}
        kept_spec(replace(recipe, **part), make)
        kept_spec(replace(recipe, train=replace(recipe.train, steps=recipe.train.steps + 1)), make)
        assert make.calls == calls, changes
    make.calls = 0
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    recipe = replace(recipe, model=replace(recipe.model, path=str(config.parent)))
    for content in ("{}", '{"a": 1}', "{}"):
        config.write_text(content)
        kept_spec(recipe, make)
    assert make.calls == 2
    for name in ("penstock", "torch", "transformers"):
        monkeypatch.setattr(importlib.metadata, "version", lambda n, name=name: version(n) + "x" * (n == name))
        kept_spec(recipe, make)
    assert make.calls == 5


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the file's content under a checksum that is right."""

    def edit(file: Path) -> None:
        content = unseal(json.loads(file.read_text())).content
        change(content)
        file.write_text(json.dumps(seal(content)))

    return edit


def _to_link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "no JSON": lambda file: file.write_bytes(b"\xff\x00" * 500),
    "flipped": lambda file: file.write_text(file.read_text().replace(str(SPEC.num_params), "385")),
    "no checksum": lambda file: file.write_text(json.dumps(unseal(json.loads(file.read_text())).content)),
    "no spec": _edit(lambda content: content.pop("spec")),
    "another's": _edit(lambda content: content.update(digest="0" * 64)),
    "of other types": _edit(lambda content: content["spec"].update(num_params="many")),
    "a list": _edit(lambda content: content.update(spec=[1])),
    "too long": lambda file: file.write_bytes(file.read_bytes() + b" " * (1 << 22)),
    "a link": _to_link,
    "others may write it": lambda file: file.chmod(0o622),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_not_right_is_made_again(folder: Path, recipe: Recipe, damage: Callable[[Path], Any]) -> None:
    make = Maker()
    kept_spec(recipe, make)
    (file,) = folder.iterdir()
    damage(file)
    for _ in range(2):
        assert (kept_spec(recipe, make), make.calls) == (KEPT, 2)


def test_nothing_is_read_of_another_user_and_a_folder_that_cannot_be_used_is_done_without(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, me = Maker(), os.geteuid()
    kept_spec(recipe, make)
    with patch.object(os, "geteuid", lambda: me + 1):
        kept_spec(recipe, make)
    assert make.calls == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_spec(recipe, make) == KEPT


def test_the_newest_are_kept(folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "_MOST_FILES", 2)
    make = Maker()
    for age in (1, 2, 3):
        one = replace(recipe, model=replace(recipe.model, num_layers=age))
        kept_spec(one, make)
        newest = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        os.utime(newest, (1000 + age, 1000 + age))
    assert len(list(folder.iterdir())) == 2
    kept_spec(one, make)
    assert make.calls == 3


@pytest.mark.parametrize("name", cases(["tiny", "8b_8k", "120b_moe", "7b_512k_24gb"], "tiny"))
def test_plans_are_the_same(name: str, tmp_path: Path) -> None:
    """Taken apart here, then in a process of its own that finds it kept and loads neither PyTorch nor transformers."""
    path, machine = REPOSITORY / "recipes" / f"{name}.py", list[str]()
    if name == "tiny":
        path, machine = tmp_path / "tiny.py", ["--machine", "rtx4090-64"]
        budgets, data = dict.fromkeys(("gpu", "ram", "nvme")), {"source": "random", "path": None}
        path.write_text(recipe_text(model={"vocab_size": 300}, data=data, budgets=budgets))
    forecast = plan_recipe(from_scratch(load_recipe(path)), *machine[1:])
    code = (
        "import sys\nfrom app.cli import main\n"
        f"code = main(['plan', {str(path)!r}, '--from-scratch', '--json', *{machine}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'\nsys.exit(code)"
    )
    again = json.loads(done(started(REPOSITORY, sys.executable, "-c", code)).stdout)
    for found in (forecast, again):
        del found["search_s"]
    assert again == json.loads(json.dumps(forecast))
