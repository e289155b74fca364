"""Quantised checkpoints, read as the plain ones that transformers makes of them: a tensor at a time, on the CPU.

What `quantization_config` of a config.json says is how tensors are stored, not what the model is: it goes with the
config no further than here. Values are those of transformers' own dequantising operations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers.auto import AutoHfQuantizer

from penstock.engine.model.checkpoint_format import FIELD, quantisation
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import has_model_file, read_config_file
from penstock.storage.files.safetensors import CheckpointReader
from penstock.storage.files.untrusted import one_line, parse_object

_FORMATS = {"mxfp4": "MXFP4", "fp8": "FP8", "mxfp8": "MXFP8", "compressed-tensors": "compressed-tensors"}
"""What transformers dequantises on a CPU: quant_method -> name for people."""
_OF_ACTIVATIONS = re.compile(r"(activation|(input|output|q|k|v)(_global)?)_(scale|zero_point)")
"""Last parts of names that say how activations are quantised, which is nothing that a plain model has."""
_PLAIN = ("float64", "float32", "bfloat16", "float16")
_MXFP4_BYTES = 16
"""Of a block of 32 values that share a scale."""


def drop_quantisation(config: PretrainedConfig, where: str) -> None:
    """Forget how a model's weights are stored. UserError naming `where` for a way that cannot be dequantised."""
    for part in (config, config.get_text_config(decoder=True)):
        if values := getattr(part, FIELD, None):
            _require_readable(values, where)
        if hasattr(part, FIELD):
            delattr(part, FIELD)


def without_quantisation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json of the same model with plain weights."""
    kept = {name: value for name, value in values.items() if name != FIELD}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {name: value for name, value in text.items() if name != FIELD}
    return kept


def open_checkpoint(folder: Path) -> CheckpointReader:
    """The tensors of a model folder; of a quantised one as they are once dequantised."""
    if not has_model_file(folder, "config.json"):
        return CheckpointReader(folder)
    file, content = read_config_file(folder)
    config = parse_object(content)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    values = quantisation(config)
    if not values:
        return CheckpointReader(folder)
    _require_readable(values, str(file))
    stated = config.get("dtype") or config.get("torch_dtype") or text.get("dtype")
    return DequantisingReader(folder, values, stated if stated in _PLAIN[1:] else "bfloat16")


def remarks_on_quantised(reader: CheckpointReader) -> list[str]:
    """What is to be said of a folder that is to be trained."""
    return reader.remarks() if isinstance(reader, DequantisingReader) else []


def _require_readable(values: Any, where: str) -> None:
    method = values.get("quant_method", "unknown") if isinstance(values, dict) else values
    if not isinstance(method, str) or method not in _FORMATS:
        raise UserError(
            f"{where}: the weights are quantised as {one_line(method, 40)} (quantization_config), which Penstock "
            f"cannot read; it reads {', '.join(_FORMATS.values())}; train from the unquantised checkpoint"
        )
    if method == "compressed-tensors" and find_spec("compressed_tensors") is None:
        raise UserError(
            f"{where}: the weights are quantised as compressed-tensors (quantization_config), and the package that "
            "reads them is not installed; pip install 'penstock[compressed-tensors]', or train from the unquantised "
            "checkpoint"
        )


class _Group(NamedTuple):
    """Tensors that are one in the plain checkpoint."""

    pieces: dict[str, str]
    """What transformers' operation calls a piece -> the checkpoint's name for it."""
    converter: WeightConverter
    shape: tuple[int, ...]
    blocks: tuple[int, int] | None
    """Rows and columns that share a scale, where the last blocks may stick out of the tensor."""


class DequantisingReader(CheckpointReader):
    """A quantised folder, whose `tensors` are those of the plain checkpoint: `name.weight` of `dtype` where the folder
    has `name.weight_packed`, scales and the like; what is not quantised as it is, byte for byte.

    Raises UserError naming a tensor that lacks a piece, or whose pieces do not fit each other.
    """

    def __init__(self, folder: Path, quantisation: Mapping[str, Any], dtype: str) -> None:
        super().__init__(folder)
        self._pieces = CheckpointReader(folder)
        self._stored, self._dtype = self._pieces.tensors, dtype
        self._format = _FORMATS[quantisation["quant_method"]]
        try:
            self._quantizer: Any = AutoHfQuantizer.from_config({**quantisation, "dequantize": True}, pre_quantized=True)
            if self._format == "compressed-tensors":  # what its quantizer decides here the others decide without
                self._quantizer.validate_environment()
            self._groups = self._grouped()
        except UserError:
            raise
        except Exception as error:  # pydantic's and transformers' own, of many types
            raise UserError(
                f"{folder / 'config.json'}: {FIELD} is not one that transformers reads: {one_line(error, 300)}"
            ) from None
        pieces = {name for group in self._groups.values() for name in group.pieces.values()}
        plain = {
            name: stored
            for name, stored in self._stored.items()
            if name not in pieces and not _OF_ACTIVATIONS.fullmatch(name.rpartition(".")[2])
        }
        self.tensors = plain | {name: (dtype, group.shape) for name, group in self._groups.items()}

    def file(self, name: str) -> Path:
        return self._pieces.file(self._sources(name)[0])

    def stored_bytes(self, name: str) -> int:
        return sum(map(self._pieces.stored_bytes, self._sources(name)))

    def read(self, name: str) -> Tensor:
        if name not in self._groups:
            return super().read(name)
        group = self._groups[name]
        pieces = {piece: self._pieces.read(stored) for piece, stored in group.pieces.items()}
        try:
            return self._dequantised(group, pieces)
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise UserError(
                f"{self.file(name)}: tensor '{name}' cannot be dequantised ({one_line(error, 200)}); copy or download "
                "it again"
            ) from error

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self._groups:
            super().read_into(name, out)
        else:
            out.view(self._groups[name].shape).copy_(self.read(name))

    def held_as(self, name: str) -> str | None:
        """The format of model/stored.py that has exactly the values of a tensor; None: there is none."""
        if name not in self._groups:
            return None
        if self._format == "FP8":
            dtype = self._stored[self._groups[name].pieces["weight"]][0]
            return "fp8" if (dtype, self._dtype) == ("float8_e4m3fn", "bfloat16") else None
        return "mxfp4" if self._format == "MXFP4" else None

    def scales(self, name: str) -> Tensor:
        """What the values of an FP8 tensor were multiplied with, float32 of its shape."""
        group = self._groups[name]
        scales = self._pieces.read(group.pieces["weight_scale_inv"])
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        if group.blocks is None:
            return scales.reshape(()).expand(group.shape)
        for dim, size in zip((-2, -1), group.blocks, strict=True):
            scales = scales.repeat_interleave(size, dim)
        return scales[..., : group.shape[-2], : group.shape[-1]]

    def remarks(self) -> list[str]:
        return [
            f"{self.folder}: {len(self._groups):,} of its tensors are quantised ({self._format}): they are dequantised "
            f"to {self._dtype}, as transformers does it, and exported so"
        ]

    def _dequantised(self, group: _Group, pieces: dict[str, Tensor]) -> Tensor:
        rows, columns = group.shape[-2:]
        if group.blocks is not None and (rows % group.blocks[0] or columns % group.blocks[1]):
            # transformers wants whole blocks: those that stick out are filled with zeros.
            more = (0, -columns % group.blocks[1], 0, -rows % group.blocks[0])
            whole = functional.pad(pieces["weight"].view(torch.uint8), more)
            pieces["weight"] = whole.view(pieces["weight"].dtype)
        target, converter = group.converter.target_patterns[0], group.converter
        # The operations ask the model for the parameter's dtype, and for nothing else.
        model = nn.Module()
        model.register_parameter(target, nn.Parameter(torch.empty(0, dtype=getattr(torch, self._dtype))))
        made: dict[str, Tensor] = converter.operations[0].convert(  # type: ignore[assignment]
            {name: [tensor] for name, tensor in pieces.items()},
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=target,
            model=model,
        )
        return made[target].detach()[..., :rows, :columns].contiguous()

    def _sources(self, name: str) -> list[str]:
        return [*self._groups[name].pieces.values()] if name in self._groups else [name]

    def _grouped(self) -> dict[str, _Group]:
        """The quantised tensors by the name that they have in the plain checkpoint."""
        transforms = self._quantizer.update_weight_conversions([], nn.Module())
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = {n: each for each in transforms if isinstance(each, WeightConverter) for n in each.source_patterns}
        found: dict[str, dict[str, str]] = {}
        for stored in self._stored:
            name = stored
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            stem, _, piece = name.rpartition(".")
            if name != stored and f"{stem}.weight" not in self._stored:
                stem, _, piece = stored.rpartition(".")  # a parameter that has the name of a scale elsewhere
            if (converter := converters.get(piece)) is not None:
                found.setdefault(f"{stem}.{converter.target_patterns[0]}", {})[piece] = stored
            elif self._stored[stored][0].startswith(("float8", "uint8", "float4")):
                raise self._wrong(stored, f"is {self._stored[stored][0]}, and nothing says how to dequantise it")
        result = {}
        for name, pieces in found.items():
            target = name.rpartition(".")[2]
            if [*pieces] == [target] and self._stored[pieces[target]][0] in _PLAIN:
                continue
            result[name] = self._described(name, pieces, converters[next(iter(pieces))])
        return result

    def _described(self, name: str, pieces: dict[str, str], converter: WeightConverter) -> _Group:
        """The group that `pieces` make, checked against each other."""
        if self._format == "MXFP4":
            return self._mxfp4(name, pieces, converter)
        if self._format == "compressed-tensors":
            return self._compressed(name, pieces, converter)
        return self._fp8(name, pieces, converter)

    def _mxfp4(self, name: str, pieces: dict[str, str], converter: WeightConverter) -> _Group:
        self._require(name, pieces, converter.source_patterns)
        blocks, scales = (self._shape(pieces[piece]) for piece in converter.source_patterns)
        if len(blocks) != 4 or blocks[-1] != _MXFP4_BYTES:
            raise self._wrong(pieces[converter.source_patterns[0]], f"must be [experts, rows, blocks, {_MXFP4_BYTES}]")
        self._require_shape(pieces[converter.source_patterns[1]], scales, blocks[:-1])
        experts, rows, count, _ = blocks
        return _Group(pieces, converter, (experts, count * _MXFP4_BYTES * 2, rows), None)

    def _fp8(self, name: str, pieces: dict[str, str], converter: WeightConverter) -> _Group:
        self._require(name, pieces, ["weight", "weight_scale_inv"])
        (dtype, shape), scales = self._stored[pieces["weight"]], self._shape(pieces["weight_scale_inv"])
        if len(shape) < 2 or not dtype.startswith(("float8", "int8")):
            raise self._wrong(pieces["weight"], f"is {dtype} of shape {list(shape)}, but has a scale")
        size = self._quantizer.quantization_config.weight_block_size
        if dtype == "int8":  # two four-bit values a byte
            shape, size = (*shape[:-1], 2 * shape[-1]), (1, 32)
        if size is None or math.prod(scales) == 1:
            self._require_shape(pieces["weight_scale_inv"], (math.prod(scales),), (1,))
            return _Group(pieces, converter, shape, None)
        grid = (*shape[:-2], math.ceil(shape[-2] / size[0]), math.ceil(shape[-1] / size[1]))
        self._require_shape(pieces["weight_scale_inv"], scales, grid)
        return _Group(pieces, converter, shape, None if dtype == "int8" else (size[0], size[1]))

    def _compressed(self, name: str, pieces: dict[str, str], converter: WeightConverter) -> _Group:
        from compressed_tensors.compressors import BaseCompressor
        from transformers.integrations.compressed_tensors import CompressedTensorsDequantize

        config = self._quantizer.compressor.quantization_config
        scheme = _scheme(config, name.removesuffix(".weight"))
        try:
            compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
            wanted = [each for each in compressor.compression_param_names(scheme) if each.startswith("weight")]
        except (KeyError, NotImplementedError):
            why = f"has the format {scheme.format or config.format}, which compressed-tensors does not read"
            raise self._wrong(next(iter(pieces.values())), why) from None
        stem = name.removesuffix("weight")
        if f"{stem}weight_g_idx" in self._stored:
            raise self._wrong(f"{stem}weight_g_idx", "orders columns by activation, which transformers does not undo")
        self._require(name, pieces, wanted)
        if "weight_shape" in pieces:
            self._require_shape(pieces["weight_shape"], self._shape(pieces["weight_shape"]), (2,))
            shape = tuple(map(int, self._pieces.read(pieces["weight_shape"]).tolist()))
        elif "weight_packed" in pieces:
            packed = self._shape(pieces["weight_packed"])
            shape = (*packed[:-1], 2 * packed[-1])
        else:
            shape = self._shape(pieces["weight"])
        if len(shape) != 2:
            raise self._wrong(next(iter(pieces.values())), f"is of a tensor of shape {list(shape)}, not of a matrix")
        if "weight_shape" in pieces:
            words = (shape[0], math.ceil(shape[1] * scheme.weights.num_bits / 32))
            self._require_shape(pieces["weight_packed"], self._shape(pieces["weight_packed"]), words)
        scales = _scales(scheme.weights, shape)
        if scales is not None:
            self._require_shape(pieces["weight_scale"], self._shape(pieces["weight_scale"]), scales)
        operation = CompressedTensorsDequantize(self._quantizer, scheme)
        return _Group(pieces, converter.copy([*pieces], ["weight"], operations=[operation]), shape, None)

    def _shape(self, stored: str) -> tuple[int, ...]:
        return self._stored[stored][1]

    def _require(self, name: str, pieces: Mapping[str, str], wanted: Sequence[str]) -> None:
        """UserError for a piece that is missing."""
        stem, present = name.rpartition(".")[0], next(iter(pieces.values()))
        for piece in wanted:
            if piece not in pieces:
                raise UserError(
                    f"{self._pieces.file(present)}: tensor '{stem}.{piece}' is missing, without which '{present}' "
                    f"cannot be dequantised ({self._format}); copy or download the checkpoint again"
                )

    def _require_shape(self, stored: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise self._wrong(stored, f"has shape {list(shape)}, but {FIELD} and the weight imply {list(expected)}")

    def _wrong(self, stored: str, why: str) -> UserError:
        return UserError(
            f"{self._pieces.file(stored)}: tensor '{stored}' {why}; the weights and {FIELD} of config.json do not match"
        )


def _scheme(config: Any, module: str) -> Any:
    """How compressed-tensors stores a module's weight: by a pattern that its name fits, else as transformers has it."""
    from transformers.integrations.compressed_tensors import get_dense_scheme, get_experts_scheme

    for group in config.config_groups.values():
        if any(target.startswith("re:") and re.match(target[3:], module) for target in group.targets):
            return group
    choose: Callable[[Any], Any] = get_experts_scheme if ".experts." in module else get_dense_scheme
    return choose(config)


def _scales(how: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the scales of a matrix that compressed-tensors quantised; None where it may be one of several."""
    rows, columns = shape
    if how.strategy == "channel":
        return (rows, 1)
    if how.strategy in ("group", "tensor_group"):
        return (rows, math.ceil(columns / how.group_size))
    if how.strategy == "block":
        return (math.ceil(rows / how.block_structure[0]), math.ceil(columns / how.block_structure[1]))
    return None
