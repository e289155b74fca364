"""Every format x packing x architecture trains as plain autograd does. And batches with weights per token and padding:
the steps of plain PyTorch on any plan, and nothing done for padding.

The reference shares nothing with the engine but the random weights and which documents a step has: transformers'
tokenizer and its chat template make the tokens and say which are trained, its own model computes each document alone.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chat_model import make_tokenizer
from every_format import FIRST, SOURCES, Tokens, data_config, document, rows_of
from plain import plain_model, plain_training
from plain_training import found_in, in_order, train_plainly
from samples import cases
from tiny_plans import PLANS, SHORT
from torch import Tensor
from transformers import AutoTokenizer
from weighted import WeightedLoader

from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.validation import validate

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
    assert_alike(found_moments, moments, 2e-5, 1e-3)
    assert_alike(found, weights, 2e-5, 1e-3)


SHARES = [0.4, 1.0, 0.0, 0.75, 0.1]
"""Of their stream that micro-batches hold, in turn: of one nothing at all."""


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 5e-5, floor: float = 0.0) -> None:
    """To the norm of each, or to a share of the largest: transformers' own float32 is 1e-5 away at the worst."""
    assert found.keys() == expected.keys()
    least = max(float(tensor.norm()) for tensor in expected.values()) * floor
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm()) / max(float(tensor.norm()), least)
        assert error <= most, f"{name}: {error}"


def weighted(folder: Path, name: str, filled: list[float] = SHARES, **loader: Any) -> Session:
    policy, budgets = PLANS[name]
    t = tiny.training(**{"steps": 2, "lr": 3e-3, "global_batch_size": 4} | policy | {"chunk_tokens": 10})
    session = tiny.session(folder, t=t, **budgets)
    session.loader = WeightedLoader(session.loader, filled, **loader)  # type: ignore[assignment]
    return session


@pytest.mark.parametrize("name", cases(SHORT, "mixed", "nvme-streamed-spilled"))
def test_weighted_and_padded_steps_are_those_of_plain_pytorch(tmp_path: Path, name: str) -> None:
    """Two steps, whose micro-batches hold different shares of their streams; one has no token at all."""
    with weighted(tmp_path / "plain", name, cut=False) as reference:
        expected, weights, moments = plain_training(reference, 2)
    with weighted(tmp_path / "here", name) as session:
        metrics = tiny.steps(session)
        found = tiny.parameters(session.store, session.spec)
        found_moments = tiny.first_moments(session.store, session.spec)
    assert [m.loss for m in metrics] == pytest.approx(expected, rel=1e-6)
    assert_alike(found_moments, moments)
    assert_alike(found, weights)


@pytest.mark.parametrize("name", cases(SHORT, "ram-two-rows"))
def test_padding_costs_nothing_and_changes_no_gradient(tmp_path: Path, name: str) -> None:
    """Where padding begins may be known or not: only then is it computed."""
    found = []
    for cut in (False, True):
        with weighted(tmp_path / str(cut), name, weights=False, cut=cut) as session:
            done: Counter[str] = Counter()

            def count(op: Op, done: Counter[str] = done) -> None:
                done[op.action.name] += 1
                done["bytes"] += op.nbytes if op.action.kind else 0

            tiny.before_ops(session, count)
            metrics = tiny.steps(session)
            weights = tiny.parameters(session.store, session.spec)
            found.append(([m.loss for m in metrics], [m.tokens for m in metrics], weights, done))
            assert (session.ram.arena.used_bytes, session.gpu.arena.used_bytes) > (0, 0)
    (loss, tokens, weights, whole), (cut_loss, cut_tokens, cut_weights, less) = found
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    assert cut_tokens == tokens
    assert_alike(cut_weights, weights)
    for action in ("embed_forward", "head", "embed_backward"):
        assert less[action] < 0.8 * whole[action]
    assert less["bytes"] < 0.8 * whole["bytes"]
    assert less["norm"] == whole["norm"]


def test_ones_and_a_full_stream_leave_every_bit(tmp_path: Path) -> None:
    digests = set()
    for ones in (False, True):
        with tiny.session(tmp_path / str(ones), t=tiny.training(steps=2)) as session:
            for _ in range(2):
                data = session.next_batch()
                if ones:
                    for m in data.micro_batches:
                        object.__setattr__(m, "weights", torch.ones(len(m.ids)))
                        object.__setattr__(m, "filled", len(m.ids))
                    data = session._carrier.step(data.micro_batches, data.cursor)
                session._next = data
                train_step(session)
            session.finish()
            digests.add(tiny.digest(session.store))
    assert len(digests) == 1


def test_a_validation_may_end_in_padding(tmp_path: Path) -> None:
    """Its passes are weighted as a whole, and one whose last micro-batches are empty is none the worse."""
    t = tiny.training(steps=1, global_batch_size=4, validate_every=1, validation_sequences=8)
    d = tiny.data(validation_documents=7)
    losses = []
    for cut in (False, True):
        with tiny.session(tmp_path / str(cut), t=t, d=d) as session:
            train_step(session)
            validation: Any = session.validation
            changed = WeightedLoader(validation._loader, [1.0, 0.5, 0.0, 0.0, 0.0], cut=cut)
            passes = [[changed._changed(m) for m in micro_batches] for micro_batches in validation.passes(4)]
            session.validation = type("Passes", (), {"passes": lambda self, n, found=passes: iter(found)})()
            metrics = validate(session)
            session.finish()
            losses.append(metrics.loss)
            targets = [float(m.weights[m.labels != -100].sum()) for of_pass in passes for m in of_pass]
            assert len(passes) == 2
            assert metrics.tokens == sum(m.num_targets for of_pass in passes for m in of_pass)
            assert sum(targets) > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_z_loss_is_plain_pytorch_s(tmp_path: Path) -> None:
    """The gradient's norm is that of the objective with it; the loss that is told is without it."""
    found, z_loss = {}, 0.01
    for name, z in (("with", z_loss), ("without", 0.0)):
        with tiny.session(tmp_path / name, t=tiny.training(steps=1, z_loss=z)) as session:
            session.loader = WeightedLoader(session.loader, [1.0])  # type: ignore[assignment]
            found[name] = tiny.steps(session)[0]
    assert found["with"].loss == found["without"].loss
    with tiny.session(tmp_path / "plain", t=tiny.training(steps=1)) as session:
        session.loader = WeightedLoader(session.loader, [1.0])  # type: ignore[assignment]
        expected = plain_norm(session, z_loss)
    assert found["with"].grad_norm == pytest.approx(expected, rel=1e-5)
    assert found["with"].grad_norm != pytest.approx(found["without"].grad_norm, rel=1e-3)


def plain_norm(session: Session, z_loss: float) -> float:
    model, micro_batches = plain_model(session), session.loader.next_step()
    total = sum(float(m.weights[m.labels != -100].sum()) for m in micro_batches)
    for m in micro_batches:
        for first, last in zip(m.documents, [*m.documents[1:], len(m.ids)], strict=True):
            logits = model(input_ids=m.ids[None, first:last]).logits[0].double()
            labels, weights = m.labels[first:last], m.weights[first:last]
            losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
            losses = losses + z_loss * torch.logsumexp(logits, -1).square() * (labels != -100)
            ((losses * weights).sum() / total).backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
