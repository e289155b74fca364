"""Small model folders whose weights are quantised, written by transformers' own tools."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.auto import AutoHfQuantizer

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
    | dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16)
    | {"q_lora_rank": 32, "num_key_value_heads": 4},
}
Tensors = dict[str, Tensor]


def plain(folder: Path, kind: str, sizes: Mapping[str, int] | None = None) -> Tensors:
    config = AutoConfig.for_model(kind, **{**SHAPE, **TYPES[kind], **(sizes or {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.1)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Tensors, quantisation: dict[str, Any]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder


def is_linear(name: str, tensor: Tensor) -> bool:
    around = ("embed_tokens", "lm_head", "mlp.gate.weight", "router")
    return name.endswith("weight") and tensor.dim() == 2 and not any(part in name for part in around)


def mxfp4(folder: Path, exponent: int = 118) -> Path:
    """As gpt-oss is published: random blocks of four-bit values, and scales of one exponent each, from that on."""
    tensors = plain(folder, "gpt_oss")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(
            exponent, exponent + 10, (experts, rows, columns // 32), dtype=torch.uint8
        )
    assert sum(name.endswith("_scales") for name in tensors) == 4
    return write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def fp8(
    folder: Path,
    kind: str = "qwen3",
    *,
    block: tuple[int, int] | None = (16, 16),
    sizes: Mapping[str, int] | None = None,
    **more: Any,
) -> Path:
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and [*block], **more}
    operation = Fp8Quantize(AutoHfQuantizer.from_config(dict(how), pre_quantized=False))
    tensors = plain(folder, kind, sizes)
    for name in [name for name, tensor in tensors.items() if is_linear(name, tensor)]:
        tensors |= operation.convert({name: tensors.pop(name)})
    assert sum(name.endswith("_scale_inv") for name in tensors) >= 14
    return write(folder, tensors, how)
