"""How long a model takes to answer, and what it waits for: said before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.forecast.flops import attention_flops, block_matmul
from penstock.engine.generate.placement import KeysValuesTier, Placement, Sizes, Tier
from penstock.engine.machine.profile import Machine
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.units import seconds_text

_LAYER_S = 1e-3
"""Of the host, to launch what a layer does, at least: what small models take."""
_WORDS = {"disk": "reading weights from disk", "link": "the link from RAM to the GPU", "compute": "computing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How long continuing some sequences will take, and why."""

    first_s: float
    """Of the pass that reads the prompts, and weights that stay."""
    pass_s: float
    """Of each further one, which gives every sequence a token."""
    total_s: float
    bound_by: str
    """What a pass waits for: disk, link or compute."""
    weights: Mapping[Tier, int]
    """Bytes of weights that live on each tier."""
    keys_values: KeysValuesTier
    where: str
    """What lives where, in words."""
    assumed: bool
    """The rates are not this machine's own: it was never probed."""

    def describe(self) -> str:
        """How long it takes, and why, in words."""
        rates = "; assumed rates, `penstock probe` measures them" if self.assumed else ""
        return (
            f"about {seconds_text(self.pass_s)} a token, {seconds_text(self.first_s)} for the first, at most "
            f"{seconds_text(self.total_s)} in all: bound by {_WORDS[self.bound_by]}{rates}"
        )


def forecast(
    spec: ModelSpec,
    sizes: Sizes,
    placement: Placement,
    stored: Mapping[str, int],
    machine: Machine,
    *,
    cuda: bool,
    where: str,
    assumed: bool,
    filled: bool,
    prompt_tokens: int,
    sequences: int,
    new_tokens: int,
) -> Estimate:
    """Of `sequences` prompts of `prompt_tokens` each that get `new_tokens` more.

    `stored`: bytes of each buffer on disk. `filled`: what lives in memory is there already. A pass takes as long as the
    slowest of what it does at once: reading from disk, copying to the GPU, computing.
    """

    def seconds(tokens: int, seen: int, read_all: bool) -> dict[str, float]:
        """One pass of `tokens` of each sequence, which then has `seen`."""
        names = [name for name, tier in placement.tiers.items() if read_all or tier == "disk"]
        uses = [name for block in sizes.blocks for name in block]
        disk = sum(stored[name] * (uses.count(name) if placement.tiers[name] == "disk" else 1) for name in names)
        link = sum(sizes.buffers[name] for name in uses if placement.tiers[name] != "gpu" or read_all)
        if placement.keys_values == "ram":
            link += sequences * seen * sizes.kv_token_bytes
        flops = sequences * tokens * sum(block_matmul(spec, block) for block in spec.blocks[1:-1])
        flops += sequences * block_matmul(spec, spec.blocks[-1])
        flops += sequences * (attention_flops(spec, [seen]) - attention_flops(spec, [seen - tokens]))
        computed = [name for block in sizes.blocks[1:] for name in block]
        touched = sum(_touched(spec, name, sizes.buffers[name], sequences * tokens) for name in computed)
        touched += sequences * seen * sizes.kv_token_bytes
        rate = machine.gpu_copy_bytes_per_s if cuda else machine.ram_copy_bytes_per_s
        return {
            "disk": disk / machine.nvme_read_bytes_per_s,
            "link": link / machine.h2d_bytes_per_s if cuda else 0.0,
            "compute": max(flops / machine.matmul_flops, touched / rate, len(spec.attention) * _LAYER_S),
        }

    total = prompt_tokens + new_tokens
    again = placement.keys_values == "nowhere"
    first = max(seconds(prompt_tokens, prompt_tokens, not filled).values())
    middle = prompt_tokens + new_tokens // 2
    later = seconds(middle if again else 1, middle if again else min(total, middle + 1), False)
    pass_s = max(later.values())
    return Estimate(
        first_s=first,
        pass_s=pass_s,
        total_s=first + max(0, new_tokens - 1) * pass_s,
        bound_by=max(later, key=later.__getitem__),
        weights={tier: placement.resident(tier, sizes.buffers) for tier in ("gpu", "ram", "disk")},
        keys_values=placement.keys_values,
        where=where,
        assumed=assumed,
    )


def _touched(spec: ModelSpec, buffer: str, nbytes: int, tokens: int) -> float:
    """Bytes of a buffer that a pass of `tokens` reads: of experts those that some token may be routed to."""
    params = spec.buffers[buffer]
    total = sum(param.numel for param in params)
    experts = sum(param.numel for param in params if len(param.shape) == 3 and param.shape[0] in spec.experts)
    if not experts:
        return nbytes
    share = min(1.0, tokens * spec.experts_per_token / max(spec.experts))
    return nbytes * (total - experts + experts * share) / total
