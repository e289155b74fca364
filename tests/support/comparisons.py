"""Files of answers that are compared, and runs on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny

from penstock.engine.config import DataConfig

_WORDS = ("mill", "wheel", "water", "river", "stone", "flour", "grain", "sluice", "weir", "race", "tail", "head")


def _text(chance: random.Random, least: int, most: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(chance.randint(least, most)))


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with two answers of unequal length each."""
    chance = random.Random(seed)
    return [
        {"prompt": _text(chance, 2, 9), "chosen": " " + _text(chance, 1, 8), "rejected": " " + _text(chance, 1, 8)}
        for _ in range(count)
    ]


def verdicts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with an answer that is wanted or not."""
    chance = random.Random(seed)
    rows = [{"prompt": _text(chance, 2, 9), "completion": " " + _text(chance, 1, 8)} for _ in range(count)]
    return [row | {"label": number % 3 != 1} for number, row in enumerate(rows)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(path: Path, **changes: Any) -> DataConfig:
    """Rows of 96 tokens, in the order of the file, each row an answer or a pair."""
    settings: dict[str, Any] = {"path": str(path), "packing": "none", "order": "kept", "sequence_length": 96}
    return tiny.data(**(settings | {"source": "auto", "tokenizer_vocab_size": 300, "max_documents": None} | changes))
