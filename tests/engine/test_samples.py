"""Samples during a run: what plain transformers writes with the same weights, on any tier; training does not notice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import cases
from tiny_plans import PLANS
from transformers import AutoModelForCausalLM

from penstock.engine import samples, validation
from penstock.engine.config import DataConfig, SamplesConfig
from penstock.engine.events import SampleMetrics
from penstock.engine.session import Session
from penstock.engine.train import train_step

PROMPTS = ["the spindle", "a", "water runs through the pipe and turns the wheel of the mill, and then " * 3]
"""Of unequal length; the last is longer than a chunk."""
SPOKEN = "the a water pipe wheel mill spindle turns runs through and of then stone river grain flour house"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents of a few words."""
    chance, folder = random.Random(1), tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(chance.choices(SPOKEN.split(), k=300)) + ".")
    return folder


def data_of(text: Path, **changes: Any) -> DataConfig:
    settings = {"source": "text", "path": str(text), "tokenizer_vocab_size": 300, "sequence_length": 96}
    return DataConfig(**(settings | changes))


def wanted(**changes: Any) -> SamplesConfig:
    return SamplesConfig(**({"every": 2, "prompts": PROMPTS, "tokens": 6} | changes))


def run(session: Session) -> tuple[list[tuple[float, float]], list[SampleMetrics], str]:
    steps, written = [], []
    while session.step < session.recipe.train.steps:
        metrics = train_step(session)
        steps.append((metrics.loss, metrics.grad_norm))
        if validation.due(session):
            validation.validate(session)
        if samples.due(session):
            written.append(samples.write(session))
    session.finish()
    return steps, written, tiny.digest(session.store)


def plain(session: Session) -> list[list[int]]:
    """What transformers writes greedily behind each prompt, one after the other, with the committed weights."""
    prompts = session.prompts
    assert prompts is not None
    model = AutoModelForCausalLM.from_config(session.spec.config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(tiny.parameters(session.store, session.spec), strict=False)
    model.eval()
    found = []
    for ids in prompts.ids:
        whole = model.generate(
            torch.tensor([ids]),
            max_new_tokens=prompts.config.tokens,
            do_sample=False,
            eos_token_id=sorted(prompts.stop_ids),
            pad_token_id=0,
        )[0].tolist()
        found.append(whole[len(ids) :])
    return found


MODEL = {"vocab_size": None}


@pytest.mark.parametrize("name", cases(PLANS, "gpu", "mixed", "ram-two-rows", "nvme-streamed-spilled"))
def test_it_is_what_transformers_writes_and_changes_no_bit(tmp_path: Path, text: Path, name: str) -> None:
    """Every second step behind a validation, and behind those that are not validated."""
    policy, budgets = PLANS[name]
    data = data_of(text, validation_documents=3)
    made = tiny.training(validate_every=4, validation_sequences=2, **policy)
    with tiny.session(tmp_path / "off", m=tiny.model(**MODEL), t=made, d=data, **budgets) as session:
        expected = run(session)
    # Where budgets are the least that will do, they are here too, with the samples in them.
    with tiny.session(tmp_path / "on", m=tiny.model(**MODEL), t=made, d=data, samples=wanted(), **budgets) as session:
        parts = {tier: session.plan.tiers[tier].parts for tier in ("gpu", "ram")}
        peak = session.ram.arena.used_bytes, session.gpu.arena.used_bytes
        found = run(session)
        assert (session.ram.arena.used_bytes, session.gpu.arena.used_bytes) == peak
        expected_texts = [session.prompts.text(i, ids) for i, ids in enumerate(plain(session))]
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert all(of_tier["samples"] > 0 for of_tier in parts.values())
    assert [one.step for one in found[1]] == [2, 4]
    assert [one.text for one in found[1][-1].samples] == expected_texts
    assert [one.prompt for one in found[1][-1].samples] == PROMPTS
    assert found[1][0].samples != found[1][1].samples
