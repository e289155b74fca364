"""Every format x packing x architecture trains as plain autograd does. Batches with weights per token and padding: the
steps of plain PyTorch on any plan, and nothing done for padding. A fine-tune against TRL's SFTTrainer: same model,
conversations, template, masks and schedule, step by step.

Plain autograd shares nothing with the engine but the random weights and which documents a step has: transformers'
tokenizer and its chat template make the tokens and say which are trained, its own model computes each document alone.
"""

import itertools
import json
import random
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import adapted
import pytest
import tiny
import torch
from chat_model import make_tokenizer
from every_format import FIRST, SOURCES, Tokens, data_config, document, rows_of
from peft import PeftModel, get_peft_model_state_dict
from plain_training import found_in, in_order, plain_training, train_plainly
from safetensors.torch import load_file
from samples import cases
from tiny_plans import PLANS, SHORT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from weighted import WeightedLoader

from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import make_config
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.validation import validate

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "tie_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "overrides": {"sliding_window": 16, "sliding_window_pattern": 2}},
    "qwen3_moe": {"model_type": "qwen3_moe", "overrides": EXPERTS},
}
PACKINGS = ("wrap", "best_fit", "none")
DOCUMENTS, CONTEXT = 24, 64
CELLS = list(itertools.product(SOURCES, PACKINGS, SHAPES))
FEW = [("text", "wrap", "llama"), ("messages", "none", "qwen3"), ("sharegpt", "best_fit", "qwen3_moe")]
FEW += [("tokens", "best_fit", "gemma3")]
"""Every packing and architecture."""
SHARES = [0.4, 1.0, 0.0, 0.75, 0.1]
"""Of their stream that micro-batches hold, in turn: of one nothing at all."""
STEPS, WARMUP, MICRO_BATCHES, LENGTH = 20, 2, 2, 256
PACKED_ROWS, PACKED_CONVERSATIONS = 6, 15  # either order of best fit packs them in so many rows
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = ([*ATTENTION, "gate_proj", "up_proj", "down_proj"], ATTENTION)
"""Linear modules of the layers, without and with experts; peft's all-linear is of experts as well."""
HALF = ("*embed_tokens*", "model.layers.0.*", "*.mlp.*")
"""Patterns that freeze about half of each."""
TRAIN: dict[str, Any] = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


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
            begin, batches = session.loader.cursor, [session.loader.next_step() for _ in range(2)]
            steps = [[piece for m in batch for piece in found_in(m, documents, CONTEXT)] for batch in batches]
            session.loader.seek(begin)
        start = tiny.parameters(session.store, session.spec)
        expected, weights, moments = train_plainly(session.spec.config, start, settings, steps)
        losses = [metrics.loss for metrics in tiny.steps(session)]
        found = tiny.parameters(session.store, session.spec)
        found_moments = tiny.first_moments(session.store, session.spec)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_alike(found_moments, moments, 2e-5, 1e-3)
    assert_alike(found, weights, 2e-5, 1e-3)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 5e-5, floor: float = 0.0) -> None:
    """To the norm of each, or to a share of the largest: transformers' own float32 is 1e-5 away at the worst."""
    assert found.keys() == expected.keys()
    least = max(float(tensor.norm()) for tensor in expected.values()) * floor
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm()) / max(float(tensor.norm()), least)
        assert error <= most, f"{name}: {error}"


def weighted(folder: Path, name: str, filled: list[float] = SHARES, **loader: Any) -> Session:
    policy, budgets = PLANS[name]
    # Adam's epsilon: as above.
    settings = {"steps": 2, "lr": 3e-3, "eps": 1e-4, "global_batch_size": 4, "z_loss": 0.01 * (name == "mixed")}
    t = tiny.training(**settings | policy | {"chunk_tokens": 10})
    session = tiny.session(folder, t=t, **budgets)
    session.loader = WeightedLoader(session.loader, filled, **loader)  # type: ignore[assignment]
    return session


@pytest.mark.parametrize("name", cases(SHORT, "mixed", "nvme-streamed-spilled"))
def test_weighted_and_padded_steps_are_those_of_plain_pytorch(tmp_path: Path, name: str) -> None:
    """Two steps, whose micro-batches hold different shares of their streams; one has no token at all. With a z-loss the
    gradients are those of the objective with it, and the loss that is told is without it."""
    with weighted(tmp_path / "plain", name, cut=False) as reference:
        expected, weights, moments = plain_training(reference, 2)
    with weighted(tmp_path / "here", name) as session:
        metrics = tiny.steps(session)
        found = tiny.parameters(session.store, session.spec)
        found_moments = tiny.first_moments(session.store, session.spec)
    losses = [m.loss for m in metrics]
    if session.recipe.train.z_loss:
        assert all(loss < whole - 0.1 for loss, whole in zip(losses, expected, strict=True))
    else:
        assert losses == pytest.approx(expected, rel=1e-6)
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
            held = [of(session.store, session.spec) for of in (tiny.parameters, tiny.first_moments)]
            found.append(([m.loss for m in metrics], [m.tokens for m in metrics], held, done))
    (loss, tokens, held, whole), (cut_loss, cut_tokens, cut_held, less) = found
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    assert cut_tokens == tokens
    for cut_values, values in zip(cut_held, held, strict=True):
        assert_alike(cut_values, values)
    for action in ("embed_forward", "head", "embed_backward"):
        assert less[action] < 0.8 * whole[action]
    assert less["bytes"] < 0.8 * whole["bytes"]
    assert less["norm"] == whole["norm"]


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


def model_folder(folder: Path, model_type: str) -> Path:
    """A float32 model with random weights and a byte-level tokenizer that has a chat template with markers."""
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH, "num_hidden_layers": 3}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"model_type": model_type, **adapted.SIZES, **adapted.SHAPES[model_type], **own, **ends}
    adapted.base(make_config(shape, "test")).save_pretrained(folder)
    return folder


class Case(NamedTuple):
    """What both are asked for."""

    model_type: str
    schedule: str = "linear"
    trained: Literal["assistant", "all"] = "assistant"
    packing: Literal["none", "best_fit"] = "none"
    """Packed, a step is all conversations: both choose rows by best fit, but in another order."""
    adapter: Literal["lora", "dora", "rslora"] | None = None
    """Both go on from one adapter that plain peft wrote beside the model, none of whose values is zero."""
    freeze: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model_type}-{self.adapter or self.trained}-{'frozen' if self.freeze else self.packing}"

    @property
    def train(self) -> dict[str, Any]:
        """Adapters take a higher rate. SFTTrainer's weight decay is of dora's magnitudes too, which are no matrices."""
        changes = {} if self.adapter is None else {"lr": 1e-2}
        return TRAIN | changes | ({"weight_decay": 0.0} if self.adapter == "dora" else {})

    @property
    def rows(self) -> int:
        return 2 if self.packing == "none" else PACKED_ROWS // MICRO_BATCHES


def conversations(file: Path, count: int) -> list[dict[str, Any]]:
    """Of one to three turns and all lengths; also in `file`, a row each."""
    chance = random.Random(5)
    words = [*"aeiou", "the", "letters", "of", "every", "word", "and", "say", "which", "is", "longest", "Ä", "日本"]

    def text(most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, most)))

    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": text(4)}] if chance.random() < 0.3 else []
        for _ in range(chance.randint(1, 3)):
            messages += [{"role": "user", "content": text(5)}, {"role": "assistant", "content": text(6)}]
        rows.append({"messages": messages})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def theirs(
    model: Path, rows: list[dict[str, Any]], folder: Path, case: Case
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of all steps, their learning rates, and the weights, by SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    told: list[tuple[float, float]] = []

    class Recorded(SFTTrainer):
        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            loss = super().training_step(*arguments, **named)
            told.append((float(loss), self.optimizer.param_groups[0]["lr"]))
            return loss

    config = SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=MICRO_BATCHES, learning_rate=case.train["lr"], lr_scheduler_type=case.schedule,
        warmup_steps=WARMUP, optim="adamw_torch", adam_beta1=TRAIN["beta1"], adam_beta2=TRAIN["beta2"],
        adam_epsilon=TRAIN["eps"], weight_decay=case.train["weight_decay"], max_grad_norm=TRAIN["clip_norm"],
        assistant_only_loss=case.trained == "assistant", packing=case.packing == "best_fit", max_length=LENGTH,
        train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=False, use_cpu=True,
        router_aux_loss_coef=0.0,  # else there is one, micro-batch by micro-batch
        report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in case.freeze))
    if case.adapter is not None:
        base = PeftModel.from_pretrained(base, model.with_name("adapter"), is_trainable=True)
    tokenizer, dataset = AutoTokenizer.from_pretrained(model), Dataset.from_list(rows)
    trainer = Recorded(model=base, args=config, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    # A micro-batch's loss is its share of the mean over all targets of the step.
    steps = [sum(loss for loss, _ in told[i : i + MICRO_BATCHES]) for i in range(0, len(told), MICRO_BATCHES)]
    weights = get_peft_model_state_dict(trainer.model) if case.adapter else dict(trainer.model.named_parameters())
    rates = [rate for _, rate in told[::MICRO_BATCHES]]
    return steps, rates, {name: tensor.detach() for name, tensor in weights.items()}


def ours(model: Path, file: Path, folder: Path, case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same by a recipe."""
    observer = tiny.Silent()
    sections: dict[str, Any] = {
        "model": ModelConfig(path=str(model)),
        "adapter": AdapterConfig(),
        "data": DataConfig(
            source="messages", path=str(file), sequence_length=LENGTH, packing=case.packing, order="kept",
            trained_tokens=case.trained,
        ),
        "train": tiny.training(
            steps=STEPS, warmup_steps=WARMUP, min_lr_ratio=0.0, lr_schedule=case.schedule,
            global_batch_size=case.rows * MICRO_BATCHES, micro_batch_size=case.rows, chunk_tokens=100,
            freeze=list(case.freeze), **case.train,
        ),
    }  # fmt: skip
    if case.adapter is not None:
        sections["adapter"] = adapted.section(case.adapter, start=str(model.with_name("adapter")))
    tiny.train_run(folder / "run", observer, **sections)
    export(folder / "run", tiny.recipe(**sections), out_dir=folder / "out")
    if case.adapter is None:
        whole = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
        weights = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    else:
        weights = load_file(folder / "out" / "adapter_model.safetensors")
    return [m.loss for m in observer.metrics], [m.lr for m in observer.metrics], weights


@pytest.mark.long
@pytest.mark.parametrize("case", [
    Case("qwen3"),
    Case("llama", "cosine", trained="all"),
    Case("llama", packing="best_fit"),
    *(Case(model_type, adapter=method) for model_type in adapted.SHAPES for method in adapted.METHODS),
    *(Case(model_type, freeze=HALF) for model_type in adapted.SHAPES),
], ids=str)  # fmt: skip
def test_twenty_steps_equal_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, file = model_folder(tmp_path / "model", case.model_type), tmp_path / "rows.jsonl"
    if case.adapter is not None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        settings = adapted.peft_config(adapted.section(case.adapter), LINEAR[case.model_type == "qwen3_moe"])
        adapted.adapted(base, settings).save_pretrained(model.with_name("adapter"))
    whole = STEPS * MICRO_BATCHES * case.rows
    rows = conversations(file, whole if case.packing == "none" else PACKED_CONVERSATIONS)
    expected_losses, expected_rates, expected = theirs(model, rows, tmp_path / "trl", case)
    losses, rates, weights = ours(model, file, tmp_path, case)
    assert len(losses) == STEPS
    assert rates == pytest.approx(expected_rates)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    gain, tolerance = (0.5, 1e-5) if case.adapter is None and not case.freeze else (0.1, 1e-4)
    assert losses[-1] < losses[0] - gain, "nothing was learnt"
    assert weights.keys() <= expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= tolerance * expected[name].norm(), name
