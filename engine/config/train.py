"""The train section of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.config.values import MOST_SEQUENCES, MOST_STEPS, MOST_TOKENS, require, require_most
from penstock.storage.untrusted import one_line


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Steps, batch, optimizer and precision."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 1
    """Sequences whose gradients make one optimizer step."""
    micro_batch_size: int = 1
    """Sequences laid end to end into one token stream; their number times the sequence length sets the K/V window."""
    chunk_tokens: int | None = None
    """Tokens of one chunk, the unit of activation memory; need not divide anything; none lets the plan choose."""
    activation_checkpointing: Literal["auto", "full", "selective", "none"] = "auto"
    """What backward recomputes of a layer. full: all of it, attention too, as forward saves the layer's input only;
    selective: all but attention, whose keys, values and output are saved too; none: nothing, as everything is saved in
    GPU memory; auto lets the plan choose layer by layer."""
    kv_window: Literal["auto", "whole", "streamed"] = "auto"
    """Hold one layer's keys and values of a micro-batch on the GPU whole, or stream them from RAM chunk by chunk; auto
    streams only where the budget is too small."""
    optimizer: str = "adamw"
    """Optimizer by name; adamw is the one there is."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak one."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the decay after warm-up. wsd: constant, and over the last train.decay_steps down by 1 - sqrt. Such a run
    can be made longer: resume it, from before its decay or from a checkpoint of then, with more train.steps."""
    decay_steps: int | None = None
    """Steps of the decay that ends a wsd schedule; none is a tenth of all steps."""
    lr_groups: dict[str, float] = field(default_factory=dict)
    """Pattern of parameter names, with * -> factor on the learning rate, as {"*embed_tokens*": 0.1}; the first pattern
    that fits counts, and where none does the factor is 1. At 0 parameters stay as they are."""
    layer_lr_decay: float = 1.0
    """Factor on the learning rate from one layer to the one below it, times that of train.lr_groups: the head and the
    norm before it have train.lr, the last layer this factor of it, the layer below its square, and so on down to the
    embedding, which has the least even where it is the head, too."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameter names, with *, that stay as they are, as ["*embed_tokens*", "*.layers.[0-3].*"]: of them
    there are weights only, without master weights, moments, gradients or writes."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay; never applied to norms and biases."""
    clip_norm: float | None = 1.0
    """Global gradient norm to clip to; none does not clip."""
    z_loss: float = 0.0
    """Weight of the squared log-partition of the logits in the loss (PaLM has 1e-4); 0 leaves it out."""
    router_aux_loss: float | None = None
    """Weight of a mixture of experts' load-balancing loss, where the model defines one; none takes it from the model's
    config where that switches it on (output_router_logits)."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights and activations in forward and backward; master weights and moments are float32. auto is
    bfloat16, but float32 on a CPU that has no instructions for bfloat16 and takes several times as long with it."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which a block's gradient waits for the optimizer; it is always summed in float32 first."""
    validate_every: int | None = None
    """Steps between two measurements of the validation loss, which is also measured after the last step; none measures
    none. Needs data.validation_documents."""
    validate_first: bool = False
    """Measure it before the first step as well."""
    validation_sequences: int | None = None
    """Sequences that a validation looks at, the same every time, fewer where the documents held out fill fewer; none
    takes as many as a step has."""
    early_stopping_patience: int | None = None
    """Validations in a row without a lower validation loss after which the run ends, as if its last step had come; none
    goes on to the last step."""
    seed: int = 0
    """Seed of the weights of a model trained from scratch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile layers and optimizer with torch.compile; auto does where the compilers for it are there and, as measured
    before the first step, it pays within the run's steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where there is a GPU."""
    calibrate: bool = True
    """Measure one block's ops before the first step and plan again with what they take."""
    deterministic: bool = False
    """Use only kernels that give the same bits on every run on one machine, which takes time on a GPU; on CPU every run
    gives them anyway."""

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch_size", "micro_batch_size", "chunk_tokens")
        for name in (*counts, "validate_every", "validation_sequences", "early_stopping_patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"train.{name}: {value} must be at least 1")
        require_most("train", self, ("steps", "validate_every", "early_stopping_patience"), MOST_STEPS)
        require_most("train", self, ("global_batch_size", "micro_batch_size", "validation_sequences"), MOST_SEQUENCES)
        require_most("train", self, ("chunk_tokens",), MOST_TOKENS)
        for name in ("global_batch_size", "validation_sequences"):
            value = getattr(self, name)
            require(
                value is None or value % self.micro_batch_size == 0,
                f"train.{name}: {value} is not a multiple of train.micro_batch_size {self.micro_batch_size}",
            )
        require(
            self.validation_sequences is None or self.validate_every is not None,
            f"train.validation_sequences: {self.validation_sequences} is never used; say with train.validate_every "
            "when to measure the validation loss, or leave it out",
        )
        patience = self.early_stopping_patience
        require(
            patience is None or self.validate_every is not None,
            f"train.early_stopping_patience: {patience}, but no validation loss is measured; set train.validate_every, "
            "or leave this out",
        )
        require("" not in self.freeze, "train.freeze: a pattern is empty; name parameters, with *")
        require(-(2**63) <= self.seed < 2**63, f"train.seed: {self.seed} has more than 64 bits")
        require(
            not self.validate_first or self.validate_every is not None,
            "train.validate_first: true, but train.validate_every is none; set it, or leave this out",
        )
        require(self.lr > 0, f"train.lr: {self.lr} must be above 0")
        require(self.eps > 0, f"train.eps: {self.eps} must be above 0")
        require(0 <= self.min_lr_ratio <= 1, f"train.min_lr_ratio: {self.min_lr_ratio} must lie in 0..1")
        require(self.warmup_steps >= 0, f"train.warmup_steps: {self.warmup_steps} must not be negative")
        require(self.warmup_steps <= self.steps, f"train.warmup_steps: {self.warmup_steps} exceeds train.steps")
        self._check_schedule()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train.{name}: {value} must lie in 0..1")
        require(self.clip_norm is None or self.clip_norm > 0, f"train.clip_norm: {self.clip_norm} must be above 0")
        require(self.z_loss >= 0, f"train.z_loss: {self.z_loss} must not be negative")
        aux = self.router_aux_loss
        require(aux is None or aux >= 0, f"train.router_aux_loss: {aux} must not be negative")
        require(self.weight_decay >= 0, f"train.weight_decay: {self.weight_decay} must not be negative")

    def _check_schedule(self) -> None:
        """The learning rate over steps and parameters; whether patterns fit is said where the model is known."""
        given, left = self.decay_steps, self.steps - self.warmup_steps
        require(
            given is None or self.lr_schedule == "wsd",
            f"train.decay_steps: {given} is for train.lr_schedule wsd, which is {self.lr_schedule}; set wsd, or leave "
            "train.decay_steps out",
        )
        require(given is None or given >= 1, f"train.decay_steps: {given} must be at least 1")
        require(
            given is None or given <= left,
            f"train.decay_steps: {given} exceeds the {left} of train.steps that train.warmup_steps leaves",
        )
        require(0 < self.layer_lr_decay <= 1, f"train.layer_lr_decay: {self.layer_lr_decay} must be above 0, at most 1")
        for pattern, factor in self.lr_groups.items():
            require(
                isinstance(factor, (int, float)) and 0 <= factor < math.inf,
                f"train.lr_groups: the factor of '{one_line(pattern)}' is {one_line(factor)}; give 0 or more",
            )
