"""Twenty steps of a run beside TRL's trainer on the same rows: the loss and the norm of the gradient of each, and the
statistics of tokens that TRL reports.

TRL tokenises the rows itself and computes them side by side, padded, in float32; AdamW is torch's.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import comparisons
import pytest
import tiny
import torch
from chat_model import make_chat_model
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from samples import cases
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from penstock.engine.config import AdapterConfig, GrpoConfig, ModelConfig, PreferenceConfig
from penstock.engine.data.completions import CompletionLoader, Generation

STEPS, ROWS, LR = 20, 4, 3e-4
"""At three times this rate, cpo with loss_type=ipo makes twenty times as much of rounding errors in twenty steps."""
COMMON: dict[str, Any] = {
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "max_steps": STEPS,
}
COMMON |= {"per_device_train_batch_size": ROWS, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
COMMON |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "weight_decay": 0.0, "adam_beta2": 0.95}
COMMON |= {"disable_tqdm": True, "max_length": None, "optim": "adamw_torch", "adam_epsilon": 1e-8}
PAIRED = {
    "dpo": ({"beta": 0.3}, DPOTrainer, DPOConfig, {}),
    "dpo hinge": ({"loss_type": "hinge", "beta": 0.5}, DPOTrainer, DPOConfig, {"loss_type": ["hinge"]}),
    "dpo ipo": ({"loss_type": "ipo", "beta": 0.2}, DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}),
    "dpo by length": (
        {"loss_type": "sigmoid_norm", "beta": 2.0},
        DPOTrainer,
        DPOConfig,
        {"loss_type": ["sigmoid_norm"]},
    ),
    "dpo robust": (
        {"loss_type": "robust", "label_smoothing": 0.1},
        DPOTrainer,
        DPOConfig,
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "dpo apo_zero": ({"loss_type": "apo_zero"}, DPOTrainer, DPOConfig, {"loss_type": ["apo_zero"]}),
    "dpo apo_down": ({"loss_type": "apo_down"}, DPOTrainer, DPOConfig, {"loss_type": ["apo_down"]}),
    "cpo": (
        {"label_smoothing": 0.1, "cpo_alpha": 0.7},
        CPOTrainer,
        CPOConfig,
        {"label_smoothing": 0.1, "cpo_alpha": 0.7},
    ),
    "cpo hinge": ({"loss_type": "hinge"}, CPOTrainer, CPOConfig, {"loss_type": "hinge"}),
    "cpo ipo": ({"loss_type": "ipo"}, CPOTrainer, CPOConfig, {"loss_type": "ipo"}),
    "simpo": (
        {"beta": 2.0, "simpo_gamma": 0.8},
        CPOTrainer,
        CPOConfig,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.8},
    ),
    "orpo": ({"beta": 0.2}, ORPOTrainer, ORPOConfig, {}),
}
UNPAIRED = {
    "kto": ({"desirable_weight": 1.3, "undesirable_weight": 0.7}, {"desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "kto apo_zero_unpaired": ({"loss_type": "apo_zero_unpaired"}, {"loss_type": "apo_zero_unpaired"}),
}


class Step(NamedTuple):
    loss: float
    norm: float
    statistics: dict[str, float]


STATISTICS = {
    **dict.fromkeys(("dpo", "kto"), ("entropy", "logits/chosen", "logits/rejected")),
    **dict.fromkeys(("grpo", "rloo"), ("entropy",)),
}
"""Objective -> what TRL reports of its tokens, and a run as well. Means that CPO and ORPO have of their logits there
count padding and depend on how rows are laid out."""


def statistics_of(line: Mapping[str, float], objective: str) -> dict[str, float]:
    """Those that there are: where all completions are masked a run has none, and TRL has 0."""
    return {name: line[name] for name in STATISTICS.get(objective, ()) if line.get(name, 0) != 0}


class Seen(TrainerCallback):
    """Norms of the gradients, the losses as computed, and what is logged of each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any) -> None:
        if "loss" in logs:  # not that of the end
            self.lines.append(dict(logs))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        gradients = [p.grad for p in given["model"].parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()))


def base(folder: Path) -> Path:
    """A model with weights larger than the initialiser's, so that all of it matters."""
    make_chat_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(folder)
    return folder


def adapter(model: Path, folder: Path, auto_class: Any = AutoModelForCausalLM, **more: Any) -> Path:
    """A LoRA adapter by plain peft, none of its values zero."""
    plain = auto_class.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "down_proj"]
    found = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **more))
    torch.manual_seed(6)
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    found.save_pretrained(folder)
    return folder


def lora_section(start: Path | None) -> AdapterConfig:
    if start is None:
        return AdapterConfig()
    return AdapterConfig(method="lora", rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"], start=str(start))


def by_penstock(
    folder: Path,
    model: Path,
    rows: list[dict[str, Any]],
    objective: str,
    lora: Path | None,
    packing: str,
    **options: Any,
) -> list[Step]:
    observer = tiny.Silent()
    train = {"steps": STEPS, "global_batch_size": ROWS, "lr": LR, "lr_schedule": "constant", "clip_norm": None}
    length = 192 if packing == "none" else 192 * len(rows)
    if packing != "none":
        train["global_batch_size"] = 1
    tiny.train_run(
        folder,
        observer,
        model=ModelConfig(path=str(model)),
        adapter=lora_section(lora),
        data=comparisons.data(
            comparisons.write(folder.with_suffix(".jsonl"), rows), packing=packing, sequence_length=length
        ),
        train=tiny.training(objective=objective, weight_decay=0.0, **train),
        preference=PreferenceConfig(**options),
    )
    return [Step(m.loss, m.grad_norm, statistics_of(m.measured, objective)) for m in observer.metrics]


def by_trl(
    folder: Path,
    model: Path,
    rows: list[dict[str, Any]],
    trainer: Any,
    config: Any,
    lora: Path | None,
    auto_class: Any = AutoModelForCausalLM,
    objective: str = "",
    **options: Any,
) -> list[Step]:
    seen = Seen()

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *given: Any) -> Any:
            if of_trainer:
                return super()._get_train_sampler(*given)
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            seen.losses.append(float(loss))
            return loss

    policy: Any = auto_class.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    if lora is not None:
        policy = PeftModel.from_pretrained(policy, lora, is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    of_trainer = {name: options.pop(name) for name in ("reward_funcs", "rollout_func") if name in options}
    given = {name: value for name, value in COMMON.items() if name in {f.name for f in fields(config)}}
    args = config(output_dir=str(folder), **given | options)
    made = InOrder(
        model=policy,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[seen],
        **of_trainer,
    )
    made.train()
    return [
        Step(loss, norm, statistics_of(line, objective))
        for loss, norm, line in zip(seen.losses, seen.norms, seen.lines, strict=True)
    ]


def require_alike(found: list[Step], expected: list[Step], objective: str = "") -> None:
    assert len(found) == len(expected) == STEPS
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-5, abs=1e-5)
        assert mine.statistics == pytest.approx(theirs.statistics, rel=1e-5, abs=1e-5)
    assert {name for step in found for name in step.statistics} == set(STATISTICS.get(objective, ()))


HOW = {
    f"{name}, {packing}, {'lora' if lora else 'full'}": (name, packing, lora)
    for name in (*PAIRED, *UNPAIRED)
    for packing in ("none", "best_fit")
    for lora in (False, True)
}
OFTEN = ("dpo, best_fit, lora", "dpo ipo, none, full", "cpo, best_fit, full", "simpo, none, lora", "orpo, none, full")


@pytest.mark.parametrize("name", cases({name: how for name, how in HOW.items() if how[0] in PAIRED}, *OFTEN))
def test_pairs_train_as_in_trl(tmp_path: Path, name: str) -> None:
    name, packing, lora = HOW[name]
    options, trainer, config, theirs = PAIRED[name]
    model = base(tmp_path / "model")
    start = adapter(model, tmp_path / "adapter") if lora else None
    rows = comparisons.pairs(ROWS if packing == "best_fit" else 3 * ROWS)
    objective = name.split()[0]
    found = by_penstock(tmp_path / "run", model, rows, objective, start, packing, **options)
    theirs = theirs | {"objective": objective, "beta": options.get("beta", 0.1)}
    expected = by_trl(tmp_path / "trl", model, rows, trainer, config, start, **theirs)
    require_alike(found, expected, objective)


@pytest.mark.parametrize(
    "name", cases({name: how for name, how in HOW.items() if how[0] in UNPAIRED}, "kto, none, lora")
)
def test_answers_with_verdicts_train_as_in_trl(tmp_path: Path, name: str) -> None:
    """One batch again and again: TRL takes the answers to other prompts from the same batch, a run from all data."""
    name, packing, lora = HOW[name]
    options, theirs = UNPAIRED[name]
    model = base(tmp_path / "model")
    start = adapter(model, tmp_path / "adapter") if lora else None
    rows = comparisons.verdicts(ROWS)
    found = by_penstock(tmp_path / "run", model, rows, "kto", start, packing, **options)
    theirs = theirs | {"objective": "kto", "beta": 0.1}
    expected = by_trl(tmp_path / "trl", model, rows, KTOTrainer, KTOConfig, start, **theirs)
    require_alike(found, expected, "kto")


SAMPLED = {
    "grpo": ({}, {}),
    "grpo, twice, clipped, dr_grpo": (
        {"num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.04, "loss_type": "dr_grpo"},
        {"num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.04, "loss_type": "dr_grpo"},
    ),
    "grpo, by completion, at a temperature": (
        {"loss_type": "grpo", "temperature": 0.6, "scale_rewards": "batch", "mask_truncated_completions": True},
        {"loss_type": "grpo", "temperature": 0.6, "scale_rewards": "batch", "mask_truncated_completions": True},
    ),
    "grpo, one ratio for a sequence": (
        {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-3, "loss_type": "bnpo"},
        {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-3, "loss_type": "bnpo"},
    ),
    "grpo, held to the reference": ({"beta": 0.2}, {"beta": 0.2}),
    "grpo, twice, held to the reference by completion": (
        {"beta": 0.2, "num_iterations": 2, "importance_sampling_level": "sequence", "use_bias_correction_kl": False},
        {"beta": 0.2, "num_iterations": 2, "importance_sampling_level": "sequence", "use_bias_correction_kl": False},
    ),
    "grpo, twice, held to the reference": ({"beta": 0.2, "num_iterations": 2}, {"beta": 0.2, "num_iterations": 2}),
    "rloo": ({"num_iterations": 2}, {"num_iterations": 2}),
    "rloo, held to the reference": ({"beta": 0.2}, {"beta": 0.2}),
}
REWARD = """
def vowels(completions, **_):
    return [sum(text.count(letter) for letter in "aeiou") / 4 for text in completions]
"""


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", SAMPLED)
def test_completions_train_as_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lora: bool) -> None:
    """TRL gets the completions that the run has sampled, and rewards them itself."""
    options, theirs = SAMPLED[name]
    objective, model = name.split(",")[0], base(tmp_path / "model")
    start = adapter(model, tmp_path / "adapter") if lora else None
    rows = [{"prompt": row["prompt"]} for row in comparisons.pairs(4)]
    (tmp_path / "reward.py").write_text(REWARD)
    generations: list[Generation] = []
    begin = CompletionLoader.begin
    monkeypatch.setattr(CompletionLoader, "begin", lambda self, made: (generations.append(made), begin(self, made))[1])
    observer, train = tiny.Silent(), {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "lr": LR}
    tiny.train_run(
        tmp_path / "run",
        observer,
        model=ModelConfig(path=str(model)),
        adapter=lora_section(start),
        data=comparisons.data(comparisons.write(tmp_path / "rows.jsonl", rows), source="prompts", sequence_length=80),
        train=tiny.training(objective=objective, weight_decay=0.0, lr_schedule="constant", clip_norm=None, **train),
        grpo=GrpoConfig(
            reward=[f"{tmp_path}/reward.py:vowels"], num_generations=4, max_completion_length=12, **options
        ),
    )
    found = [Step(m.loss, m.grad_norm, statistics_of(m.measured, objective)) for m in observer.metrics]

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = generations.pop(0)
        tokens = tokenizer(prompts)["input_ids"]
        return {"prompt_ids": tokens, "completion_ids": made.completions, "logprobs": None}

    tokenizer = AutoTokenizer.from_pretrained(model)
    scope: dict[str, Any] = {}
    exec(REWARD, scope)
    more: dict[str, Any] = {"beta": 0.0, "num_generations": 4, "max_completion_length": 12, "shuffle_dataset": False}
    more |= {"per_device_train_batch_size": 8, "reward_funcs": [scope["vowels"]]}
    trainer, config = (GRPOTrainer, GRPOConfig) if objective == "grpo" else (RLOOTrainer, RLOOConfig)
    if objective == "grpo":
        more["rollout_func"] = rollouts
    else:
        monkeypatch.setattr(RLOOTrainer, "_generate_single_turn", lambda *_: generations.pop(0).completions)
    expected = by_trl(tmp_path / "trl", model, rows, trainer, config, start, objective=objective, **more | theirs)
    require_alike(found, expected, objective)
    assert len({round(m.measured["reward"], 6) for m in observer.metrics}) > 3


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("packing", "centre"), [("none", None), ("best_fit", 0.1)], ids=["rows of a pair", "packed and centred"]
)
def test_reward_models_train_as_in_trl(tmp_path: Path, packing: str, centre: float | None, lora: bool) -> None:
    model = base(tmp_path / "model")
    made: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.manual_seed(7)
    made.score.weight.data.normal_(std=0.2)
    made.save_pretrained(model)
    rows = comparisons.pairs(ROWS if packing == "best_fit" else 3 * ROWS)
    options = {"center_rewards_coefficient": centre}
    classifier = AutoModelForSequenceClassification
    start = adapter(model, tmp_path / "adapter", classifier, task_type="SEQ_CLS") if lora else None
    found = by_penstock(tmp_path / "run", model, rows, "reward", start, packing, **options)
    expected = by_trl(tmp_path / "trl", model, rows, RewardTrainer, RewardConfig, start, classifier, **options)
    require_alike(found, expected)
