"""A recipe as a Python file: read back it is the same, whatever its texts hold."""

from pathlib import Path

import pytest

from penstock.app.recipe import load_recipe
from penstock.app.recipe_text import python_text
from penstock.engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, TrainConfig

ODD = [
    "plain", 'a "quoted" \\ word', "two\nlines\tand \x00\x1b[2J", "Käse 学 \u2028 \u202e", "'''", '"""', "{x!r} %s",
    "a \n😀 'quoted'",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_a_file_gives_back_the_recipe(tmp_path: Path, text: str) -> None:
    overrides = {"rope": {text: [1, None, True, 1e-6]}, "many": list(range(60))}
    recipe = Recipe(
        name="mine",
        model=ModelConfig(path="models/mine", overrides=overrides),
        data=DataConfig(source="messages", path="talks.jsonl", columns={"messages": text}),
        train=TrainConfig(lr=1e-5, warmup_steps=3),
        after=AfterConfig(export=True, sample_prompt=text),
    )
    file = tmp_path / "mine.py"
    file.write_text(python_text(recipe, [text, "", f"more {text}"], {"train.lr": text, "data.columns": "why " * 40}))
    assert load_recipe(file) == recipe
    source = file.read_text()
    assert all(line.isprintable() for line in source.splitlines())
    assert "if __name__" in source


def test_comments_stand_beside_their_fields_and_defaults_are_left_out() -> None:
    text = python_text(Recipe(name="x", train=TrainConfig(lr=1e-5)), ["About."], {"train.lr": "a reason"})
    assert "        lr=1e-05,  # a reason\n" in text
    assert "steps=" not in text
    assert text.startswith('"""About.\n"""\n\nfrom penstock import Recipe, TrainConfig, run_recipe\n')
