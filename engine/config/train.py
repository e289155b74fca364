"""The train section of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.config.values import (
    MOST_EXPERTS,
    MOST_GPUS,
    MOST_SEQUENCES,
    MOST_STEPS,
    MOST_TOKENS,
    require,
    require_counts,
    require_kinds,
)
from penstock.storage.files.untrusted import one_line


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Steps, batch, optimizer and precision."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 1
    """Sequences per optimizer step."""
    micro_batch_size: int = 1
    """Sequences processed together, as one stream of tokens. GPU memory for keys and values grows with their total
    length."""
    replicas: int | None = None
    """Into how many equal parts a step is divided, whose gradients are computed apart and added in one order: GPUs
    share them out, and any number of GPUs that divides it gives the same bits. none: as many as a new run has GPUs."""
    parallel: Literal["auto", "data", "context"] = "auto"
    """What these parts are. data: some of the step's sequences each. context: a shard of every sequence, for contexts
    too long for one GPU or batches of fewer sequences than there are GPUs. auto is data where the sequences can be
    divided so."""
    chunk_tokens: int | None = None
    """Tokens per chunk, the unit of activation memory. Any number works; none lets the plan choose."""
    activation_checkpointing: Literal["auto", "full", "selective", "none"] = "auto"
    """What the backward pass recomputes in a layer. full: everything including attention; only the layer's input is
    saved. selective: everything except attention, whose keys, values and output are saved too. none: nothing; all
    activations are kept in GPU memory. auto lets the plan choose for each layer."""
    kv_window: Literal["auto", "whole", "streamed"] = "auto"
    """Keep one layer's keys and values of a micro-batch whole on the GPU, or stream them from RAM in chunks. auto
    streams them only if the GPU budget is too small."""
    objective: str = "next_token"
    """What is minimised. next_token is the mean loss of a step's targets; sequence_mean the mean over its sequences of
    each one's mean loss, so that short ones count as much as long ones."""
    optimizer: str = "adamw"
    """Name of the optimizer. adamw is the only one."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate divided by the peak learning rate. As in Hugging Face's Trainer, the step after the last one
    would have it. A wsd schedule's warm-up also starts from it."""
    warmup_steps: int = 0
    """Steps of linear warm-up. As in Hugging Face's Trainer, the first step has learning rate zero and the step after
    the warm-up the peak."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; each step has the rate that it has in Hugging Face's Trainer. wsd
    (warmup-stable-decay) stays constant and falls over the last train.decay_steps as 1 - sqrt. Such a run can be
    extended: resume it with more train.steps, before the decay begins or from a checkpoint made before it."""
    decay_steps: int | None = None
    """Length of the decay at the end of a wsd schedule, in steps. none means a tenth of all steps."""
    lr_groups: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate by patterns of parameter names, for example {"*embed_tokens*": 0.1}. The first
    pattern that matches is used; without a match the factor is 1. With factor 0 parameters do not change."""
    layer_lr_decay: float = 1.0
    """Factor on the learning rate from each layer to the one below it, applied on top of train.lr_groups. The head and
    the final norm use train.lr, the last layer train.lr times this factor, the layer below it times its square, and so
    on. The embedding has the lowest rate, also if it is tied to the head, and so has a vision tower that is trained."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of names of parameters that are not trained, for example ["*embed_tokens*", "*.layers.[0-3].*"]. They
    take no master weights, moments, gradients or writes."""
    beta1: float = 0.9
    """Adam's decay rate of the first moment."""
    beta2: float = 0.95
    """Adam's decay rate of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay. It is never applied to norms and biases, of whatever shape, nor to other vectors."""
    clip_norm: float | None = 1.0
    """Clip gradients to this global norm. none does not clip."""
    z_loss: float = 0.0
    """Weight of the z-loss, the squared log-partition of the logits (PaLM uses 1e-4). 0 turns it off."""
    router_aux_loss: float | None = None
    """Weight of the load-balancing loss of a mixture of experts, if the model defines one. none uses the model's
    config, if that turns the loss on (output_router_logits). It is over all tokens of a step, so that the activations
    of all of them are saved at once."""
    split_layers: str | None = None
    """A part of every layer that is streamed as a block of its own, after the rest of the layer, so that no slot on the
    GPU has to hold a whole layer: experts, those of a mixture. For models whose layers do not fit the GPU."""
    expert_groups: int | None = None
    """With train.split_layers=experts: into how many blocks the experts of a layer are cut, streamed one after the
    other. Their number must be a multiple of it. none lets the plan choose when a run is new."""
    skip_idle_experts: bool = False
    """Groups of experts (train.expert_groups) that no token of a step is sent to are neither moved nor updated in it;
    when one is needed again, it catches up to the same bits. Fetching a layer's first group begins only once its router
    has run, so that this pays where most steps leave groups idle."""
    spread_experts: bool | None = None
    """With several GPUs and train.expert_groups: each GPU computes some of a layer's groups of experts, for the tokens
    of all GPUs, and reads the weights of those alone. That pays where a step has few tokens for each GPU, and needs as
    many groups as GPUs. Hidden states go through RAM. none lets the plan choose."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
    """Dtype of weights and activations in the forward and backward pass; master weights and moments are always float32.
    auto is bfloat16, but float32 on a CPU without bfloat16 instructions, where it is several times faster, and on a GPU
    without them."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are stored until the optimizer uses them. They are always summed in float32 first."""
    validate_every: int | None = None
    """Measure the validation loss, or the rewards of held-out prompts with grpo and rloo, every so many steps and after
    the last one. none never does. Needs data.validation_documents."""
    validate_first: bool = False
    """Also validate before the first step."""
    validation_sequences: int | None = None
    """Sequences per validation, of the same documents every time; fewer if these fill fewer. none uses as many as a
    training step."""
    early_stopping_patience: int | None = None
    """End the run after this many validations in a row without a lower validation loss, or a higher reward. none always
    trains to the last step."""
    seed: int = 0
    """Seed of the random weights of a model trained from scratch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile layers and optimizer with torch.compile. auto does so if the compilers are installed and a measurement
    before the first step shows that it saves time within this run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. auto uses CUDA if there is a GPU."""
    gpus: int | None = None
    """GPUs to use, each by a process of its own; without a GPU, as many processes on the CPU. It must divide
    train.replicas. none: the most that do, of those that there are; one process on a CPU."""
    calibrate: bool = True
    """Time the ops of one block before the first step and plan again with the result."""
    deterministic: bool = False
    """Use only kernels that give the same bits in every run on one machine. This is slower on a GPU; on a CPU it is
    always so."""

    def __post_init__(self) -> None:
        require_kinds("train", self)
        steps = ("steps", "validate_every", "early_stopping_patience", "decay_steps")
        require_counts("train", self, steps, MOST_STEPS)
        sequences = ("global_batch_size", "micro_batch_size", "replicas", "validation_sequences")
        require_counts("train", self, sequences, MOST_SEQUENCES)
        require_counts("train", self, ("chunk_tokens",), MOST_TOKENS)
        require_counts("train", self, ("expert_groups",), MOST_EXPERTS)
        require_counts("train", self, ("gpus",), MOST_GPUS)
        require(
            None in (self.gpus, self.replicas) or self.replicas % self.gpus == 0,  # type: ignore[operator]
            f"train.gpus: {self.gpus} GPUs cannot share {self.replicas} replicas (train.replicas) equally; use a "
            f"divisor of {self.replicas}",
        )
        for name in ("global_batch_size", "validation_sequences"):
            value = getattr(self, name)
            require(
                value is None or value % self.micro_batch_size == 0,
                f"train.{name}: {value} is not a multiple of train.micro_batch_size {self.micro_batch_size}",
            )
        parts = self.micro_batches
        require(
            self.parallel != "data" or self.divides_batch,
            f"train.replicas: the {parts} micro-batches of a step (train.global_batch_size / train.micro_batch_size) "
            f"cannot be divided into {self.replicas} equal parts; set a divisor of {parts}, or train.parallel=context "
            "to divide each sequence",
        )
        require("" not in self.freeze, 'train.freeze: a pattern is empty; write for example "*embed_tokens*"')
        require(-(2**63) <= self.seed < 2**63, f"train.seed: {self.seed} has more than 64 bits")
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

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def divides_batch(self) -> bool:
        """Whether each replica can have as many of the step's micro-batches."""
        return self.micro_batches % (self.replicas or 1) == 0

    @property
    def sharded(self) -> bool:
        """Whether replicas are shards of every sequence (context parallel)."""
        context = self.parallel == "context" or (self.parallel == "auto" and not self.divides_batch)
        return context and (self.replicas or 1) > 1

    def _check_schedule(self) -> None:
        """The learning rate over steps and parameters; patterns are checked later, when the model is known."""
        given, left = self.decay_steps, self.steps - self.warmup_steps
        require(
            not self.steps == self.warmup_steps == 1 or (self.lr_schedule == "wsd" and self.min_lr_ratio > 0),
            "train.warmup_steps: 1 would leave the only step a learning rate of zero; set 0, or more train.steps",
        )
        require(
            given is None or given <= left,
            f"train.decay_steps: {given} exceeds the {left} steps that remain of train.steps after train.warmup_steps",
        )
        require(0 < self.layer_lr_decay <= 1, f"train.layer_lr_decay: {self.layer_lr_decay} must be above 0, at most 1")
        for pattern, factor in self.lr_groups.items():
            require(
                isinstance(factor, (int, float)) and 0 <= factor < math.inf,
                f"train.lr_groups: the factor of '{one_line(pattern)}' is {one_line(factor)}; give 0 or more",
            )
