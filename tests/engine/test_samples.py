"""Samples during a run: what plain transformers writes with the same weights, on any tier; training does not notice."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chat_model import make_chat_model
from samples import cases
from tiny_plans import FLOORS, PLANS, STREAMED
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine import samples, validation
from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig, SamplesConfig
from penstock.engine.events import SampleMetrics, ValidationMetrics, Want
from penstock.engine.export import export
from penstock.engine.generate.prompts import prepare_prompts
from penstock.engine.hf.config import model_config
from penstock.engine.hf.constants import CONSTANTS_FILE, write_constants
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.errors import UserError

PROMPTS = ["the spindle", "a", "water runs through the pipe and turns the wheel of the mill"]
"""Of unequal length; the last is longer than a chunk."""
SPOKEN = "the a water pipe wheel mill spindle turns runs through and of then stone river grain flour house"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance, folder = random.Random(1), tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(chance.choices(SPOKEN.split(), k=300)) + ".")
    return folder


def data_of(text: Path, **changes: Any) -> DataConfig:
    settings = {"source": "text", "path": str(text), "tokenizer_vocab_size": 300, "sequence_length": 48}
    return DataConfig(**(settings | changes))


def wanted(**changes: Any) -> SamplesConfig:
    return SamplesConfig(**({"every": 2, "prompts": PROMPTS, "tokens": 4} | changes))


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


def plain(session: Session) -> list[str]:
    """What transformers writes greedily behind each prompt, one after the other, with the committed weights."""
    model = AutoModelForCausalLM.from_config(session.spec.config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(tiny.parameters(session.store, session.spec), strict=False)
    return texts_by(model.eval(), session.prompts)


def texts_by(model: Any, prompts: Any) -> list[str]:
    ends, found = {"eos_token_id": sorted(prompts.stop_ids), "pad_token_id": 0}, []
    for number, ids in enumerate(prompts.ids):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=prompts.config.tokens, do_sample=False, **ends)
        found.append(prompts.text(number, whole[0, len(ids) :].tolist()))
    return found


MODEL: dict[str, Any] = {"vocab_size": None}


@pytest.mark.parametrize("name", cases(PLANS, "gpu", "nvme-streamed-spilled"))
def test_it_is_what_transformers_writes_and_changes_no_bit(tmp_path: Path, text: Path, name: str) -> None:
    """Behind a step that is validated, and behind one that is not."""
    policy, budgets = PLANS[name]
    t = tiny.training(**policy | {"steps": 2, "validate_every": 2, "validation_sequences": 2, "chunk_tokens": 10})
    options = {"m": tiny.model(**MODEL), "t": t, "d": data_of(text, validation_documents=3), **budgets}
    with tiny.session(tmp_path / "off", **options) as session:
        expected = run(session)
    # Where budgets are the least that will do, they are here too, with the samples in them.
    with tiny.session(tmp_path / "on", samples=wanted(every=1), **options) as session:
        assert session.plan.streamed == ("streamed" in name)
        parts = {tier: session.plan.tiers[tier].parts for tier in ("gpu", "ram")}
        peak = session.ram.arena.used_bytes, session.gpu.arena.used_bytes
        found = run(session)
        assert (session.ram.arena.used_bytes, session.gpu.arena.used_bytes) == peak
        expected_texts = plain(session)
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert all(of_tier["samples"] > 0 for of_tier in parts.values())
    assert [one.step for one in found[1]] == [1, 2]
    assert [one.text for one in found[1][-1].samples] == expected_texts
    assert [one.prompt for one in found[1][-1].samples] == PROMPTS
    assert found[1][0].samples != found[1][1].samples


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama"}, {}),
    "gemma3_text": ({"overrides": {"sliding_window": 8, "sliding_window_pattern": 2}}, STREAMED),
    "qwen3_moe": ({"overrides": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}, {}),
    "gpt_oss": ({"overrides": {"num_local_experts": 4, "sliding_window": 8}}, {}),
    "qwen3_next": ({"overrides": tiny.HYBRID}, {"chunk_tokens": 48}),
}
"""Model and settings by type: sliding windows, sinks, experts, and state from token to token."""


@pytest.mark.parametrize("family", cases(FAMILIES, "gpt_oss", "qwen3_next"))
def test_families_write_what_transformers_writes(tmp_path: Path, text: Path, family: str) -> None:
    model, policy = FAMILIES[family]
    t = tiny.training(**{"steps": 1} | policy)
    made = tiny.model(**{"model_type": family, "vocab_size": None} | model)
    with tiny.session(tmp_path, m=made, t=t, d=data_of(text), samples=wanted(every=1), **FLOORS) as session:
        _, written, _ = run(session)
        expected = plain(session)
    assert [one.text for one in written[-1].samples] == expected


QUICK: dict[str, Any] = {"global_batch_size": 1, "chunk_tokens": 48}
"""Where it does not matter what a step computes."""


def train_run(folder: Path, observer: tiny.Silent, text: Path, *, resume: bool = False, **changes: Any) -> Any:
    """Five steps, of which the second, the fourth and the last are validated and sampled."""
    sections = {
        "model": tiny.model(**MODEL),
        "data": data_of(text, validation_documents=3),
        "train": tiny.training(steps=5, validate_every=2, validation_sequences=2, **QUICK),
        "samples": wanted(temperature=0.8, seed=3),
        "storage": tiny.storage(),
    }
    return tiny.train_run(folder, observer, resume=resume, **sections | changes)


Whole = tuple[tiny.Silent, str]


def texts_of(observer: tiny.Silent) -> list[tuple[int, list[str]]]:
    return [(one.step, [sample.text for sample in one.samples]) for one in observer.samples]


def losses_of(observer: tiny.Silent) -> list[tuple[int, float, int]]:
    return [(one.step, one.loss, one.tokens) for one in observer.validations]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Whole:
    """What a run tells that nobody stops or pauses, and its digest."""
    folder, observer = tmp_path_factory.mktemp("straight"), tiny.Silent()
    train_run(folder, observer, text)
    return observer, tiny.digest_of(folder)


@pytest.mark.parametrize("stop_after", cases([1, 2, 3], 2))
def test_a_resumed_run_is_sampled_at_the_same_steps(tmp_path: Path, text: Path, whole: Whole, stop_after: int) -> None:
    """A stop after a step that is due does not wait for either: the resumed run makes up for them."""
    straight, first, second = whole[0], tiny.Silent(stop_after), tiny.Silent()
    train_run(tmp_path / "parts", first, text)
    train_run(tmp_path / "parts", second, text, resume=True)
    assert [step for step, _ in texts_of(straight)] == [step for step, *_ in losses_of(straight)] == [2, 4, 5]
    assert texts_of(first) + texts_of(second) == texts_of(straight)
    assert losses_of(first) + losses_of(second) == losses_of(straight)
    assert len(texts_of(first)) == len(losses_of(first)) == int(stop_after > 2)
    assert [m.loss for m in first.metrics + second.metrics] == [m.loss for m in straight.metrics]
    assert len({str(one) for _, one in texts_of(straight)}) == 3
    plan = straight.plan["tiers"]
    assert {tier for tier in plan if plan[tier]["parts"].get("samples")} == {"gpu", "ram"}


def test_an_early_end_writes_samples_of_its_step(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = validation.validate

    def rising(session: Session) -> ValidationMetrics:
        return dataclasses.replace(real(session), loss=float(session.step))

    monkeypatch.setattr(validation, "validate", rising)
    t = tiny.training(steps=9, validate_every=1, validation_sequences=2, early_stopping_patience=1, **QUICK)
    observer = tiny.Silent()
    train_run(tmp_path, observer, text, train=t, samples=wanted(every=100))
    assert [one.step for one in observer.metrics] == [1, 2]
    assert [one.step for one in observer.samples] == [2]


def test_a_paused_run_is_validated_and_sampled_when_it_goes_on(tmp_path: Path, text: Path, whole: Whole) -> None:
    told: list[str] = []

    class Pausing(tiny.Silent):
        def wanted(self) -> Want:
            return "pause" if len(self.metrics) == 2 and not told else "run"

        def on_pause(self, paused: bool) -> None:
            told.append("paused" if paused else "going on")

        def on_validation(self, metrics: ValidationMetrics) -> None:
            super().on_validation(metrics)
            told.append(f"validated {metrics.step}")

        def on_sample(self, metrics: SampleMetrics) -> None:
            super().on_sample(metrics)
            told.append(f"sampled {metrics.step}")

    pausing = Pausing()
    train_run(tmp_path / "paused", pausing, text)
    assert told[:4] == ["paused", "going on", "validated 2", "sampled 2"]
    assert (texts_of(pausing), losses_of(pausing)) == (texts_of(whole[0]), losses_of(whole[0]))
    assert tiny.digest_of(tmp_path / "paused") == whole[1]


def test_what_is_asked_of_a_chat_is_in_its_template(tmp_path: Path) -> None:
    """The tokenizer beside the model reads the prompts where the data needs none."""
    model = ModelConfig(path=str(make_chat_model(tmp_path / "model")))
    recipe = tiny.recipe(model=model, samples=wanted(chat=True, tokens=4))
    spec = tiny.spec_of(model_config(recipe, None))
    prompts: Any = prepare_prompts(recipe, None, spec)
    theirs = AutoTokenizer.from_pretrained(model.path)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert prompts.ids == theirs.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("model", "length", "asked", "message"),
    [
        ({}, 0, {}, r"samples\.prompts: data\.source=random has no tokenizer .* data\.tokenizer"),
        (MODEL, 48, {"chat": True}, r"samples\.chat: the tokenizer has no chat template; set data"),
        (MODEL, 32, {"tokens": 10},
         r"samples\.tokens: 10 after prompt 3 of 25 tokens make 35, but the model's positions end at 32; shorten"),
        (MODEL | {"model_type": "qwen3_next", "overrides": tiny.HYBRID, "max_position": 200}, 48, {"tokens": 30},
         r"prompt 3 of 25 tokens make 55, but this model carries state .* at most 48 .*data\.sequence_length"),
    ],
    ids=["no tokenizer", "no template", "context", "one sequence is one chunk"],
)  # fmt: skip
def test_what_cannot_be_sampled_is_refused_before_anything_is_made(
    tmp_path: Path, text: Path, model: dict[str, Any], length: int, asked: dict[str, Any], message: str
) -> None:
    sections = {"model": tiny.model(**model), "train": tiny.training(), "samples": wanted(**asked)}
    data = data_of(text, sequence_length=length) if length else tiny.data()
    with pytest.raises(UserError, match=message):
        train_run(tmp_path, tiny.Silent(), text, data=data, **sections)
    assert not (tmp_path / "state").exists()


HALVES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "adapter": ({"method": "dora", "rank": 2, "targets": ["q_proj", "down_proj"]}, [], FLOORS),
    "frozen, resident": ({}, ["model.layers.0.*", "model.embed_tokens.*"], {}),
    "frozen, on NVMe": ({}, ["model.layers.0.*", "lm_head.*"], FLOORS),
}
"""Adapter, what is frozen, and budgets: what is never trained is sampled as well."""


@pytest.mark.parametrize("name", cases(HALVES, "adapter"))
def test_what_is_frozen_or_adapted_writes_what_its_export_writes(tmp_path: Path, text: Path, name: str) -> None:
    adapter, freeze, budgets = HALVES[name]
    sections = {"m": tiny.model(**MODEL), "d": data_of(text), "t": tiny.training(steps=1, freeze=freeze), **budgets}
    sections["adapter"] = AdapterConfig(**adapter)
    with tiny.session(tmp_path / "off", **sections) as session:
        expected = run(session)
    with tiny.session(tmp_path / "on", samples=wanted(every=1), **sections) as session:
        found = run(session)
        prompts, recipe = session.prompts, session.recipe
    assert (found[0], found[2]) == (expected[0], expected[2])
    write_constants(tmp_path / "on" / "state" / CONSTANTS_FILE, {})
    export(tmp_path / "on", recipe, out_dir=tmp_path / "export", dtype="float32", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager").eval()
    assert [sample.text for sample in found[1][-1].samples] == texts_by(model, prompts)
