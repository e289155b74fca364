"""What a model is made of, as plain data: blocks, buffers, attention. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from penstock.engine.branches.base import Sent
from penstock.engine.config import AdapterConfig
from penstock.engine.model.stored import WORD, StoredLayout
from penstock.storage.tier.layout import FlatLayout, ParamSpec

VISION = "vision"
"""The vision tower with its projector, where any of it is trained."""
EMBED = "embed"
HEAD = "head"
FROZEN = ".frozen"
"""Ends the name of a buffer that is never trained."""


FLOAT32 = ".float32"
"""Ends the name of a buffer with float32 weights whatever the compute dtype, before FROZEN."""


def buffer_name(block: str, *, float32: bool, frozen: bool) -> str:
    """The buffer of the parameters of `block` that are such."""
    return block + FLOAT32 * float32 + FROZEN * frozen


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A node of the model's graph, streamed as a whole."""

    name: str
    kind: str
    """How it is computed (engine/schedule/kinds.py)."""
    buffers: tuple[str, ...]
    """Flat buffers it computes with: its own first, if it has parameters, that of the trained ones, named as the block
    is, before that of the frozen ones, then the same of those in float32."""
    inputs: tuple[str, ...] = ()
    """Blocks whose output it takes."""
    layer: int | None = None
    """Which of the model's decoder layers it computes, all of it but a branch."""
    branch_of: int | None = None
    """Of which decoder layer it computes a part that is a block of its own (engine/branches)."""
    group: tuple[int, int] | None = None
    """Which experts it has, first and end, where those of a layer are several such blocks (model/groups.py)."""


@dataclass(frozen=True)
class BufferSpec:
    """Parameters that travel together, in one flat buffer."""

    params: tuple[ParamSpec, ...]
    frozen: bool = False
    """Never trained: it has weights only, and no state, gradients or writes."""
    float32: bool = False
    """Its weights are float32 whatever the compute dtype (model/float32.py)."""
    format: str | None = None
    """What its matrices are quantised to (model/stored.py); None: it is stored as it is computed with."""
    quantised: tuple[str, ...] | None = None
    """Whole parameters that are, of a format that a checkpoint has; None: all matrices but small ones."""

    @cached_property
    def layout(self) -> FlatLayout:
        """Of its parameters as they are computed with."""
        return FlatLayout.build(self.params)

    @cached_property
    def stored(self) -> StoredLayout | None:
        """Of what is stored and moved of it, where it is quantised."""
        if self.format is None:
            return None
        return StoredLayout.build(self.layout.params, self.format, self.quantised)

    @property
    def numel(self) -> int:
        """Elements that are stored and moved."""
        return self.layout.numel if self.stored is None else self.stored.numel

    def dtype(self, compute: str) -> str:
        """Of these, where it is computed with in `compute`."""
        if self.stored is not None:
            return WORD
        return "float32" if self.float32 else compute


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer. `window`: visible keys, the query's own included; None: all. With `chunk` a token sees
    only the keys of its own block of so many tokens, counted from the document's start."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None
    chunk: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor by which a layer hands on, beside attention, what it remembers of the tokens before."""

    kind: Literal["conv", "recurrent"]
    """Last inputs of a convolution over tokens, or what a recurrence has summed."""
    number: int
    """Which one of that kind in the layer."""
    shape: tuple[int, ...]
    float32: bool
    """Whatever the compute dtype is; else it has that."""

    def nbytes(self, compute_bytes: int) -> int:
        return math.prod(self.shape) * (4 if self.float32 else compute_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What a layer hands from one chunk of a document to the next (model/recurrence.py)."""

    argument: str
    """Name of the layer's argument for a cache, through which transformers hands it over."""
    tensors: tuple[StateTensor, ...]

    def nbytes(self, compute_bytes: int) -> int:
        return sum(tensor.nbytes(compute_bytes) for tensor in self.tensors)


@dataclass(frozen=True)
class ModelSpec:
    """A model as the engine sees it. engine/model/anatomy.py builds it."""

    config: Any
    """A copy of the transformers PretrainedConfig it was built from; None where it is only planned with."""
    model_type: str
    hidden_size: int
    vocab_size: int
    num_params: int
    """Parameters, shared ones once."""
    blocks: tuple[BlockSpec, ...]
    """embed, layers.0, layers.1, ..., head; before them vision, where that is trained."""
    buffers: dict[str, BufferSpec]
    """Block after block. A parameter that embedding and head share is in a buffer of the embedding only; a block
    without parameters of a sort has no buffer of them."""
    constants: dict[str, tuple[int, ...]]
    """Persistent buffers and parameters that the model never trains (both part of the checkpoint), and their shapes."""
    experts: tuple[int, ...]
    """Numbers of experts that a parameter of three dimensions may have as its first."""
    experts_per_token: int
    """Of which a token is routed to so many."""
    attention: tuple[AttentionShape | None, ...]
    """Per layer; None for a layer without attention."""
    whole_documents: bool
    """Some layer carries state from token to token outside attention that it cannot hand over: a document is one chunk,
    and a row is one document."""
    length_dependent_rotary: bool
    """The rotary tables of a document depend on its length."""
    structures: tuple[int, ...]
    """For each layer the index of the first layer that computes the same function of its parameters."""
    unread: tuple[str | None, ...] = field(repr=False)
    """Per layer: its linear module whose output no gradient depends on, relative to the layer (model/sums.py)."""
    summed: tuple[tuple[str, ...], ...] = field(repr=False)
    """Per layer: its linear modules whose weights' gradients one kernel can multiply and sum (model/sums.py)."""
    joined: tuple[tuple[tuple[str, ...], ...], ...] = field(repr=False)
    """Per layer: groups of these that are one product, in the order in which they are called and in which their weights
    lie one behind the other (model/joined.py)."""
    returns: tuple[int, ...] = field(repr=False)
    """Per layer: 0 if it returns a tensor, else the length of the tuple it returns."""
    states: tuple[RecurrentState | None, ...] = ()
    """Per layer what it hands on from chunk to chunk beside keys and values; empty: no layer does."""
    counts_positions: tuple[bool, ...] = field(default=(), repr=False)
    """Per layer: whether it counts the positions of its tokens by a cache (model/skeleton.py: TokensBefore)."""
    branches: tuple[str | None, ...] = ()
    """Per layer: its module that is a block of its own (model/branches.py); nothing where no layer is split."""
    sent: tuple[Sent, ...] = ()
    """What a layer hands to such a module."""
    adapter: AdapterConfig | None = None
    """The adapter that is part of the model (engine/model/adapters.py) and of its parameters' names."""
    router_aux_loss: float = 0.0
    """Weight that the model's config gives the load-balancing loss of its routers where it switches that on."""
    graph_bytes: dict[str, tuple[int | None, ...]] = field(default_factory=dict, compare=False, repr=False)
    """`graph_key` -> per layer the bytes a token that a saved graph takes, where model/graph_size.py found them."""

    @property
    def recurrent(self) -> bool:
        """Some layer carries state from token to token outside attention."""
        return self.whole_documents or any(self.states)

    @property
    def takes_prefixes(self) -> bool:
        """Whether a document can go on from the beginning of an earlier one as from a copy of it: nothing but attention
        mixes tokens, and what a token sees follows from positions, not from blocks or lengths of its document."""
        in_blocks = any(shape is not None and shape.chunk is not None for shape in self.attention)
        return not (self.recurrent or self.length_dependent_rotary or in_blocks)

    def state_of(self, layer: int) -> RecurrentState | None:
        return self.states[layer] if self.states else None

    @property
    def num_trained(self) -> int:
        return sum(param.numel for buffer in self.trained.values() for param in buffer.params)

    @property
    def trained(self) -> dict[str, BufferSpec]:
        """Of `buffers` those that are."""
        return {name: buffer for name, buffer in self.buffers.items() if not buffer.frozen}

    @property
    def frozen_params(self) -> frozenset[str]:
        """Names of the parameters in frozen buffers."""
        return frozenset(param.name for buffer in self.buffers.values() if buffer.frozen for param in buffer.params)

    @property
    def float32_params(self) -> frozenset[str]:
        """Names of the parameters that are computed with in float32 at least."""
        return frozenset(param.name for buffer in self.buffers.values() if buffer.float32 for param in buffer.params)

    @property
    def params(self) -> Iterator[ParamSpec]:
        """All parameters, shared ones once."""
        return (param for buffer in self.buffers.values() for param in buffer.params)

    def params_of(self, block: BlockSpec, *, trained: bool = False) -> list[ParamSpec]:
        """The parameters that it computes with; those of them alone that are `trained`."""
        buffers = [self.buffers[name] for name in block.buffers]
        return [param for buffer in buffers if not (trained and buffer.frozen) for param in buffer.params]

    def balances_routers(self, wanted: float | None) -> bool:
        """Whether a load-balancing loss is trained, with this train.router_aux_loss."""
        return bool(self.router_aux_loss if wanted is None else wanted)

    @property
    def vision(self) -> BlockSpec | None:
        """The block of the vision tower, which takes images; None: none of it is trained."""
        return next((block for block in self.blocks if block.kind == VISION), None)

    def for_texts(self) -> ModelSpec:
        """The model without its vision tower."""
        if (vision := self.vision) is None:
            return self
        return replace(
            self,
            num_params=self.num_params - sum(param.numel for param in self.params_of(vision)),
            blocks=tuple(block for block in self.blocks if block is not vision),
            buffers={name: buffer for name, buffer in self.buffers.items() if name not in vision.buffers},
        )

    def all_frozen(self) -> ModelSpec:
        """The model with nothing to train."""
        return replace(self, buffers={name: replace(each, frozen=True) for name, each in self.buffers.items()})

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        return tuple(block for block in self.blocks if block.layer is not None)

    @property
    def lowest_trained(self) -> int:
        """Index of the lowest block that computes with anything trained, where backward ends; their number if none."""
        trained = (i for i, block in enumerate(self.blocks) if not all(self.buffers[b].frozen for b in block.buffers))
        return next(trained, len(self.blocks))


def rotary_tables(config: Any) -> list[dict[str, Any]]:
    """The parameters of each rotary table of a transformers config."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def rotary_threshold(config: Any) -> int:
    """Tokens that documents may have whose rotary tables are the same whatever their length is."""
    known = [table.get("original_max_position_embeddings") for table in rotary_tables(config)]
    known.append(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None))
    return min((int(length) for length in known if isinstance(length, int | float)), default=0)


def graph_key(dtype: str, compiled: bool) -> str:
    """Key of ModelSpec.graph_bytes: the compute dtype, and whether layers are compiled."""
    return f"{dtype}, compiled" if compiled else dtype


def block_of(buffer: str) -> str:
    """The block whose parameters a buffer holds."""
    return buffer.removesuffix(FROZEN).removesuffix(FLOAT32)


def buffers_of_blocks(spec: ModelSpec) -> dict[str, list[str]]:
    """Block -> the buffers with parameters of its own, of blocks that have any."""
    result: dict[str, list[str]] = {}
    for buffer in spec.buffers:
        result.setdefault(block_of(buffer), []).append(buffer)
    return result


def depths(spec: ModelSpec) -> dict[str, int]:
    """Trained parameter -> layers from the head down to its own: 0 in the head, 1 in the last layer, most in the
    embedding, whether or not the head shares it, and in the vision tower."""
    layers = len(spec.attention)
    numbers = {block.name: layers - block.layer for block in spec.layers if block.layer is not None}
    numbers |= {block.name: layers - block.branch_of for block in spec.blocks if block.branch_of is not None}
    numbers |= {VISION: layers + 1, EMBED: layers + 1, HEAD: 0}
    return {param.name: numbers[block_of(name)] for name, buffer in spec.trained.items() for param in buffer.params}


def layouts(spec: ModelSpec) -> dict[str, FlatLayout]:
    return {name: buffer.layout for name, buffer in spec.buffers.items()}
