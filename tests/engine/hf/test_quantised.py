"""Quantised folders: imported as transformers dequantises them, exported plain, refused when spoilt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from quantised_folders import fp8, is_linear, mxfp4, plain, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from penstock.engine.hf import quantised
from penstock.engine.hf.config import read_config
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.hf.weights import CheckpointLayout, export_folder, import_blocks, remarks_on_tensors
from penstock.engine.model.anatomy import take_apart
from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import CheckpointReader

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
UNEVEN = {**INT4, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}


def mxfp8(folder: Path) -> Path:
    folder = fp8(folder, block=(1, 32), quant_method="mxfp8", scale_fmt="ue8m0")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: t.view(torch.uint8) for name, t in tensors.items() if name.endswith("_scale_inv")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def compressed(folder: Path, kind: str, form: str, weights: dict[str, Any]) -> Path:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = plain(folder, kind)
    for name in [name for name, tensor in tensors.items() if is_linear(name, tensor)]:
        weight, stem = tensors.pop(name).float(), name.removesuffix("weight")
        size = weights.get("group_size") or weight.shape[1]
        most = weight.unflatten(1, (-1, size)).abs().amax(dim=2)
        levels = {"int": 2.0 ** (weights["num_bits"] - 1) - 1, "float": 6.0 if weights["num_bits"] == 4 else 448.0}
        pieces = {"weight": weight, "weight_scale": most / levels[weights["type"]]}
        if not weights["symmetric"]:
            pieces["weight_zero_point"] = torch.randint(-3, 4, most.shape).to(torch.int8)
        if form == "nvfp4-pack-quantized":
            pieces["weight_global_scale"] = (448 * 6.0 / weight.abs().max()).reshape(1)
            scales = (pieces["weight_scale"] * pieces["weight_global_scale"]).to(torch.float8_e4m3fn)
            pieces["weight_scale"] = scales.to(torch.bfloat16)
        else:
            pieces = {piece: t if t.dtype == torch.int8 else t.to(torch.bfloat16) for piece, t in pieces.items()}
        tensors |= {stem + piece: tensor for piece, tensor in compressor.compress(pieces, scheme).items()}
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    group = {"targets": ["Linear"], "weights": weights}
    how = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return write(folder, tensors, how | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]})


def int4(folder: Path) -> Path:
    return compressed(folder, "qwen3", "pack-quantized", INT4)


WRITTEN: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "mxfp4": (mxfp4, Mxfp4Config),
    "fp8 of qwen3": (fp8, FineGrainedFP8Config),
    "fp8 of deepseek_v3": (lambda folder: fp8(folder, "deepseek_v3"), FineGrainedFP8Config),
    "fp8 with one scale": (lambda folder: fp8(folder, block=None), FineGrainedFP8Config),
    "mxfp8": (mxfp8, FineGrainedFP8Config),
    "int4": (int4, CompressedTensorsConfig),
    "int4 of experts": (lambda f: compressed(f, "qwen3_moe", "pack-quantized", INT4), CompressedTensorsConfig),
    "int4 with zero points": (lambda f: compressed(f, "qwen3", "pack-quantized", UNEVEN), CompressedTensorsConfig),
    "int8": (lambda f: compressed(f, "qwen3", "int-quantized", INT8), CompressedTensorsConfig),
    "packed int8": (lambda f: compressed(f, "qwen3", "pack-quantized", INT8), CompressedTensorsConfig),
    "fp8 by row": (lambda f: compressed(f, "qwen3", "float-quantized", FP8), CompressedTensorsConfig),
    "nvfp4": (lambda f: compressed(f, "qwen3", "nvfp4-pack-quantized", NVFP4), CompressedTensorsConfig),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_values_are_those_that_transformers_dequantises(tmp_path, name):
    make, config = WRITTEN[name]
    folder = make(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(dequantize=True)).state_dict()
    assert {tensor.dtype for tensor in expected.values()} <= {torch.bfloat16, torch.float32}
    spec, reader = take_apart(read_config(folder)), open_checkpoint(folder)
    layout = CheckpointLayout(spec, reader)
    buffers = dict(import_blocks(layout))
    values = {name: tensor for params in buffers.values() for name, tensor in params.items()}
    values |= layout.read_constants()
    assert values.keys() == expected.keys()
    for key, tensor in values.items():
        assert torch.equal(tensor.float(), expected[key].float()), key
    (said,) = remarks_on_tensors(folder, spec.config)
    assert "dequantised to bfloat16" in said

    for params in buffers.values():  # a step of training, in values that bfloat16 holds
        for key in params:
            params[key] = (params[key] * 2).bfloat16().float()
    options = {"constants": {}, "origin": folder, "tokenizer": {}, "dtype": "bfloat16"}
    remarks = export_folder(tmp_path / "export", spec, buffers.__getitem__, **options)
    assert any("quantization_config left out" in remark for remark in remarks)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values()), info
    loaded = model.state_dict()
    assert all(torch.equal(loaded[k].float(), t) for params in buffers.values() for k, t in params.items())
    before, after = CheckpointReader(folder), CheckpointReader(tmp_path / "export")
    unchanged = [name for name in after.tensors if name.endswith("e_score_correction_bias")]
    assert all(torch.equal(before.read(name), after.read(name)) for name in unchanged)
    assert bool(unchanged) == ("deepseek" in name)


def test_last_blocks_may_stick_out(tmp_path):
    """As in DeepSeek-V3, of whose 576 rows the last 64 are half a block: transformers wants whole blocks."""
    folder = fp8(tmp_path / "model")
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name], scales = tensors[name].clone(), torch.rand(3, 2) + 0.5
    for other in [other for other in tensors if other.endswith("_scale_inv") and not other.startswith(name)]:
        weight = tensors[other.removesuffix("_scale_inv")]
        tensors[other] = torch.ones(-(-weight.shape[0] // 40), -(-weight.shape[1] // 40))
    tensors[f"{name}_scale_inv"] = scales
    write(folder, tensors, {"quant_method": "fp8", "weight_block_size": [40, 40]})
    whole = scales.repeat_interleave(40, 0).repeat_interleave(40, 1)[:96, :64]
    assert torch.equal(open_checkpoint(folder).read(name), (tensors[name].float() * whole).bfloat16())


def test_schemes_are_told_apart_by_the_patterns_of_their_modules(tmp_path):
    """transformers dequantises all that are no experts by the first."""
    folder = int4(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    others = load_file(compressed(tmp_path / "other", "qwen3", "pack-quantized", INT8) / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor for name, tensor in others.items() if "mlp" in name}
    config["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": INT8}
    write(folder, tensors, config)
    reader = open_checkpoint(folder)
    for name, first in ((Q, folder), ("model.layers.1.mlp.up_proj.weight", tmp_path / "other")):
        scheme = QuantizationScheme(targets=["Linear"], weights=INT4 if name == Q else INT8)
        stored, stem = load_file(first / "model.safetensors"), name.removesuffix("weight")
        pieces = {n.removeprefix(stem): t for n, t in stored.items() if n.startswith(f"{stem}weight")}
        made = BaseCompressor.get_value_from_registry("pack-quantized").decompress(pieces, scheme)["weight"]
        assert torch.equal(reader.read(name), made)


def test_what_is_not_trained_is_dequantised_too(tmp_path):
    """A head that predicts several tokens, of a model whose config no longer says that anything is quantised."""
    folder = fp8(tmp_path / "model", "deepseek_v3")
    tensors, extra = load_file(folder / "model.safetensors"), "model.layers.61.eh_proj.weight"
    pieces = ["weight", "weight_scale_inv"]
    tensors |= {
        f"model.layers.61.eh_proj.{piece}": tensors[f"model.layers.1.self_attn.o_proj.{piece}"] for piece in pieces
    }
    tensors["model.layers.61.enorm.weight"] = torch.randn(64)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    spec, reader = take_apart(read_config(folder)), open_checkpoint(folder)
    _, said = remarks_on_tensors(folder, spec.config)
    assert "2 of its tensors are ones that transformers' deepseek_v3 model leaves out (model.layers.61.*)" in said
    buffers = dict(import_blocks(CheckpointLayout(spec, reader)))
    options = {"constants": {}, "origin": folder, "tokenizer": {}, "dtype": "bfloat16"}
    export_folder(tmp_path / "export", spec, buffers.__getitem__, **options)
    exported = CheckpointReader(tmp_path / "export")
    assert exported.tensors.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert torch.equal(exported.read(extra), exported.read("model.layers.1.self_attn.o_proj.weight"))
    assert torch.equal(exported.read("model.layers.61.enorm.weight"), tensors["model.layers.61.enorm.weight"])


Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.gate_up_proj"
SPOILT: dict[str, tuple[Callable[[Path], Path], str, Callable[[Tensor], Tensor | None], str]] = {
    "fp8 without a scale": (fp8, f"{Q}_scale_inv", lambda t: None, f"'{Q}_scale_inv' is missing"),
    "fp8 without a weight": (fp8, Q, lambda t: None, f"'{Q}' is missing"),
    "fp8 scale of another shape": (fp8, f"{Q}_scale_inv", lambda t: t[:2], r"shape \[2, 4\], but .* imply \[4, 4\]"),
    "fp8 weight of another shape": (fp8, Q, lambda t: t[:48], r"shape \[4, 4\], but .* imply \[3, 4\]"),
    "fp8 weight that is none": (fp8, Q, lambda t: t.bfloat16(), "is bfloat16 of shape"),
    "mxfp4 without scales": (mxfp4, f"{EXPERT}_scales", lambda t: None, f"'{EXPERT}_scales' is missing"),
    "mxfp4 without blocks": (mxfp4, f"{EXPERT}_blocks", lambda t: None, f"'{EXPERT}_blocks' is missing"),
    "mxfp4 of another block size": (mxfp4, f"{EXPERT}_blocks", lambda t: t.reshape(4, 192, 4, 8), "must be .* 16"),
    "mxfp4 scales of another shape": (mxfp4, f"{EXPERT}_scales", lambda t: t[:, :9], r"imply \[4, 192, 2\]"),
    "mxfp4 of fewer experts": (mxfp4, f"{EXPERT}_blocks", lambda t: t[:2], r"imply \[2, 192, 2\]"),
    "int4 without a scale": (int4, f"{Q}_scale", lambda t: None, f"'{Q}_scale' is missing"),
    "int4 without a shape": (int4, f"{Q}_shape", lambda t: None, f"'{Q}_shape' is missing"),
    "int4 of another group size": (int4, f"{Q}_scale", lambda t: t[:, :2], r"imply \[64, 4\]"),
    "int4 of another shape": (int4, f"{Q}_shape", lambda t: t // 2, r"imply \[32, 4\]"),
    "int4 of three dimensions": (int4, f"{Q}_shape", lambda t: torch.ones(3), r"imply \[2\]"),
    "int4 in order of activation": (int4, f"{Q}_g_idx", lambda t: torch.zeros(64), "transformers does not undo"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_spoilt_is_refused_with_one_message(tmp_path, name):
    make, tensor, change, message = SPOILT[name]
    folder = make(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(tensor, torch.empty(0)))
    if changed is not None:
        tensors[tensor] = changed.contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("quantisation", "message"), [
    ({"quant_method": "gptq", "bits": 4}, "quantised as gptq .* unquantised checkpoint"),
    ({"quant_method": "awq"}, "quantised as awq .* unquantised checkpoint"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised as bitsandbytes .* unquantised checkpoint"),
    ({"quant_method": ["fp8"]}, "quantised as "),
    ({"bits": 4}, "quantised as unknown"),
], ids=str)  # fmt: skip
def test_what_is_not_dequantised_is_refused_by_the_config(tmp_path, quantisation, message):
    folder = write(tmp_path, plain(tmp_path, "qwen3"), quantisation)
    for read in read_config, open_checkpoint:
        with pytest.raises(UserError, match=message):
            read(folder)


def test_a_config_that_transformers_does_not_read_is_refused(tmp_path):
    folder = fp8(tmp_path)
    for wrong in ({"weight_block_size": [16]}, {"weight_block_size": [0, 16]}, {"activation_scheme": 3}):
        write(folder, load_file(folder / "model.safetensors"), {"quant_method": "fp8", **wrong})
        with pytest.raises(UserError, match="not one that transformers reads"):
            open_checkpoint(folder)


GROUP = {"targets": ["Linear"], "weights": INT4}
WRONG = [{}, {"config_groups": {}}, {"config_groups": {"a": {"targets": 3}}}, {"config_groups": {"a": {"targets": []}}}]
WRONG += [{"config_groups": {"a": GROUP | {"targets": ["re:("]}}}, {"config_groups": {"a": GROUP | {"weights": None}}}]
WRONG += [{"config_groups": {"a": GROUP | {"weights": INT4 | more}}} for more in ({"group_size": 0}, {"num_bits": "x"})]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_groups_that_compressed_tensors_does_not_read_are_refused(tmp_path, wrong):
    folder = int4(tmp_path)
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", **wrong}
    write(folder, load_file(folder / "model.safetensors"), how)
    with pytest.raises(UserError, match=r"not one that transformers reads|do not match") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_format_that_compressed_tensors_does_not_have_is_refused(tmp_path):
    folder = int4(tmp_path)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    write(folder, load_file(folder / "model.safetensors"), config | {"format": "sparse-24-bitmask"})
    with pytest.raises(UserError, match="format sparse-24-bitmask, which compressed-tensors does not read"):
        open_checkpoint(folder)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    folder = int4(tmp_path)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'penstock\[compressed-tensors\]'"):
        read_config(folder)
