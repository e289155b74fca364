"""The model and adapter sections of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engine.config.values import MOST_LAYERS, MOST_SIZE, require, require_counts, require_kinds


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model: a Hugging Face folder, a shape to train from scratch, or both, which must then match."""

    path: str | None = None
    """Hugging Face folder (config.json, *.safetensors) to fine-tune, or hf://OWNER/NAME[@REVISION] on the hub. none
    trains the shape given by the other fields from scratch. If both are given, the run can be planned without the
    folder or started with --from-scratch."""
    model_type: str = "qwen3"
    """Model type in transformers, for a model given by its shape; for example qwen3, llama, mixtral."""
    num_layers: int | None = None
    """Number of decoder layers."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_heads: int | None = None
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key and value heads; fewer than num_heads means grouped-query attention."""
    head_dim: int | None = None
    """Width of one attention head."""
    vocab_size: int | None = None
    """Vocabulary size. none uses that of the tokenizer."""
    max_position: int | None = None
    """Longest position that the rotary embedding is configured for. none uses data.sequence_length."""
    tie_embeddings: bool = False
    """Share the embedding matrix with the output head."""
    embedding_std: float | None = None
    """Standard deviation of the initial token embeddings of a new model. none uses the model's default; 1 helps very
    narrow models to tell tokens apart."""
    added_tokens: list[str] = field(default_factory=list)
    """Special tokens to add to the tokenizer. The embedding grows if it has no rows for them; new rows start as the
    mean of the others."""
    frozen_format: Literal["compute", "int8", "nf4", "stored"] = "compute"
    """How matrices of the layers that are never trained (beside an adapter, or by train.freeze) are stored and moved.
    compute: in train.compute_dtype. int8, nf4: quantised as the run begins, to 8.5 or 4.5 bits a value, and dequantised
    to train.compute_dtype where they are computed with. stored: the same for what a folder in MXFP4 or FP8 holds so, to
    4.25 or 8.5 bits a value, with exactly the values that transformers dequantises."""
    train_vision: Literal["none", "projector", "all"] = "none"
    """What of the vision tower of a model that takes images is trained beside the text part, on data with images. none:
    the tower is frozen. projector: the modules that make the text model's vectors. all: the tower too; train.freeze may
    except parts of it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Other fields of the transformers config, by their names there, for example {"rms_norm_eps": 1e-5}."""

    def __post_init__(self) -> None:
        require_kinds("model", self)
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        std = self.embedding_std
        require(std is None or std > 0, f"model.embedding_std: {std} must be above 0")
        require_counts("model", self, ("num_layers",), MOST_LAYERS)
        require_counts("model", self, (*sizes, "vocab_size", "max_position"), MOST_SIZE)
        if self.num_heads and self.num_kv_heads:
            require(
                self.num_heads % self.num_kv_heads == 0,
                f"model.num_heads: {self.num_heads} is not a multiple of model.num_kv_heads {self.num_kv_heads}",
            )

    @property
    def has_shape(self) -> bool:
        """Whether the fields describe a model by themselves; width and depth have no defaults."""
        return self.num_layers is not None and self.hidden_size is not None


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """Train small adapter matrices beside a frozen base model. The base needs weights only, without optimizer state."""

    method: Literal["none", "lora", "dora", "rslora"] = "none"
    """Kind of adapter. none trains the model itself. lora adds a low-rank product to linear modules. dora also trains
    the magnitude of each row. rslora is lora scaled by alpha over the square root of the rank."""
    rank: int = 16
    """Rank of the adapter matrices. It must not exceed the smaller side of any matrix they are added to."""
    alpha: float = 32.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get an adapter, by the end of their names, for example ["q_proj", "v_proj"], or by whole names with
    *. all-linear means every linear module of the layers, without the head."""
    start: str | None = None
    """Adapter folder, as peft writes it, to continue training from. none starts with a new adapter."""

    def __post_init__(self) -> None:
        require_kinds("adapter", self)
        require_counts("adapter", self, ("rank",), MOST_SIZE)
        require(self.alpha > 0, f"adapter.alpha: {self.alpha} must be above 0")
        require(bool(self.targets), "adapter.targets: the list is empty; name modules, or write all-linear")

    @property
    def is_used(self) -> bool:
        return self.method != "none"
