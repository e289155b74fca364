"""A data format and a container of rows: rows of it are trained on."""

from pathlib import Path

import pytest
import tiny

from penstock.app.recipes.recipe import apply_overrides
from penstock.engine.config import DataConfig
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError


def test_questions_are_samples_that_are_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "questions.blocks"
    file.write_text("".join(f"question: what is {i} squared\nanswer: it is {i * i}\n\n" for i in range(200)))
    data = DataConfig(source="questions", path=str(file), tokenizer_vocab_size=300, sequence_length=48)
    assert len(list(read_samples(data))) == 200
    found = detect(file)
    assert found.source == "questions"
    with tiny.session(tmp_path / "run", d=data) as session:
        losses = [train_step(session).loss for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "questions.blocks"
    file.write_text("question: what\nanswer\n")
    with pytest.raises(UserError, match=r"questions\.blocks:2: no `name: value`"):
        list(read_samples(DataConfig(source="questions", path=str(file))))


def test_the_command_line_takes_its_name() -> None:
    recipe = apply_overrides(tiny.recipe(), ["data.source=questions", "data.path=text"])
    assert recipe.data.source == "questions"
