"""The data format of docs/EXTENDING.md, trained on."""

from pathlib import Path

import tiny

from penstock.app.recipe import apply_overrides
from penstock.engine.config import DataConfig
from penstock.engine.data.corpus import read_pieces
from penstock.engine.train import train_step


def test_lines_are_documents_that_are_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join(f"line {i} says {i * i}" for i in range(200)) + "\n\n")
    data = DataConfig(source="lines", path=str(folder), tokenizer_vocab_size=300, sequence_length=48)
    assert sum(piece.last for piece in read_pieces(data)) == 200
    with tiny.session(tmp_path / "run", d=data) as session:
        losses = [train_step(session).loss for _ in range(2)]
    assert losses[1] < losses[0]


def test_the_command_line_takes_its_name() -> None:
    recipe = apply_overrides(tiny.recipe(), ["data.source=lines", "data.path=text"])
    assert recipe.data.source == "lines"
