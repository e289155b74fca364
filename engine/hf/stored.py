"""What a quantised checkpoint holds of parameters that stay as they are stored (model.frozen_format=stored), in the
layout of the model: conversions move scales as they move values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from penstock.engine.hf.conversion import Conversion
from penstock.engine.hf.quantised import DequantisingReader
from penstock.engine.hf.weights import CheckpointLayout
from penstock.engine.model import groups
from penstock.engine.model.checkpoint_format import OTHERS
from penstock.engine.model.spec import block_of
from penstock.engine.model.stored import FORMATS, SCALES
from penstock.storage.files.errors import UserError


def require_stored(layout: CheckpointLayout) -> None:
    """UserError for a tensor that cannot stay as it is stored, of those that the model's buffers want so."""
    formats, shapes = _formats(layout), {param.name: param.shape for param in layout.spec.params}
    for conversion in (each for group in layout.of_block.values() for each in group):
        for name in (layout.canonical[target] for target in conversion.targets):
            if (form := formats.get(name)) is None:
                continue
            for source in conversion.sources:
                if not isinstance(layout.reader, DequantisingReader) or layout.reader.held_as(source) != form:
                    raise _refusal(layout, source, f"is not stored as {form} of a bfloat16 model")
            if form == "fp8" and shapes[name][-1] % FORMATS[form].block:
                why = f"makes rows of {shapes[name][-1]} values, not of a multiple of {FORMATS[form].block}"
                raise _refusal(layout, conversion.sources[0], why)


def with_scales(
    layout: CheckpointLayout, buffers: Iterable[tuple[str, dict[str, Tensor]]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The imported `buffers`, with the scales of those of their parameters that stay FP8 (model/stored.py: SCALES)."""
    block, scales = None, dict[str, Tensor]()
    for name, values in buffers:
        buffer = layout.cut.buffers[name]
        if buffer.quantised is not None and buffer.format == "fp8":
            if (of := block_of(groups.uncut_name(layout.cut, name))) != block:
                block, scales = of, _scales(layout, of)
            values = values | groups.own_values(buffer, scales)
        yield name, values
        del values  # before the next block is read


def _scales(layout: CheckpointLayout, block: str) -> dict[str, Tensor]:
    formats, result = _formats(layout), dict[str, Tensor]()
    for conversion in layout.of_block[block]:
        if any(formats.get(layout.canonical[target]) == "fp8" for target in conversion.targets):
            result |= _converted(layout, conversion)
    return result


def _converted(layout: CheckpointLayout, conversion: Conversion) -> dict[str, Tensor]:
    assert isinstance(layout.reader, DequantisingReader)
    made = layout.plan.apply(conversion, {name: layout.reader.scales(name) for name in conversion.sources})
    result = {}
    for target, tensor in made.items():
        blocks = tensor.unflatten(-1, (-1, FORMATS["fp8"].block))
        if (blocks != blocks[..., :1]).any():
            why = f"has several scales for {FORMATS['fp8'].block} values of a row of '{target}'"
            raise _refusal(layout, conversion.sources[0], why)
        result[layout.canonical[target] + SCALES] = blocks[..., 0].clone()
    return result


def _formats(layout: CheckpointLayout) -> dict[str, str | None]:
    return {name: buffer.format for buffer in layout.spec.buffers.values() for name in buffer.quantised or ()}


def _refusal(layout: CheckpointLayout, source: str, why: str) -> UserError:
    return UserError(
        f"model.frozen_format: stored, but {layout.reader.file(source)}: tensor '{source}' {why}; {OTHERS}"
    )
