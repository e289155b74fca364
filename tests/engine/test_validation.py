"""The validation loss and samples during a run: what plain transformers finds and writes with the same weights, on any
tier; training does not notice either."""

import dataclasses
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chat_model import make_chat_model
from plain_training import document_losses, plain_model
from samples import cases
from tiny_plans import FLOORS, PLANS, SHORT, STREAMED, features
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine import samples, validation
from penstock.engine.attention import select as attention_select
from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig, SamplesConfig
from penstock.engine.events import SampleMetrics, ValidationMetrics, Want
from penstock.engine.export import export
from penstock.engine.generate.prompts import prepare_prompts
from penstock.engine.hf.config import model_config
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.validation import due, validate
from penstock.storage.files.errors import UserError

HELD_BY_OTHERS = ("ram-two-rows", "nvme-aside", "nvme-recomputed", "gpu-streamed-graphs", "mixed")
"""By SHORT, where the state is; two rows by OTHERS, what is computed again by FAMILIES. A validation saves nothing."""
QUICK: dict[str, Any] = {"global_batch_size": 1, "chunk_tokens": 48}
"""Where it does not matter what a step computes."""
HELD_OUT = tiny.data(validation_documents=7, sequence_length=48)
PROMPTS = ["the spindle", "a", "water runs through the pipe and turns the wheel of the mill"]
"""Of unequal length; the last is longer than a chunk."""
SPOKEN = "the a water pipe wheel mill spindle turns runs through and of then stone river grain flour house"
MODEL: dict[str, Any] = {"vocab_size": None}
OFTEN = ("gpu", *(name for name in SHORT if name not in HELD_BY_OTHERS))
Whole = tuple[tiny.Silent, str]
TINY_SET = tiny.data(validation_documents=3, sequence_length=48)
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], DataConfig]] = {
    "few documents, streamed": ({}, {"validation_sequences": 8} | STREAMED, TINY_SET),
    "few documents, two rows": ({}, {"validation_sequences": 8, "micro_batch_size": 2}, TINY_SET),
    "bfloat16, tied": ({"tie_embeddings": True}, {"compute_dtype": "bfloat16"}, HELD_OUT),
}
"""Model, settings and data: documents that fill less than was asked for count once; other numbers."""
HALVES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "adapter": ({"method": "dora", "rank": 2, "targets": ["q_proj", "down_proj"]}, [], FLOORS),
    "frozen, resident": ({}, ["model.layers.0.*", "model.embed_tokens.*"], {}),
    "frozen, on NVMe": ({}, ["model.layers.0.*", "lm_head.*"], FLOORS),
}
"""Adapter, what is frozen, and budgets: what is never trained is sampled as well."""


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


class AtThePlan(tiny.Silent):
    """Keeps what was known of attention kernels when the plan was told."""

    known: dict[str, list[str]]

    def on_plan(self, plan: dict[str, Any], predicted: list[Any]) -> None:
        self.known = attention_select.rankings()


@pytest.mark.parametrize(
    ("settings", "window"), [({}, None), (STREAMED, 20), ({"micro_batch_size": 2, "chunk_tokens": 96}, 20)], ids=str
)
def test_no_kernel_is_chosen_once_steps_validations_and_samples_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], window: int | None
) -> None:
    """On a device that has a choice of them: all that is asked for was known before."""
    monkeypatch.setattr(attention_select, "MEASURED", frozenset({"cpu"}))
    observer = AtThePlan()
    sliding = {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    tiny.train_run(
        tmp_path,
        observer,
        model=tiny.model(**MODEL, overrides=sliding),
        data=data_of(text, validation_documents=7),
        train=tiny.training(**({"steps": 3, "validate_every": 1} | settings)),
        samples=wanted(),
    )
    assert observer.samples
    assert observer.validations
    assert any("window" in name.split() for name in observer.known) == (window is not None)
    assert attention_select.rankings() == observer.known


def run(session: Session) -> tuple[list[tuple[float, float]], dict[int, float], list[SampleMetrics], str]:
    """All steps with what is due: loss and gradient norm, validation losses, samples, the end's digest."""
    steps, losses, written = [], {}, []
    while session.step < session.recipe.train.steps:
        metrics = train_step(session)
        steps.append((metrics.loss, metrics.grad_norm))
        if due(session):
            losses[session.step] = validate(session).loss
        if samples.due(session):
            written.append(samples.write(session))
    session.finish()
    return steps, losses, written, tiny.digest(session.store)


def plain_figures(session: Session, model: Any) -> tuple[float, float, int]:
    """By transformers' model, document by document: the mean negative log-likelihood, the share of the targets that it
    finds likelier than any other token, and their number."""
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


def texts_by(model: Any, prompts: Any) -> list[str]:
    """What transformers writes greedily behind each prompt, one after the other."""
    ends, found = {"eos_token_id": sorted(prompts.stop_ids), "pad_token_id": 0}, []
    for number, ids in enumerate(prompts.ids):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=prompts.config.tokens, do_sample=False, **ends)
        found.append(prompts.text(number, whole[0, len(ids) :].tolist()))
    return found


@pytest.mark.parametrize("name", cases(PLANS, *OFTEN))
@pytest.mark.parametrize("sequences", cases([2, 6], 6), ids=["one-pass", "passes"])
def test_both_are_transformers_own_and_change_no_bit(tmp_path: Path, text: Path, name: str, sequences: int) -> None:
    """Samples behind a step that is validated, and behind one that is not."""
    policy, budgets = PLANS[name]
    t = tiny.training(**policy | {"steps": 3, "chunk_tokens": 10})
    options = {"m": tiny.model(**MODEL), "d": data_of(text, validation_documents=3), **budgets}
    with tiny.session(tmp_path / "off", t=t, **options) as session:
        expected = run(session)
    t = dataclasses.replace(t, validate_every=2, validation_sequences=sequences)
    # Where budgets are the least that will do, they are here too, with the samples in them.
    with tiny.session(tmp_path / "on", t=t, samples=wanted(every=1), **options) as session:
        assert set(name.split("-")) - {"mixed", "two", "rows"} <= features(session.plan)
        kept = session.plan.problem.samples
        assert kept is not None
        assert {tier for tier in ("gpu", "ram") if session.plan.tiers[tier].parts["samples"]} == {"gpu", kept.tier}
        peak = session.ram.arena.used_bytes, session.gpu.arena.used_bytes
        steps, losses, written, digest = run(session)
        assert (session.ram.arena.used_bytes, session.gpu.arena.used_bytes) == peak
        model = plain_model(session).eval()
        loss, _, targets = plain_figures(session, model)
        assert session.validation.num_targets == targets == {2: 96, 6: 287}[sequences]  # a document ends in the six
        texts = texts_by(model, session.prompts)
    assert (steps, {}, [], digest) == expected
    assert losses == {2: losses[2], 3: pytest.approx(loss, rel=1e-6)}
    assert losses[2] != losses[3]
    assert [one.step for one in written] == [1, 2, 3]
    assert [one.text for one in written[-1].samples] == texts
    assert [one.prompt for one in written[-1].samples] == PROMPTS
    assert written[0].samples != written[1].samples


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "gemma3_text": ({"sliding_window": 8, "sliding_window_pattern": 2}, STREAMED),
    "qwen3_moe": (EXPERTS, {}),
    "mixtral": ({"num_local_experts": 4}, {"activation_checkpointing": "full"}),
    "gpt_oss": ({"num_local_experts": 4, "sliding_window": 8}, {}),
    "qwen3_next": (tiny.HYBRID, {"chunk_tokens": 48}),
}
"""Overrides and settings by type: sliding windows, sinks, experts, and state from token to token."""


@pytest.mark.parametrize("family", cases(FAMILIES, "mixtral", "gpt_oss", "qwen3_next"))
def test_families_are_validated_and_write_as_transformers_does(tmp_path: Path, text: Path, family: str) -> None:
    overrides, policy = FAMILIES[family]
    t = tiny.training(**{"steps": 1, "validate_every": 1, "validation_sequences": 4} | policy)
    made = tiny.model(model_type=family, vocab_size=None, overrides=overrides)
    options: dict[str, Any] = {"d": data_of(text, validation_documents=3), "samples": wanted(every=1), **FLOORS}
    with tiny.session(tmp_path, m=made, t=t, **options) as session:
        _, losses, written, _ = run(session)
        model = plain_model(session).eval()
        loss, _, targets = plain_figures(session, model)
        expected = texts_by(model, session.prompts)
    assert losses == {1: pytest.approx(loss, rel=1e-6)}
    assert session.validation.num_targets == targets > 3 * 47
    assert [one.text for one in written[-1].samples] == expected


@pytest.mark.parametrize("name", cases(OTHERS, *(OTHERS.keys() - {"few documents, streamed"})))
def test_other_data_and_numbers(tmp_path: Path, name: str) -> None:
    model, policy, data = OTHERS[name]
    t, rel = tiny.training(**({"steps": 1, "validate_every": 1, "validation_sequences": 4} | policy)), 1e-6
    with tiny.session(tmp_path, m=tiny.model(**model), t=t, d=data, **FLOORS) as session:
        losses, plain = run(session)[1], plain_model(session)
        if t.compute_dtype == "bfloat16":
            rel = 5e-3
            for parameter in plain.parameters():
                parameter.data = parameter.data.bfloat16().float()
        loss, _, targets = plain_figures(session, plain)
    assert losses == {1: pytest.approx(loss, rel=rel)}
    assert targets == (3 if data is TINY_SET else 4) * 47


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


def test_what_it_gets_right_is_what_transformers_gets_right(tmp_path: Path) -> None:
    """Before the first step too, where the recipe asks for it."""
    t = tiny.training(steps=3, validate_every=3, validate_first=True, validation_sequences=30)
    data, found = tiny.data(validation_documents=30), []
    with tiny.session(tmp_path, d=data, t=t) as session:
        for _ in range(2):
            assert due(session)
            found.append(validate(session))
            session.finish()
            loss, accuracy, _ = plain_figures(session, plain_model(session))
            assert found[-1].accuracy == accuracy
            assert found[-1].loss == pytest.approx(loss, rel=1e-6)
            while session.step < 3:
                train_step(session)
                assert due(session) == (session.step == 3)
    assert [one.step for one in found] == [0, 3]
    assert all(one.accuracy > 0 for one in found)


def train_run(folder: Path, observer: tiny.Silent, text: Path, *, resume: bool = False, **changes: Any) -> Any:
    """Five steps, of which the second, the fourth and the last are validated and sampled."""
    train = tiny.training(steps=5, validate_every=2, validation_sequences=2, **QUICK)
    sections = {"model": tiny.model(**MODEL), "data": data_of(text, validation_documents=3), "train": train}
    sections |= {"samples": wanted(temperature=0.8, seed=3), "storage": tiny.storage()}
    return tiny.train_run(folder, observer, resume=resume, **sections | changes)


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
    assert straight.plan["tiers"]["gpu"]["parts"]["samples"] > 0


def test_a_checkpoint_asked_for_before_a_validation_is_of_that_step(tmp_path: Path, text: Path) -> None:
    observer, twin = tiny.Silent(asks={2: "at-2", 5: "at-5"}), tiny.Silent()
    train_run(tmp_path, observer, text)
    assert observer.checkpoints == [("at-2", 2, None), ("at-5", 5, None)]
    train_run(tmp_path, twin, text, resume=True, checkpoint="at-2")
    assert (losses_of(twin), texts_of(twin)) == (losses_of(observer), texts_of(observer))


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


@pytest.mark.parametrize(("model", "length", "asked", "message"), [
    ({}, 0, {}, r"samples\.prompts: data\.source=random has no tokenizer .* data\.tokenizer"),
    (MODEL, 48, {"chat": True}, r"samples\.chat: the tokenizer has no chat template; set data"),
    (MODEL, 32, {"tokens": 10},
     r"samples\.tokens: 10 after prompt 3 of 25 tokens make 35, but the model's positions end at 32; shorten"),
    (MODEL | {"model_type": "qwen3_next", "overrides": tiny.HYBRID, "max_position": 200}, 48, {"tokens": 30},
     r"prompt 3 of 25 tokens make 55, but this model carries state .* at most 48 .*data\.sequence_length"),
], ids=["no tokenizer", "no template", "context", "one sequence is one chunk"])  # fmt: skip
def test_what_cannot_be_sampled_is_refused_before_anything_is_made(
    tmp_path: Path, text: Path, model: dict[str, Any], length: int, asked: dict[str, Any], message: str
) -> None:
    sections = {"model": tiny.model(**model), "train": tiny.training(), "samples": wanted(**asked)}
    data = data_of(text, sequence_length=length) if length else tiny.data()
    with pytest.raises(UserError, match=message):
        train_run(tmp_path, tiny.Silent(), text, data=data, **sections)
    assert not (tmp_path / "state").exists()


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
    assert (found[0], found[3]) == (expected[0], expected[3])
    export(tmp_path / "on", recipe, out_dir=tmp_path / "export", dtype="float32", merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager").eval()
    assert [sample.text for sample in found[2][-1].samples] == texts_by(model, prompts)


def test_weights_that_are_not_finite_are_told_and_not_raised(tmp_path: Path) -> None:
    with tiny.session(tmp_path, t=tiny.training(validate_every=1), d=HELD_OUT) as session:
        train_step(session)
        for memory in session.gpu.buffers.values():
            memory["master"].fill_(float("nan"))
        assert math.isnan(validate(session).loss)


def test_a_setting_that_cannot_be_meant_is_refused() -> None:
    every = {"validate_every": 1, "validation_sequences": 3, "micro_batch_size": 2}
    multiple = r"train\.validation_sequences: 3 is not a multiple of train\.micro_batch_size 2"
    cases: list[tuple[Any, dict[str, int], str]] = [
        (tiny.training, {"validate_every": 0}, r"train\.validate_every: 0 must be at least 1"),
        (tiny.training, every, multiple),
        (tiny.data, {"validation_documents": 0}, r"data\.validation_documents: 0 must be at least 1"),
        (tiny.data, {"validation_documents": 40}, r"40 leaves no documents to"),
    ]
    for section, changes, message in cases:
        with pytest.raises(UserError, match=message):
            section(**changes)
