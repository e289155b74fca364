"""What `penstock finetune --json` might print."""

import json
from typing import Any

import numpy as np

from penstock.app.finetune.report import Document, length_figures, sample
from penstock.app.recipes.recipe import changes
from penstock.engine.config import DataConfig, ModelConfig, Recipe, TrainConfig


class Letters:
    """Token n is the n-th character."""

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def document(text: str, trained: str) -> Document:
    """`trained` has an x where a token counts."""
    weights = np.asarray([float(mark == "x") for mark in trained], dtype=np.float32)
    return Document("talks.jsonl:3", np.asarray([ord(char) for char in text]), weights)


def proposal(**parts: Any) -> dict[str, Any]:
    """Of five documents and a model of 1.5 B parameters; `parts` in place of its own."""
    lengths = np.asarray([3, 100, 120, 130, 900])
    data = DataConfig(source="messages", path="talks.jsonl", sequence_length=512, packing="best_fit")
    model, train = ModelConfig(path="models/llama"), TrainConfig(steps=90, lr=2e-5)
    found = {
        "model": {"type": "llama", "params": 1_500_000_000, "context": 32_768, "vocab_size": 128_256, "path": "/m"},
        "data": {"lines": ["messages: 5 rows of talks.jsonl", "template: the model's own"]},
        "lengths": length_figures(lengths, lengths // 2, 512) | {"long_documents": "cut"},
        "row": 512, "warnings": ["one row was left out"],
        "samples": [sample(document("user: hi\nbot: Käse\n", "..............xxxx."), Letters())],
        "chosen": [{"key": "train.lr", "value": 2e-5, "why": "usual for 1.5 B parameters"}],
        "recipe": changes(Recipe(name="llama-talks", model=model, data=data, train=train)),
    }  # fmt: skip
    return json.loads(json.dumps(found | parts))
