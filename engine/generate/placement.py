"""Which weights live on which tier while a model is asked, and where keys and values go. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.engine.model.spec import ModelSpec, layouts
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text, least_text, size_text

Tier = Literal["gpu", "ram", "disk"]
KeysValuesTier = Literal["gpu", "ram", "nowhere"]

_WORK_SHARE = 0.25
"""Of the GPU budget that a chunk's activations may take."""
_MOST_CHUNK, _LEAST_CHUNK = 4096, 16
"""Tokens that pass through a layer at once."""
_FIXED_BYTES = 16 << 20
"""What does not grow with anything."""
_LIBRARY_BYTES = 32 << 20
"""On a GPU, the workspace of its libraries."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What has to be placed, in bytes of the compute dtype."""

    buffers: Mapping[str, int]
    blocks: Sequence[tuple[str, ...]]
    """The buffers that each block computes with, in the order of computing."""
    token_bytes: int
    """Activations of one token in its layer, at most."""
    logits_bytes: int
    """Of one token: logits, and what is made of them."""
    kv_token_bytes: int
    """Keys and values of one token in all layers."""
    kv_layer_bytes: int
    """The same in the layer that has most."""

    @staticmethod
    def of(spec: ModelSpec, item_bytes: int) -> Sizes:
        widest = 0
        for params in spec.buffers.values():
            for param in params:
                # Experts' outputs exist for each expert that a token is routed to.
                width = spec.experts_per_token * max(param.shape[1:]) if len(param.shape) == 3 else max(param.shape)
                widest = max(widest, width if param.numel != spec.vocab_size * spec.hidden_size else 0)
        shapes = [shape for shape in spec.attention if shape is not None]
        per_layer = [shape.kv_heads * (shape.qk_dim + shape.v_dim) * item_bytes for shape in shapes]
        heads = max((shape.heads * (shape.qk_dim + shape.v_dim) for shape in shapes), default=0)
        return Sizes(
            buffers={name: layout.numel * item_bytes for name, layout in layouts(spec).items()},
            blocks=[tuple(b for b in block.buffers if b in spec.buffers) for block in spec.blocks],
            # Norms and attention's outputs exist in float32 for a while, beside what they were made of.
            token_bytes=(10 * spec.hidden_size + 4 * widest + 4 * heads) * (item_bytes + 2),
            logits_bytes=spec.vocab_size * (item_bytes + 8),
            kv_token_bytes=sum(per_layer),
            kv_layer_bytes=max(per_layer, default=0),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lives."""

    tiers: Mapping[str, Tier]
    """By buffer."""
    slots: int
    """Blocks that can be on the GPU beside those that live there: one computes, the other arrives."""
    slot_bytes: int
    keys_values: KeysValuesTier
    kv_tokens: int
    """Tokens, of all sequences together, that there is room for."""
    chunk_tokens: int

    def resident(self, tier: Tier, sizes: Mapping[str, int]) -> int:
        """Bytes of the buffers that live on a tier."""
        return sum(sizes[name] for name, where in self.tiers.items() if where == tier)


def place(
    sizes: Sizes, kv_tokens: int, *, gpu_bytes: int, ram_bytes: int, staged: bool, keeps: bool = True
) -> Placement:
    """As much as there is room for on the GPU, then in RAM; the rest is read from disk in each pass.

    Keys and values of `kv_tokens` come first, since each pass needs them all, too; where neither tier holds them,
    nothing is kept, which is so as well where not `keeps`. `staged`: what is read from disk passes through RAM. Raises
    UserError with the least GPU budget that would do.
    """
    most = max(sum(sizes.buffers[name] for name in block) for block in sizes.blocks)
    kv_bytes, layer_bytes = kv_tokens * sizes.kv_token_bytes, kv_tokens * sizes.kv_layer_bytes
    work = min(int(gpu_bytes * _WORK_SHARE), _MOST_CHUNK * sizes.token_bytes)
    own = _FIXED_BYTES + (_LIBRARY_BYTES if staged else 0)
    least, chunk = (
        (own + sizes.logits_bytes + tokens * sizes.token_bytes + most + layer_bytes, tokens)
        for tokens in (_LEAST_CHUNK, max(_LEAST_CHUNK, work // sizes.token_bytes))
    )
    fixed, chunk_tokens = chunk if chunk[0] <= gpu_bytes else least
    if fixed > gpu_bytes:
        raise UserError(
            f"--gpu: {size_text(gpu_bytes)} cannot hold one block of this model with the keys and values of "
            f"{kv_tokens:,} tokens; give at least {least_text(fixed)}" + (", or fewer tokens" if kv_tokens > 1 else "")
        )
    fixed -= most
    where: KeysValuesTier = "nowhere"
    # A layer's keys and values are on the GPU while it computes, wherever they live.
    if keeps and fixed - layer_bytes + most + kv_bytes <= gpu_bytes:
        where, fixed = "gpu", fixed - layer_bytes + kv_bytes
    elif keeps and kv_bytes + (most if staged else 0) <= ram_bytes:
        where, ram_bytes = "ram", ram_bytes - kv_bytes
    tiers, slots, slot_bytes = _weights(sizes, gpu_bytes - fixed, ram_bytes, staged)
    return Placement(tiers, slots, slot_bytes, where, kv_tokens, chunk_tokens)


def _weights(sizes: Sizes, gpu_bytes: int, ram_bytes: int, staged: bool) -> tuple[dict[str, Tier], int, int]:
    """Each buffer's tier; how many slots for the others there are, and of which size."""
    total = sum(sizes.buffers.values())
    if total <= gpu_bytes:
        return dict.fromkeys(sizes.buffers, "gpu"), 0, 0
    # The largest first: what is left to stream needs smaller slots.
    order = sorted(sizes.buffers, key=lambda name: -sizes.buffers[name])
    tiers: dict[str, Tier] = dict.fromkeys(sizes.buffers, "disk")
    slots, slot_bytes = 1, _largest(sizes, tiers)
    if 2 * slot_bytes <= gpu_bytes:
        slots = 2
    for name in order:
        tried = tiers | {name: "gpu"}
        held = sum(sizes.buffers[n] for n, where in tried.items() if where == "gpu")
        if held + slots * _largest(sizes, tried) <= gpu_bytes:
            tiers = tried
    staging = max(sizes.buffers[n] for n, where in tiers.items() if where == "disk") if staged else 0
    if staging > ram_bytes:
        raise UserError(
            f"--ram: {size_text(ram_bytes)} cannot hold one block of this model on its way from disk to the GPU; give "
            f"at least {least_text(staging)}"
        )
    streamed = [name for name in order if tiers[name] == "disk"]
    left = ram_bytes if sum(sizes.buffers[name] for name in streamed) <= ram_bytes else ram_bytes - 2 * staging
    for name in streamed:
        if sizes.buffers[name] <= left:
            tiers[name], left = "ram", left - sizes.buffers[name]
    return tiers, slots, _largest(sizes, tiers)


def _largest(sizes: Sizes, tiers: Mapping[str, Tier]) -> int:
    """Most bytes of a block that do not live on the GPU."""
    return max(sum(sizes.buffers[n] for n in block if tiers[n] != "gpu") for block in sizes.blocks)


def describe(placement: Placement, sizes: Sizes, device_type: str) -> str:
    """Where the weights and keys and values live, in words."""
    parts = []
    names = {"gpu": "stay on the GPU" if device_type == "cuda" else "stay in memory", "ram": "stay in RAM"}
    held = {tier: placement.resident(tier, sizes.buffers) for tier in ("gpu", "ram", "disk")}
    if device_type != "cuda":
        held = {"gpu": held["gpu"] + held["ram"], "ram": 0, "disk": held["disk"]}
    parts = [f"{bytes_text(held[tier])} {words}" for tier, words in names.items() if held[tier]]
    if held["disk"]:
        parts.append(f"{bytes_text(held['disk'])} are read from disk for every pass")
    kept = {
        "gpu": names["gpu"],
        "ram": names["ram"],
        "nowhere": "are not kept: the whole text is read again for every token",
    }
    return ", ".join(parts) + f"; keys and values {kept[placement.keys_values]}"
