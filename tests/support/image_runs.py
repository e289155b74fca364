"""Rows with images, and runs on them of a tiny model that takes images."""

import json
from pathlib import Path
from typing import Any

import tiny
from image_models import COLOURS, write_image

from penstock.engine.config import DataConfig, ModelConfig
from penstock.engine.model.images import BOTH_WAYS

STEPS = 120
"""In which such a model learns what it is told."""


def rows(folder: Path) -> Path:
    """Conversations about an image, about two, and without one, in both layouts."""
    for colour in COLOURS:
        write_image(folder / f"{colour}.png", colour, (8, 8) if colour == "red" else (16, 8))
    lines: list[dict[str, Any]] = []
    for colour in COLOURS:
        answer = {"role": "assistant", "content": f"It is {colour}."}
        question = {"role": "user", "content": "<image>What colour is it?"}
        lines.append({"messages": [question, answer], "images": [f"{colour}.png"]})
        parts = [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]
        lines.append({"messages": [{"role": "user", "content": parts}, answer], "images": [f"{colour}.png"]})
    two = {"role": "user", "content": "<image> or <image>?"}
    lines.append({"messages": [two, {"role": "assistant", "content": "blue"}], "images": ["red.png", "blue.png"]})
    lines.append({"messages": [{"role": "user", "content": "colour?"}, {"role": "assistant", "content": "What?"}]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sections(origin: Path, path: Path, steps: int = STEPS, vision: str = "none") -> dict[str, Any]:
    data = DataConfig(source="messages", path=str(path), sequence_length=96, packing="best_fit")
    chunk_tokens = None if origin.name in BOTH_WAYS else 32
    train = tiny.training(steps=steps, global_batch_size=3, chunk_tokens=chunk_tokens, lr=1e-1)
    model: Any = {"path": str(origin), "train_vision": vision}
    return {"model": ModelConfig(**model), "data": data, "train": train, "storage": tiny.storage()}
