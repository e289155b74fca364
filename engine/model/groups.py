"""Experts in groups: each parameter of a layer's experts is cut along its first dimension, a piece for each block.

Checkpoints, initialisers and exports know models that are not cut: they work on `uncut(spec)`, and values go from one
to the other here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.model.spec import BlockSpec, BufferSpec, ModelSpec, block_of
from penstock.engine.model.stored import SCALES
from penstock.storage.files.errors import UserError
from penstock.storage.tier.layout import ParamSpec, Rows

if TYPE_CHECKING:
    from torch import Tensor

    ReadBuffer = Callable[[str], Mapping[str, Tensor]]


def num_experts(spec: ModelSpec) -> int:
    """Experts of a layer of the uncut model that are a block of their own; 1 where none are. Raises UserError where a
    parameter of theirs has another number of rows than the rest."""
    params = [param for block in spec.blocks if block.branch_of is not None for param in spec.params_of(block)]
    if not params:
        return 1
    result = params[0].shape[0]
    other = next((param.name for param in params if param.shape[0] != result), None)
    if other is not None:
        raise UserError(
            f"train.expert_groups: '{other}' does not begin with the {result} experts, as '{params[0].name}' "
            "does; use 1"
        )
    return result


def cut(spec: ModelSpec, number: int) -> ModelSpec:
    """The model with each layer's experts in as many blocks, one behind the other; itself for one. Raises UserError
    where the experts do not divide by that."""
    if number == 1:
        return spec
    experts = num_experts(spec)
    if experts % number:
        divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise UserError(
            f"train.expert_groups: the {experts} experts of a layer do not divide into {number} groups; use one of "
            f"{divisors}"
        )
    size, buffers = experts // number, dict[str, BufferSpec]()
    apart = {block.name for block in spec.blocks if block.branch_of is not None}
    for of, members in itertools.groupby(spec.buffers, block_of):
        own = list(members)
        if of not in apart:
            buffers |= {name: spec.buffers[name] for name in own}
            continue
        for group, name in itertools.product(range(number), own):
            params = tuple(_piece(param, group * size, size) for param in spec.buffers[name].params)
            buffers[f"{of}.{group}{name.removeprefix(of)}"] = replace(spec.buffers[name], params=params)
    blocks: list[BlockSpec] = []
    for block in spec.blocks:
        inputs = tuple(f"{name}.{number - 1}" if name in apart else name for name in block.inputs)
        if block.name not in apart:
            blocks.append(replace(block, inputs=inputs))
            continue
        for group in range(number):
            name, rows = f"{block.name}.{group}", (group * size, (group + 1) * size)
            pieces = tuple(f"{name}{buffer.removeprefix(block.name)}" for buffer in block.buffers)
            blocks.append(replace(block, name=name, buffers=pieces, inputs=inputs, group=rows))
            inputs = (name,)
    return replace(spec, blocks=tuple(blocks), buffers=buffers)


def _piece(param: ParamSpec, first: int, size: int) -> ParamSpec:
    rows = Rows(param.name, first, param.shape[0])
    return replace(param, name=f"{param.name}[{first}:{first + size}]", shape=(size, *param.shape[1:]), rows=rows)


def uncut(spec: ModelSpec) -> ModelSpec:
    """The model with each layer's experts as one block; itself where nothing is cut."""
    if all(block.group is None for block in spec.blocks):
        return spec
    whole = {block.name: _whole(block) for block in spec.blocks}
    buffers: dict[str, BufferSpec] = {}
    for name, pieces in _pieces(spec).items():
        first = spec.buffers[pieces[0]]
        buffers[name] = replace(first, params=tuple(map(_joined, first.params)))
    blocks: dict[str, BlockSpec] = {}
    for block in spec.blocks:
        own = tuple(_of(buffer, whole) for buffer in block.buffers)
        inputs = tuple(whole[name] for name in block.inputs)
        blocks.setdefault(
            whole[block.name], replace(block, name=whole[block.name], buffers=own, inputs=inputs, group=None)
        )
    return replace(spec, blocks=tuple(blocks.values()), buffers=buffers)


def _whole(block: BlockSpec) -> str:
    """Name of the block that it has a part of."""
    return block.name if block.group is None else block.name.rpartition(".")[0]


def _of(buffer: str, whole: Mapping[str, str]) -> str:
    """Name of the buffer that a buffer has a part of; `whole`: the same of blocks."""
    block = block_of(buffer)
    return whole[block] + buffer.removeprefix(block)


def _joined(param: ParamSpec) -> ParamSpec:
    if param.rows is None:
        return param
    return replace(param, name=param.rows.of, shape=(param.rows.total, *param.shape[1:]), rows=None)


def _value_of(param: ParamSpec, values: Mapping[str, Tensor], end: str = "") -> Tensor | None:
    """The parameter's own of values by the names of whole parameters with that `end`; None: they have none of it."""
    if param.rows is None or param.name in values:
        return values.get(param.name + end)
    whole = values.get(param.rows.of + end)
    return None if whole is None else whole[param.rows.first : param.rows.first + param.shape[0]]


def own_values(buffer: BufferSpec, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a buffer's parameters, of values by the names of whole ones, as far as these are there, and scales."""
    own = {param.name + end: _value_of(param, values, end) for param in buffer.params for end in ("", SCALES)}
    return {name: value for name, value in own.items() if value is not None}


def joined(params: Iterable[ParamSpec], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by the names of whole parameters, of values by the names of `params`, which are in order."""
    import torch  # plans are made without it

    pieces: dict[str, list[Tensor]] = {}
    for param in params:
        if param.name in values:
            pieces.setdefault(param.name if param.rows is None else param.rows.of, []).append(values[param.name])
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in pieces.items()}


def cut_values(
    spec: ModelSpec, buffers: Iterable[tuple[str, dict[str, Tensor]]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The buffers of `spec` with their values, of those of `uncut(spec)`, in order."""
    pieces = _pieces(spec)
    for whole, values in buffers:
        for name in pieces[whole]:
            yield name, own_values(spec.buffers[name], values)


def reading_uncut(spec: ModelSpec, read: ReadBuffer) -> ReadBuffer:
    """Reads the buffers of `uncut(spec)` by reading those of `spec`."""
    pieces = _pieces(spec)

    def read_buffer(whole: str) -> Mapping[str, Tensor]:
        own = pieces[whole]
        if own == [whole]:
            return read(whole)
        values = {name: value for piece in own for name, value in read(piece).items()}
        return joined((param for piece in own for param in spec.buffers[piece].params), values)

    return read_buffer


def uncut_name(spec: ModelSpec, buffer: str) -> str:
    """Which buffer of `uncut(spec)` it is part of."""
    return _of(buffer, {block.name: _whole(block) for block in spec.blocks})


def _pieces(spec: ModelSpec) -> dict[str, list[str]]:
    """Buffer of the uncut model -> the buffers that it is cut into."""
    whole = {block.name: _whole(block) for block in spec.blocks}
    result: dict[str, list[str]] = {}
    for buffer in spec.buffers:
        result.setdefault(_of(buffer, whole), []).append(buffer)
    return result
