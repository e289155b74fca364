"""A fine-tune against TRL's SFTTrainer: same model, conversations, template, masks and schedule, step by step."""

import json
import random
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import adapted
import pytest
import tiny
import torch
from chat_model import make_tokenizer
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import make_config

STEPS, MICRO_BATCHES, CONTEXT = 20, 2, 256
PACKED_ROWS, PACKED_CONVERSATIONS = 6, 15  # either order of best fit packs them in so many rows
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = ([*ATTENTION, "gate_proj", "up_proj", "down_proj"], ATTENTION)
"""Linear modules of the layers, without and with experts; peft's all-linear is of experts as well."""
HALF = ("*embed_tokens*", "model.layers.0.*", "*.mlp.*")
"""Patterns that freeze about half of each."""
TRAIN: dict[str, Any] = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


def model_folder(folder: Path, model_type: str) -> Path:
    """A float32 model with random weights and a byte-level tokenizer that has a chat template with markers."""
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "num_hidden_layers": 3}
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

    @property
    def train(self) -> dict[str, Any]:
        """Adapters take a higher rate. SFTTrainer's weight decay is of dora's magnitudes too, which are no matrices."""
        changes = {} if self.adapter is None else {"lr": 1e-2}
        return TRAIN | changes | ({"weight_decay": 0.0} if self.adapter == "dora" else {})

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
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

    losses: list[float] = []
    rates: list[float] = []

    class Recorded(SFTTrainer):
        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            loss = super().training_step(*arguments, **named)
            rates.append(self.optimizer.param_groups[0]["lr"])
            losses.append(float(loss))
            return loss

    config = SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=MICRO_BATCHES, learning_rate=case.train["lr"], lr_scheduler_type=case.schedule,
        warmup_steps=0, optim="adamw_torch", adam_beta1=TRAIN["beta1"], adam_beta2=TRAIN["beta2"],
        adam_epsilon=TRAIN["eps"], weight_decay=case.train["weight_decay"], max_grad_norm=TRAIN["clip_norm"],
        assistant_only_loss=case.trained == "assistant", packing=case.packing == "best_fit", max_length=CONTEXT,
        train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=False, use_cpu=True,
        router_aux_loss_coef=0.0,  # else there is one, micro-batch by micro-batch
        report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in case.freeze))
    trainer = Recorded(
        model=base
        if case.adapter is None
        else PeftModel.from_pretrained(base, model.with_name("adapter"), is_trainable=True),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    # A micro-batch's loss is its share of the mean over all targets of the step.
    steps = [sum(losses[i : i + MICRO_BATCHES]) for i in range(0, len(losses), MICRO_BATCHES)]
    weights = get_peft_model_state_dict(trainer.model) if case.adapter else dict(trainer.model.named_parameters())
    return steps, rates[::MICRO_BATCHES], {name: tensor.detach() for name, tensor in weights.items()}


def ours(model: Path, file: Path, folder: Path, case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same by a recipe.

    transformers gives a step the rate that its schedule has at the end of the step before: the first has the peak, and
    zero would be that of the step after the last. So here one step is all of the warm-up, and one is left over.
    """
    observer = tiny.Silent(stop_after=STEPS)
    sections: dict[str, Any] = {
        "model": ModelConfig(path=str(model)),
        "adapter": AdapterConfig(),
        "data": DataConfig(
            source="messages", path=str(file), sequence_length=CONTEXT, packing=case.packing, order="kept",
            trained_tokens=case.trained,
        ),
        "train": tiny.training(
            steps=STEPS + 1, warmup_steps=1, min_lr_ratio=0.0, lr_schedule=case.schedule,
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
@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3"),
        Case("llama", "cosine", trained="all"),
        Case("llama", packing="best_fit"),
        *(Case(model_type, adapter=method) for model_type in adapted.SHAPES for method in adapted.METHODS),
        *(Case(model_type, freeze=HALF) for model_type in adapted.SHAPES),
    ],
    ids=lambda case: f"{case.model_type}-{case.adapter or case.trained}-{'frozen' if case.freeze else case.packing}",
)
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
