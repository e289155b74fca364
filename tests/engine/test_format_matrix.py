"""Every format x packing x architecture trains as plain autograd does; what cannot be trained is refused with why.

The reference shares nothing with the engine but the random weights and which documents a step has: transformers'
tokenizer and its chat template make the tokens and say which are trained, its own model computes each document alone.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_model import make_tokenizer
from every_format import FIRST, SOURCES, Tokens, data_config, document, rows_of
from plain_training import found_in, in_order, train_plainly
from samples import cases
from torch import Tensor
from transformers import AutoTokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "tie_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "overrides": {"sliding_window": 16, "sliding_window_pattern": 2}},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "overrides": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    },
}
PACKINGS = ("wrap", "best_fit", "none")
DOCUMENTS, CONTEXT = 24, 64

CELLS = list(itertools.product(SOURCES, PACKINGS, SHAPES))
FEW = [
    ("text", "wrap", "llama"),
    ("messages", "none", "qwen3"),
    ("sharegpt", "best_fit", "qwen3_moe"),
    ("tokens", "best_fit", "gemma3"),
]
"""Every packing and architecture."""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, list[Tokens]]]:
    """Of each format its file, its tokenizer's folder, and the documents as transformers reads them."""
    found = {}
    for source, way in FIRST.items():
        folder = tmp_path_factory.mktemp(source)
        make_tokenizer(folder / "tokenizer", template=way.template)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        data = folder / way.write(folder, rows_of(source, DOCUMENTS, tokenizer))
        documents = [document(source, number, tokenizer) for number in range(DOCUMENTS)]
        found[source] = data, folder / "tokenizer", documents
    return found


def test_the_few_are_of_every_kind() -> None:
    assert [set(axis) for axis in zip(*FEW, strict=True)][1:] == [set(PACKINGS), set(SHAPES)]
    assert len(CELLS) == 84


@pytest.mark.parametrize("cell", cases(CELLS, *FEW), ids="-".join)
def test_two_steps_are_those_of_plain_autograd(
    tmp_path: Path, read: dict[str, tuple[Path, Path, list[Tokens]]], cell: tuple[str, Any, str]
) -> None:
    source, packing, shape = cell
    path, tokenizer, documents = read[source]
    kept = packing == "wrap"  # the next token is only known from the order
    # Adam's epsilon is far above the rounding of a gradient, which it would else make a whole step of.
    window = "streamed" if source in ("jsonl", "tokens") else "whole"
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "chunk_tokens": 24}
    settings = tiny.training(steps=2, lr=1e-2, eps=1e-4, kv_window=window, **sizes)
    rows_as = {"sequence_length": CONTEXT, "packing": packing, "order": "kept" if kept else "shuffled"}
    data = data_config(FIRST[source], path, tokenizer=str(tokenizer), **rows_as)
    model = tiny.model(num_layers=2, vocab_size=360, **SHAPES[shape])
    with tiny.session(tmp_path, m=model, d=data, t=settings, gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:
        if kept:
            rows = in_order(documents, CONTEXT)
            steps = [[piece for row in rows[at : at + 4] for piece in row] for at in (0, 4)]
        else:
            begin = session.loader.cursor
            steps = [
                [piece for m in session.loader.next_step() for piece in found_in(m, documents, CONTEXT)]
                for _ in range(2)
            ]
            session.loader.seek(begin)
        start = tiny.parameters(session.store, session.spec)
        expected, weights, moments = train_plainly(session.spec.config, start, settings, steps)
        losses = [metrics.loss for metrics in tiny.steps(session)]
        found = tiny.parameters(session.store, session.spec)
        found_moments = tiny.first_moments(session.store, session.spec)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_alike(found_moments, moments)
    assert_alike(found, weights)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the norm of each, or to a thousandth of the largest: transformers' own float32 is 1e-5 away at the worst."""
    assert found.keys() == expected.keys()
    least = max(float(tensor.norm()) for tensor in expected.values()) / 1000
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm()) / max(float(tensor.norm()), least)
        assert error <= 2e-5, f"{name}: {error}"
