"""Models that also take images: their text part is trained, the rest of the folder is returned as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, FineGrainedFP8Config, PretrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.auto import AutoHfQuantizer

from penstock.engine.hf.config import read_config
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.hf.weights import CheckpointLayout, export_folder, import_blocks, remarks_on_tensors
from penstock.engine.model.anatomy import take_apart
from penstock.engine.self_check import check_model
from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import CheckpointReader

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP |= {"image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
LINEAR = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": ROPE},
        "vision_config": QWEN | {"fullatt_block_indexes": [1]},
        **IDS,
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": ROPE},
        "vision_config": QWEN | {"deepstack_visual_indexes": [0]},
        **IDS,
    },
    "qwen3_5": {
        "text_config": LINEAR | {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        "vision_config": QWEN,
        **IDS,
    },
    "gemma3": {
        "text_config": {"query_pre_attn_scalar": 8},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **SIGLIP},
        "image_token_index": 90,
    },
    "llava_next": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **SIGLIP},
        "image_token_index": 90,
    },
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": SIGLIP, "image_token_id": 90},
    "idefics3": {"text_config": {"model_type": "llama"}, "vision_config": SIGLIP, "image_token_id": 90},
}


def config_of(family: str) -> PretrainedConfig:
    fields = dict(FAMILIES[family])
    config = CONFIG_MAPPING[family](**(fields | {"text_config": TEXT | fields["text_config"]}))
    config.dtype = torch.bfloat16
    return config


def saved(folder: Path, family: str, original: bool) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(family), dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder, save_original_format=original)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    return folder


@pytest.mark.parametrize("original", [True, False], ids=["as published", "as transformers has it"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_is_trained_and_the_rest_returned(tmp_path, family, original):
    folder = saved(tmp_path / "model", family, original)
    whole = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    config = read_config(folder)
    spec, reader = take_apart(config), open_checkpoint(folder)
    layout = CheckpointLayout(spec, reader)
    buffers = dict(import_blocks(layout))
    values = {name: tensor for params in buffers.values() for name, tensor in params.items()}
    assert not any("vision" in name or "visual" in name for name in values)
    known = {name.replace("model.language_model.", "model."): tensor for name, tensor in whole.items()} | whole
    assert all(torch.equal(tensor, known[name].float()) for name, tensor in values.items())
    (said,) = remarks_on_tensors(folder, config)
    others = len(layout.plan.unused)
    assert others + len(layout.trained) + len(spec.constants) == len(reader.tensors)
    assert f"{others} of its tensors" in said
    assert "vision tower or another part that text does not use" in said

    for params in buffers.values():
        for name in params:
            params[name] = params[name] * 2
    options = {"constants": {}, "origin": folder, "tokenizer": {}, "dtype": "bfloat16"}
    export_folder(tmp_path / "export", spec, buffers.__getitem__, **options)
    before, after = CheckpointReader(folder), CheckpointReader(tmp_path / "export")
    assert before.tensors == after.tensors
    trained = set(layout.trained)
    for name in before.tensors:
        was, now = before.read(name), after.read(name)
        assert torch.equal(now, was * 2 if name in trained else was), name
    for name in ("config.json", "preprocessor_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize(("field", "value"), [("depth", 10**9), ("num_hidden_layers", 10**9), ("depth", "2")])
def test_a_tower_of_no_sane_height_is_refused(tmp_path, field, value):
    fields = {"model_type": "qwen2_5_vl", "vision_config": {field: value}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=f"config.json: {field} is "):
        read_config(tmp_path)


def test_a_quantised_one(tmp_path):
    folder = saved(tmp_path / "model", "qwen3_vl", True)
    how = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": ["model.visual", "lm_head"]}
    quantise = Fp8Quantize(AutoHfQuantizer.from_config(dict(how), pre_quantized=False))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "language_model.layers" in name and "_proj" in name]:
        tensors |= quantise.convert({name: tensors.pop(name)})
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))
    plain = FineGrainedFP8Config(dequantize=True)
    expected = AutoModelForImageTextToText.from_pretrained(folder, quantization_config=plain).state_dict()
    spec = take_apart(read_config(folder))
    buffers = dict(import_blocks(CheckpointLayout(spec, open_checkpoint(folder))))
    assert all(torch.equal(t, expected[n].float()) for params in buffers.values() for n, t in params.items())
    options = {"constants": {}, "origin": folder, "tokenizer": {}, "dtype": "bfloat16"}
    export_folder(tmp_path / "export", spec, buffers.__getitem__, **options)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_its_texts_are_trained_exactly(family):
    result = check_model(config_of(family))
    assert result.ok, result.reason
