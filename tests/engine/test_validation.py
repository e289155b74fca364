"""The validation loss: what plain transformers finds for the same tokens, on any tier; training does not notice it."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain import document_losses
from samples import cases
from tiny_plans import FLOORS, PLANS, SHORT, STREAMED, features
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.session import Session, run_identity
from penstock.engine.train import train_step
from penstock.engine.validation import due, validate
from penstock.storage.errors import UserError

OLD_DIGEST = "b7bf3216577a4d4c75a71dd3121c5dd8d76b8b04ee9eb2c569a2bfa8e0d547bf"
HELD_BY_OTHERS = ("ram-two-rows", "nvme-aside", "nvme-recomputed", "gpu-streamed-graphs", "mixed")
"""By SHORT, where the state is; by OTHERS, two rows and what is computed again. A validation saves nothing."""
QUICK = {"global_batch_size": 1, "chunk_tokens": 48}
HELD_OUT = tiny.data(validation_documents=7, sequence_length=48)


def run(session: Session) -> tuple[list[tuple[float, float]], dict[int, float], str]:
    """All steps with the validations that are due: loss and gradient norm, validation losses, the end's digest."""
    steps, losses = [], {}
    while session.step < session.recipe.train.steps:
        metrics = train_step(session)
        steps.append((metrics.loss, metrics.grad_norm))
        if due(session):
            losses[session.step] = validate(session).loss
    session.finish()
    return steps, losses, tiny.digest(session.store)


def plain_figures(session: Session, weights: dict[str, Tensor]) -> tuple[float, float, int]:
    """By transformers' model, document by document: the mean negative log-likelihood, the share of the targets that it
    finds likelier than any other token, and their number."""
    config = session.spec.config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    total, right, targets = 0.0, 0, 0
    with torch.no_grad():
        for m in itertools.chain.from_iterable(session.validation.passes(session.plan.group)):
            total += float(sum(document_losses(model, m)))
            targets += int((m.labels != -100).sum())
            for start, length in zip(m.documents, m.lengths, strict=False):
                ids, labels = (tensor[start : start + length] for tensor in (m.ids, m.labels))
                likeliest = model(ids[None]).logits[0].argmax(dim=-1)
                right += int((likeliest == labels)[labels != -100].sum())
    return total / targets, right / targets, targets


@pytest.mark.parametrize("name", cases(PLANS, *(name for name in SHORT if name not in HELD_BY_OTHERS)))
@pytest.mark.parametrize(
    "sequences", [pytest.param(2, id="one-pass", marks=pytest.mark.long), pytest.param(6, id="passes")]
)
def test_it_is_what_transformers_finds_and_changes_no_bit(tmp_path: Path, name: str, sequences: int) -> None:
    policy, budgets = PLANS[name]
    t = tiny.training(**policy | {"steps": 2, "chunk_tokens": 10})
    with tiny.session(tmp_path / "off", t=t, d=HELD_OUT, **budgets) as session:
        expected = run(session)
    t = dataclasses.replace(t, validate_every=1, validation_sequences=sequences)
    with tiny.session(tmp_path / "on", t=t, d=HELD_OUT, **budgets) as session:
        assert set(name.split("-")) - {"mixed", "two", "rows"} <= features(session.plan)
        peak = session.ram.arena.used_bytes, session.gpu.arena.used_bytes
        found = run(session)
        assert (session.ram.arena.used_bytes, session.gpu.arena.used_bytes) == peak
        loss, _, targets = plain_figures(session, tiny.parameters(session.store, session.spec))
        assert session.validation.num_targets == targets == sequences * 47
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert expected[1] == {}
    assert list(found[1]) == [1, 2]
    assert found[1][2] == pytest.approx(loss, rel=1e-6)
    assert found[1][1] != found[1][2]


@pytest.mark.parametrize("budget", [pytest.param("1GiB", marks=pytest.mark.long), tiny.FLOOR])
def test_a_generation_may_be_committed_in_a_validation_or_behind_it(tmp_path: Path, budget: str) -> None:
    """The state on disk is the one that training without validations commits at the same step."""
    for end in (2, 3):
        digests = set()
        for every in (None, 1, 2):
            t, s = tiny.training(validate_every=every, **QUICK), tiny.storage(checkpoint_every=2)
            with tiny.session(tmp_path / f"{every}-{end}", t=t, s=s, d=HELD_OUT, gpu=budget, ram=budget) as session:
                for _ in range(end):
                    train_step(session)
                    if due(session):
                        validate(session)
                session.finish()
                assert session.store.meta["step"] == end
                assert not session.builder.uncommitted
                generation = session.store.generation
                session.finish()
                assert session.store.generation == generation, "there is nothing left to commit"
                digests.add(tiny.digest(session.store))
        assert len(digests) == 1


WINDOWS = {"sliding_window": 8, "sliding_window_pattern": 2}
TINY_SET: dict[str, Any] = {"d": tiny.data(validation_documents=3, sequence_length=48)}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "few documents, streamed": ({}, {"validation_sequences": 8} | STREAMED, TINY_SET),
    "few documents, two rows": ({}, {"validation_sequences": 8, "micro_batch_size": 2}, TINY_SET),
    "bfloat16, tied": ({"tie_embeddings": True}, {"compute_dtype": "bfloat16"}, {}),
    "windows": ({"model_type": "gemma3_text", "overrides": WINDOWS}, STREAMED, {}),
    "experts": (
        {"model_type": "mixtral", "overrides": {"num_local_experts": 4}},
        {"activation_checkpointing": "full"},
        {},
    ),
    "state from token to token": ({"model_type": "qwen3_next", "overrides": tiny.HYBRID}, {"chunk_tokens": 48}, {}),
}
"""Model, settings and data: documents that fill less than was asked for count once; other numbers, other layers."""


@pytest.mark.parametrize("name", cases(OTHERS, *(OTHERS.keys() - {"few documents, streamed", "windows"})))
def test_other_data_numbers_and_families(tmp_path: Path, name: str) -> None:
    model, policy, data = OTHERS[name]
    t = tiny.training(**({"steps": 1, "validate_every": 1, "validation_sequences": 4} | policy))
    options: dict[str, Any] = {"d": HELD_OUT, **FLOORS} | data
    with tiny.session(tmp_path, m=tiny.model(**model), t=t, **options) as session:
        _, losses, _ = run(session)
        weights, rel = tiny.parameters(session.store, session.spec), 1e-6
        if t.compute_dtype == "bfloat16":
            weights, rel = {name: w.bfloat16().float() for name, w in weights.items()}, 5e-3
        loss, _, targets = plain_figures(session, weights)
    assert losses == {1: pytest.approx(loss, rel=rel)}
    assert targets == (3 if data else 4) * 47


def train_run(folder: Path, observer: tiny.Silent, *, resume: bool = False, **changes: Any) -> Any:
    train = tiny.training(steps=5, validate_every=2, validation_sequences=4, **QUICK)
    sections: dict[str, Any] = {"data": HELD_OUT, "train": train, "storage": tiny.storage()}
    return tiny.train_run(folder, observer, resume=resume, **(sections | changes))


def test_what_it_gets_right_is_what_transformers_gets_right(tmp_path: Path) -> None:
    """Before the first step too, where the recipe asks for it."""
    t = tiny.training(steps=3, validate_every=3, validate_first=True, validation_sequences=30)
    data, found = tiny.data(validation_documents=30), []
    with tiny.session(tmp_path, d=data, t=t) as session:
        for _ in range(2):
            assert due(session)
            found.append(validate(session))
            session.finish()
            loss, accuracy, _ = plain_figures(session, tiny.parameters(session.store, session.spec))
            assert found[-1].accuracy == accuracy
            assert found[-1].loss == pytest.approx(loss, rel=1e-6)
            while session.step < 3:
                train_step(session)
                assert due(session) == (session.step == 3)
    assert [one.step for one in found] == [0, 3]
    assert all(one.accuracy > 0 for one in found)


def test_a_checkpoint_asked_for_before_a_validation_is_of_that_step(tmp_path: Path) -> None:
    observer, twin = tiny.Silent(asks={2: "at-2", 5: "at-5"}), tiny.Silent()
    train_run(tmp_path / "asked", observer)
    assert observer.checkpoints == [("at-2", 2, None), ("at-5", 5, None)]
    train_run(tmp_path / "asked", twin, resume=True, checkpoint="at-2")
    assert [(v.step, v.loss) for v in twin.validations] == [(v.step, v.loss) for v in observer.validations]


def test_weights_that_are_not_finite_are_told_and_not_raised(tmp_path: Path) -> None:
    with tiny.session(tmp_path, t=tiny.training(validate_every=1), d=HELD_OUT) as session:
        train_step(session)
        for memory in session.gpu.buffers.values():
            memory["master"].fill_(float("nan"))
        assert math.isnan(validate(session).loss)


def test_older_runs_keep_their_digest_and_their_place_in_the_data(tmp_path: Path) -> None:
    """The digest was written down before there were any of the fields; cursors had no word of documents held out."""
    assert run_identity(tiny.recipe())["recipe"] == OLD_DIGEST
    cursors = []
    for steps in (1, 3):
        with tiny.session(tmp_path, t=tiny.training(steps=steps, **QUICK)) as session:
            tiny.steps(session)
            cursor = dict(session.store.meta["cursor"])
            assert cursor.pop("held_out") == 0
            cursors.append(cursor)
            session.loader.seek(cursor)
            assert session.loader.cursor == cursor | {"held_out": 0}
    assert cursors[0] != cursors[1]


def test_a_setting_that_cannot_be_meant_is_refused() -> None:
    training: list[tuple[dict[str, int], str]] = [
        ({"validate_every": 0}, r"train\.validate_every: 0 must be at least 1"),
        ({"validation_sequences": 2}, r"train\.validation_sequences: 2 is not used"),
        ({"validate_every": 1, "validation_sequences": 3, "micro_batch_size": 2},
         r"train\.validation_sequences: 3 is not a multiple of train\.micro_batch_size 2"),
    ]  # fmt: skip
    for changes, message in training:
        with pytest.raises(UserError, match=message):
            tiny.training(**changes)
    for count, message in (
        (0, r"data\.validation_documents: 0 must be at least 1"),
        (40, r"40 leaves no documents to"),
    ):
        with pytest.raises(UserError, match=message):
            tiny.data(validation_documents=count)


def test_what_is_held_out_cannot_change_with_the_run_under_way(tmp_path: Path) -> None:
    train_run(tmp_path, tiny.Silent(stop_after=1))
    with pytest.raises(UserError, match=r"data\.validation_documents: 8, but the run so far held out 7; set it back"):
        train_run(tmp_path, tiny.Silent(), resume=True, data=tiny.data(validation_documents=8))
