"""Which flat buffers the parameters of a model's blocks are in."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.model.adapters import plain_name
from penstock.engine.model.spec import EMBED, HEAD, VISION, BufferSpec, buffer_name
from penstock.storage.tier.layout import ParamSpec

_SORTS = tuple({"float32": float32, "frozen": frozen} for float32 in (False, True) for frozen in (False, True))
"""Of a block's buffers, in their order."""


def make_buffers(
    whole: dict[str, tuple[ParamSpec, ...]],
    stays: frozenset[str],
    float32: frozenset[str],
    format: str | None,
    held: frozenset[str] | None,
) -> dict[str, BufferSpec]:
    """Flat buffers of the blocks' parameters, of which those in `stays` are frozen and those in `float32` kept so.
    Frozen ones have `format` where they are a layer's, or part of one, and not vectors alone: tables by token id, the
    vision tower and what is kept in float32 stay as they are. `held`: plain names of what a checkpoint holds in that,
    beside which nothing has it."""
    result: dict[str, BufferSpec] = {}
    for block, params in whole.items():
        for sort in _SORTS:
            own = tuple(p for p in params if {"float32": p.name in float32, "frozen": p.name in stays} == sort)
            matrices = block not in (VISION, EMBED, HEAD) and any(len(p.shape) > 1 for p in own)
            quantised = matrices and sort["frozen"] and not sort["float32"]
            names = None if held is None else tuple(p.name for p in own if plain_name(p.name) in held)
            form, names = (format, names) if quantised and names != () else (None, None)
            result[buffer_name(block, **sort)] = BufferSpec(own, **sort, format=form, quantised=names)
    return {name: buffer for name, buffer in result.items() if buffer.params}


def branches_apart(
    whole: dict[str, tuple[ParamSpec, ...]], prefix: str, branches: Sequence[str | None], kind: str
) -> dict[str, tuple[ParamSpec, ...]]:
    """Block -> its parameters, those of modules in `branches` in blocks of their own."""
    result: dict[str, tuple[ParamSpec, ...]] = {}
    own = {f"layers.{i}": f"{prefix}.{i}.{name}." for i, name in enumerate(branches) if name is not None}
    for block, params in whole.items():
        start = own.get(block)
        if start is None:
            result[block] = params
            continue
        result[block] = tuple(param for param in params if not param.name.startswith(start))
        result[f"{block}.{kind}"] = tuple(param for param in params if param.name.startswith(start))
    return result


def own_buffers(block: str, buffers: dict[str, BufferSpec]) -> tuple[str, ...]:
    return tuple(name for sort in _SORTS if (name := buffer_name(block, **sort)) in buffers)
