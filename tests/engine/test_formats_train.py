"""Whatever the format, the packing and the architecture: two steps are those of plain autograd, document by document.

The step is the whole file, so that no packing decides what it holds: the reference is made of the file's rows alone.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from chat_model import make_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, TrainConfig
from penstock.engine.export import export
from penstock.engine.hf.config import make_config, read_config
from penstock.engine.optim.lr import learning_rate

CONTEXT, CHUNK = 64, 16
PAIRS = (40, 24, 50, 14, 33, 31, 20, 44)
"""Lengths of documents; of two that follow each other a row is full, so that wrapping cuts none."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
PACKING = ("wrap", "best_fit", "none")


class Document(NamedTuple):
    """What a row of a file is to come to."""

    ids: list[int]
    weights: list[float]
    """Per token: how much it counts as a target; the first never is one."""


def tokens_file(path: Path, lengths: Sequence[int]) -> list[Document]:
    """Rows of token ids with weights, as somebody else's tokeniser would leave them; what they are."""
    chance = random.Random(1)
    rows = [
        Document([chance.randrange(3, 300) for _ in range(n)], chance.choices([0.0, 0.5, 1.0, 2.0], k=n))
        for n in lengths
    ]
    path.write_text("".join(json.dumps({"ids": row.ids, "weights": row.weights}) + "\n" for row in rows))
    return rows


FORMATS: dict[str, Callable[[Path, Sequence[int]], list[Document]]] = {"tokens": tokens_file}
"""data.source -> what writes a file of documents of such lengths in that format, and says what they are."""


def model_folder(folder: Path, kind: str) -> Path:
    """A model of that architecture with random weights, float32, and a tokenizer."""
    make_tokenizer(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    fields = {"model_type": kind, "num_key_value_heads": 2, "vocab_size": vocabulary, "max_position_embeddings": 128}
    torch.manual_seed(2)
    config = make_config(fields | shape | SHAPES[kind], "test")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def plain_steps(folder: Path, documents: Sequence[Document], t: TrainConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps and the weights after them: transformers, autograd, torch's AdamW; a document at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim > 1].append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": t.weight_decay}, {"params": groups[False], "weight_decay": 0.0}],
        betas=(t.beta1, t.beta2),
        eps=t.eps,
    )
    total = sum(sum(document.weights[1:]) for document in documents)
    losses = []
    for step in range(1, t.steps + 1):
        losses.append(0.0)
        for document in documents:
            ids = torch.tensor(document.ids)
            found = cross_entropy(model(input_ids=ids[None]).logits[0, :-1].double(), ids[1:], reduction="none")
            loss = (found * torch.tensor(document.weights[1:])).sum() / total
            loss.backward()
            losses[-1] += float(loss.detach())
        if t.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(t, step)
        adamw.step()
        adamw.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


TIERS: dict[str, tuple[dict[str, Any], bool]] = {
    "gpu": ({}, False),
    "nvme": ({}, True),
    "nvme-streamed": ({"kv_window": "streamed", "chunk_tokens": 9}, True),
    "nvme-recomputed": ({"activation_checkpointing": "full"}, True),
}
"""How activations are saved, and whether the budgets are the least that is accepted: then state lives on NVMe."""

SHORT = {("tokens", "best_fit", "qwen3_moe", "nvme-streamed"), ("tokens", "none", "gemma3_text", "gpu")}
MATRIX = [
    pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long)
    for cell in itertools.product(FORMATS, PACKING, SHAPES, TIERS)
]


@pytest.mark.parametrize(("source", "packing", "kind", "tier"), MATRIX)
def test_two_steps_are_plain_autograd_s(tmp_path: Path, source: str, packing: str, kind: str, tier: str) -> None:
    lengths = PAIRS if packing == "wrap" else [n for n in PAIRS if n != 14]
    rows = len(lengths) if packing == "none" else 4
    policy, small = TIERS[tier]
    folder, file = model_folder(tmp_path / "model", kind), tmp_path / "rows.jsonl"
    documents = FORMATS[source](file, lengths)
    sizes: dict[str, Any] = {"global_batch_size": rows, "micro_batch_size": 2 if rows % 2 == 0 else 1}
    t = tiny.training(**({"steps": 2, "lr": 1e-3, "chunk_tokens": CHUNK} | sizes | policy))
    sections: dict[str, Any] = {
        "model": ModelConfig(path=str(folder)),
        "data": DataConfig(
            source=source,
            path=str(file),
            sequence_length=CONTEXT,
            packing=packing,
            order="kept",  # type: ignore[arg-type]
        ),
        "train": t,
    }
    recipe = tiny.recipe(**sections)
    plan = tiny.plan_of(tiny.spec_of(read_config(folder)), recipe, tiny.FLOOR, tiny.FLOOR)
    if small:
        budgets = (str(plan.tiers[name].peak_bytes) for name in ("gpu", "ram"))
        sections["budgets"] = BudgetConfig(**dict(zip(("gpu", "ram"), budgets, strict=True)))
    observer = tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **sections)
    expected_losses, expected = plain_steps(folder, documents, t)
    assert [m.loss for m in observer.metrics] == pytest.approx(expected_losses, rel=1e-6)
    trained = sum(weight > 0 for document in documents for weight in document.weights[1:])
    assert [m.tokens for m in observer.metrics] == [trained] * 2
    assert any(block["state"] == ("nvme" if small else "gpu") for block in observer.plan["blocks"])
    export(tmp_path / "run", tiny.recipe(**sections), out_dir=tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in exported.named_parameters():
        error = (weight.detach() - expected[name]).norm() / expected[name].norm()
        assert error <= 2e-5, f"{name}: {error}"
