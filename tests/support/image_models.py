"""Tiny models that take images, as the families have them, and images for them."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE = 90
"""The token that stands for a part of an image."""
_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256}
_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP |= {"image_size": 8, "patch_size": 2}
_QWEN = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
_QWEN |= {"patch_size": 2, "num_position_embeddings": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_IDS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
FAMILIES = {
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **_SIGLIP},
        "image_token_index": IMAGE,
    },
    "gemma3": {
        "text_config": {
            "query_pre_attn_scalar": 8,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": _ROPE, "tie_word_embeddings": True},
        "vision_config": _QWEN | {"deepstack_visual_indexes": [0, 1]},
        **_IDS,
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _ROPE},
        "vision_config": _QWEN | {"fullatt_block_indexes": [1], "window_size": 8},
        **_IDS,
    },
}
_LINEAR = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
_LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
FAMILIES |= {
    "qwen2_vl": {
        "text_config": {"rope_parameters": _ROPE},
        "vision_config": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 2},
        **_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            "rope_parameters": _ROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "vision_config": _QWEN | {"deepstack_visual_indexes": [0, 1]},
        **_IDS,
    },
    "qwen3_5": {
        "text_config": _LINEAR
        | {
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        "vision_config": _QWEN,
        **_IDS,
    },
    "idefics3": {
        "text_config": {"model_type": "llama"},
        "vision_config": _SIGLIP,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama"},
        "vision_config": _SIGLIP,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
}
ROOM = {"llava": None, "idefics3": None, "smolvlm": None, "gemma3": "token_type_ids"}
"""What transformers' model is told by which of a document's tokens are images."""


def config_of(family: str) -> PretrainedConfig:
    fields = dict(FAMILIES[family])
    return CONFIG_MAPPING[family](**(fields | {"text_config": _TEXT | fields["text_config"]}))


def pixels_of(family: str, size: int) -> tuple[dict[str, Tensor], int]:
    """What a processor makes of an image, and the tokens that stand for it."""
    if family in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.randn(1, 1, 3, 8, 8), "pixel_attention_mask": torch.ones(1, 1, 8, 8).bool()}, 4
    if family in ("llava", "gemma3"):
        return {"pixel_values": torch.randn(1, 3, 8, 8)}, 16 if family == "llava" else 4
    grid = torch.tensor([[1, 4, 4 * size]])
    return {"pixel_values": torch.randn(int(grid.prod()), 3 * 2 * 2 * 2), "image_grid_thw": grid}, 4 * size


_PLACE = {"llava": "<image>", "gemma3": "<start_of_image>", "qwen3_vl": "<|image_pad|>", "idefics3": "<image>"}
"""What a template writes for an image."""
_SOFT = "<image_soft_token>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
_TILES = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_TILES += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|>PLACE<|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"red": (220, 30, 20), "blue": (20, 40, 230)}


def make_image_model(folder: Path, family: str) -> Path:
    """A tiny model of a family with random weights, its tokenizer, its template and its processor of images."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*_SPECIAL, _PLACE[family], _SOFT, *_TILES],
        initial_alphabet=letters,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"What colour is it? It is {colour}." for colour in COLOURS], trainer)
    make: Any = PreTrainedTokenizerFast
    own_tokens = {"image_token": _SOFT, "boi_token": _PLACE[family], "eoi_token": "<|vision_end|>"}
    more = {"extra_special_tokens": own_tokens} if family == "gemma3" else {}
    fast = make(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **more)
    fast.chat_template = _TEMPLATE.replace("PLACE", _PLACE[family])
    fast.save_pretrained(folder)
    config = config_of(family)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, fast.convert_tokens_to_ids(_SOFT if family == "gemma3" else _PLACE[family]))
    config.text_config.vocab_size = len(fast)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    if family == "llava":
        sizes: dict[str, Any] = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
        CLIPImageProcessorPil(**sizes).save_pretrained(folder)
        own = {"patch_size": 2, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    elif family == "gemma3":
        sizes = {"size": {"height": 8, "width": 8}}
        Gemma3ImageProcessorPil(**sizes).save_pretrained(folder)
        own = {"image_seq_length": 4}
    elif family == "idefics3":
        sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}}
        Idefics3ImageProcessorPil(**sizes).save_pretrained(folder)
        own = {"image_seq_len": 4}
    else:
        sizes = {"size": {"shortest_edge": 16, "longest_edge": 256}, "patch_size": 2}
        Qwen2VLImageProcessorPil(**sizes).save_pretrained(folder)
        own = {}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "", **own}))
    return folder


def write_image(path: Path, colour: str, size: tuple[int, int] = (8, 8)) -> Path:
    Image.new("RGB", size, COLOURS[colour]).save(path)
    return path
