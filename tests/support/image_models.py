"""Tiny models that take images, as the families have them, and images for them."""

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

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
ROOM = {"llava": None, "qwen3_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
"""What transformers' model is told by which of a document's tokens are images."""


def config_of(family: str) -> PretrainedConfig:
    fields = dict(FAMILIES[family])
    return CONFIG_MAPPING[family](**(fields | {"text_config": _TEXT | fields["text_config"]}))


def pixels_of(family: str, size: int) -> tuple[dict[str, Tensor], int]:
    """What a processor makes of an image, and the tokens that stand for it."""
    if family == "llava":
        return {"pixel_values": torch.randn(1, 3, 8, 8)}, 16
    grid = torch.tensor([[1, 4, 4 * size]])
    return {"pixel_values": torch.randn(int(grid.prod()), 3 * 2 * 2 * 2), "image_grid_thw": grid}, 4 * size
