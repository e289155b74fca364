"""Reward models: gradients beside plain transformers' own, folders that they begin with and end in, and what they are
not for. Steps beside TRL's: test_beside_trl.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import pytest
import tiny
import torch
from chat_model import make_chat_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from penstock.engine.config import AdapterConfig, BudgetConfig, ModelConfig, PreferenceConfig
from penstock.engine.export import export
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.reward import SCORE, as_reward
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.model.trace import random_model
from penstock.engine.model.types import default_config
from penstock.engine.objectives.base import find_objective
from penstock.engine.objectives.sequences import CHOSEN, REJECTED, SIDE
from penstock.engine.opened_model import OpenedModel
from penstock.engine.self_check import check_model, relative_errors
from penstock.storage.files.errors import UserError

KINDS = ("llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "qwen3_next")


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_plain_transformers(kind: str) -> None:
    """Of three pairs in two micro-batches, one of whose answers ends in the token that is padding to the model."""
    small = as_reward(shrink(default_config(kind))[0])
    if kind == "mixtral":
        small.output_router_logits = True  # a balancing loss, which a reward model has not
    small.pad_token_id = 5
    spec, source = take_apart(small), random_model(small, 3)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(6, spec.vocab_size, (length,), generator=generator) for length in (31, 18, 25, 40, 9, 12)]
    texts[3][-2:] = 5
    recipe = tiny.recipe(
        train=tiny.training(objective="reward"), preference=PreferenceConfig(center_rewards_coefficient=0.1)
    )

    plain: Any = AutoModelForSequenceClassification.from_config(small, attn_implementation="eager").eval()
    plain.load_state_dict(source.state_dict())
    rewards = torch.stack([plain(input_ids=text[None], use_cache=False).logits[0, 0] for text in texts])
    chosen, rejected = rewards[::2], rewards[1::2]
    expected = (-logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected).square()).mean()
    expected.backward()

    streams = []
    for some in (texts[:4], texts[4:]):
        labels = [torch.full_like(text, IGNORE_LABEL) for text in some]
        for text, of_text in zip(some, labels, strict=True):
            of_text[int((text != 5).nonzero()[-1])] = 0
        side = torch.tensor([CHOSEN, REJECTED] * (len(some) // 2), dtype=torch.float64)
        streams.append(replace(MicroBatch.of(some, labels), columns={SIDE: side}))
    weights = in_buffers(spec, {name: p.detach() for name, p in source.named_parameters()})
    gradients = in_buffers(spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
    constants = {name: buffer for name, buffer in source.named_buffers() if name in spec.constants}
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, constants=constants)
    chunk = 29 if not spec.whole_documents else 64
    loss = forward_backward(runner, weights, gradients, streams, chunk, 1 << 14, objective=find_objective(recipe))
    assert loss == pytest.approx(float(expected), rel=1e-5)
    reference = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert max(relative_errors(gradients, reference).values()) < 1e-5


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("pieces", [False, True], ids=["whole window", "in pieces"])
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_the_self_check_compares_rewards(kind: str, pieces: bool, lora: bool) -> None:
    adapter = AdapterConfig(method="lora", rank=4) if lora else None
    result = check_model(as_reward(default_config(kind)), pieces=pieces, adapter=adapter)
    assert result.ok, result.reason
    assert result.max_rel_error is not None
    assert 0 < result.max_rel_error < 1e-5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cohere", "train.objective: reward, but model type 'cohere' has no model for sequence classification"),
        ("gemma3", "model type 'gemma3' is more than a decoder of text"),
    ],
)
def test_a_family_without_reward_models_is_refused(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_reward(default_config(kind))


def test_a_classifier_that_is_built_differently_is_refused() -> None:
    config = default_config("roberta")
    with pytest.raises(UserError, match=r"RobertaForSequenceClassification has no linear layer 'score' without bias"):
        take_apart(as_reward(config))


def run(folder: Path, observer: tiny.Silent, model: ModelConfig, *, resume: bool = False, **sections: Any) -> None:
    """Three steps on pairs, some of them held out."""
    path = comparisons.write(folder.with_suffix(".jsonl"), comparisons.pairs(14))
    train: dict[str, Any] = {"objective": "reward", "steps": 3, "global_batch_size": 2, "validate_every": 3}
    given: dict[str, Any] = {
        "model": model,
        "data": comparisons.data(path, sequence_length=192, validation_documents=4),
        "train": tiny.training(**train | sections.pop("also", {})),
    }
    tiny.train_run(folder, observer, resume=resume, **given | sections)


def recipe_of(model: ModelConfig, folder: Path, **sections: Any) -> Any:
    data = comparisons.data(folder.with_suffix(".jsonl"), sequence_length=192, validation_documents=4)
    return tiny.recipe(model=model, data=data, train=tiny.training(objective="reward", steps=3), **sections)


TEXTS = [row["prompt"] + row[side] + "<|im_end|>" for row in comparisons.pairs(14) for side in ("chosen", "rejected")]
"""Among them the held-out pairs of `run`."""


def rewards_of(folder: Path, texts: list[str], adapter: Path | None = None) -> list[float]:
    """By plain transformers and peft, all texts at once."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found: list[float] = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0].tolist()
    return found


def require_rewards(found: list[float], measured: dict[str, float]) -> None:
    for name in ("min_reward", "max_reward"):
        assert any(reward == pytest.approx(measured[name], abs=1e-5) for reward in found), name


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_a_language_model_becomes_a_reward_model_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    """Its export has `score` and no lm_head, and gives the validation's rewards; another run begins with it."""
    base, observer, run_dir, out = (
        make_chat_model(tmp_path / "base", tie_word_embeddings=tied),
        tiny.Silent(),
        *(tmp_path / name for name in ("run", "out")),
    )
    section = ModelConfig(path=str(base))
    run(run_dir, observer, section)
    assert not any("lm_head" in message for message in observer.messages)
    made = export(run_dir, recipe_of(section, run_dir), out_dir=out)
    assert made.auto_class == "AutoModelForSequenceClassification"
    held, first = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    assert held.keys() == first.keys() - {"lm_head.weight"} | {SCORE}
    assert all(not torch.equal(held[name], first[name]) for name in held.keys() & first.keys())
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]

    again, kept = tiny.Silent(), ModelConfig(path=str(out))
    run(tmp_path / "more", again, kept, also={"validate_first": True, "lr": 1e-12})
    assert again.validations[0].loss == pytest.approx(observer.validations[-1].loss, rel=1e-6)
    validation = observer.validations[-1]
    assert validation.accuracy == validation.measured["accuracy"]
    found = rewards_of(out, TEXTS)
    require_rewards(found, validation.measured)
    assert rewards_of(out, TEXTS[:1]) == [pytest.approx(found[0], abs=1e-5)], "padding counts nothing"


@pytest.mark.parametrize(("method", "tier"), [("lora", ("1GiB", "1GiB")), ("dora", ("least", "least"))])
def test_an_adapter_has_the_new_layer_beside_it(tmp_path: Path, method: Any, tier: tuple[str, str]) -> None:
    """peft loads both onto the language model's folder, or merged as one; another run goes on with them."""
    base, observer, run_dir = make_chat_model(tmp_path / "base"), tiny.Silent(), tmp_path / "run"
    section, adapter = (
        ModelConfig(path=str(base)),
        AdapterConfig(method=method, rank=4, targets=["q_proj", "down_proj"]),
    )
    run(run_dir, observer, section, adapter=adapter, budgets=BudgetConfig(gpu=tier[0], ram=tier[1]))
    recipe = recipe_of(section, run_dir, adapter=adapter)
    out, merged = tmp_path / "out", tmp_path / "merged"
    made = export(run_dir, recipe, out_dir=out)
    export(run_dir, recipe, out_dir=merged, merged=True)
    assert made.num_trained == sum(tensor.numel() for tensor in load_file(out / "adapter_model.safetensors").values())
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert not (out / "generation_config.json").exists()
    found = rewards_of(base, TEXTS, out)
    require_rewards(found, observer.validations[-1].measured)
    assert rewards_of(merged, TEXTS) == pytest.approx(found, abs=1e-5)
    again, more = tiny.Silent(), replace(adapter, start=str(out))
    also = {"validate_first": True, "lr": 1e-12}
    run(tmp_path / "more", again, section, also=also, adapter=more)
    assert again.validations[0].loss == pytest.approx(observer.validations[-1].loss, rel=1e-6)
    with pytest.raises(UserError, match=r"out: the adapter of a reward model; it goes on with train.objective=reward"):
        OpenedModel.open(out)
    with pytest.raises(UserError, match=r"out: the adapter of a reward model; it goes on with train.objective=reward"):
        run(tmp_path / "other", tiny.Silent(), section, also={"objective": "dpo"}, adapter=more)


def test_an_adapter_that_reward_models_do_not_have_is_refused(tmp_path: Path) -> None:
    base, start = make_chat_model(tmp_path / "base"), tmp_path / "start"
    section, adapter = ModelConfig(path=str(base)), AdapterConfig(method="lora", rank=4, targets=["q_proj"])
    with pytest.raises(UserError, match=r"adapter.targets: 'score.weight' is trained whole beside an adapter"):
        run(tmp_path / "run", tiny.Silent(), section, adapter=replace(adapter, targets=["q_proj", "score"]))
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(plain, LoraConfig(r=4, lora_alpha=adapter.alpha, target_modules=["q_proj"])).save_pretrained(start)
    with pytest.raises(UserError, match=r"start: the adapter of a language model, without 'score.weight'"):
        run(tmp_path / "run", tiny.Silent(), section, adapter=replace(adapter, start=str(start)))


def test_the_new_layer_begins_as_transformers_makes_it_by_the_seed(tmp_path: Path) -> None:
    base = make_chat_model(tmp_path / "base", initializer_range=0.5)
    found = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        section, folder = ModelConfig(path=str(base)), tmp_path / name
        run(folder, tiny.Silent(), section, also={"steps": 1, "lr": 1e-12, "seed": seed, "validate_every": None})
        export(folder, recipe_of(section, folder), out_dir=tmp_path / f"{name}-out")
        found.append(load_file(tmp_path / f"{name}-out" / "model.safetensors")[SCORE])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert 0.3 < float(found[0].std()) < 0.7
    assert found[0].shape == (1, 48)


def test_what_is_frozen_is_exported_as_it_was(tmp_path: Path) -> None:
    """The new layer as well, which the folder does not have, and the norm in the dtype of the folder."""
    base, run_dir, out = make_chat_model(tmp_path / "base"), tmp_path / "run", tmp_path / "out"
    section, train = ModelConfig(path=str(base)), {"freeze": ["*norm*", "score*"], "compute_dtype": "bfloat16"}
    held = load_file(base / "model.safetensors")
    held["model.norm.weight"] = torch.linspace(0.9, 1.1, 48)
    save_file(held, base / "model.safetensors", {"format": "pt"})
    run(run_dir, tiny.Silent(), section, also=train)
    recipe = recipe_of(section, run_dir)
    export(run_dir, replace(recipe, train=tiny.training(objective="reward", steps=3, **train)), out_dir=out)
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["model.norm.weight"], held["model.norm.weight"])
    assert torch.equal(found[SCORE], found[SCORE].bfloat16().float())
    assert found[SCORE].any()


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    straight, observer, model = tiny.Silent(), tiny.Silent(), tiny.model(vocab_size=None)
    frozen = {"freeze": ["*embed_tokens*", "*.layers.0.*"]}
    run(tmp_path / "straight", straight, model, also=frozen)
    run(tmp_path / "run", tiny.Silent(stop_after=2), model, also=frozen)
    run(tmp_path / "run", observer, model, resume=True, also=frozen)
    assert [m.loss for m in observer.metrics] == [m.loss for m in straight.metrics[2:]]
    assert tiny.digest_of(tmp_path / "run") == tiny.digest_of(tmp_path / "straight")
    measured = straight.metrics[0].measured
    assert measured["min_reward"] <= measured["mean_reward"] <= measured["max_reward"]
    assert measured.keys() == {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"}


def test_what_is_no_reward_model_or_is_one_is_refused(tmp_path: Path) -> None:
    base = make_chat_model(tmp_path / "base")
    made: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, dtype=torch.float32)
    made.save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match=r"model.path is a classifier of 3 labels; give a language model, or a reward"):
        run(tmp_path / "run", tiny.Silent(), ModelConfig(path=str(tmp_path / "three")))
    one: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    one.save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "one")
    with pytest.raises(UserError, match=r"one is a reward model, which has no probabilities of tokens; .*=reward"):
        run(tmp_path / "run", tiny.Silent(), ModelConfig(path=str(tmp_path / "one")), also={"objective": "dpo"})
    with pytest.raises(UserError, match=r"one: a reward model, .*load its export with transformers' AutoModelForSeq"):
        OpenedModel.open(tmp_path / "one")
    torn = load_file(tmp_path / "one" / "model.safetensors")
    del torn["model.norm.weight"]
    save_file(torn, tmp_path / "one" / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor provides the model's parameter 'model.norm.weight'"):
        run(tmp_path / "run", tiny.Silent(), ModelConfig(path=str(tmp_path / "one")))
    with pytest.raises(UserError, match=r"preference.center_rewards_coefficient: -1.0 must be above 0"):
        PreferenceConfig(center_rewards_coefficient=-1.0)
