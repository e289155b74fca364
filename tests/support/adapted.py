"""Small models with adapters, as plain peft has them."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock.engine.config import AdapterConfig
from penstock.engine.hf.config import make_config

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
SIZES |= {"tie_word_embeddings": False, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 24},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
METHODS = ("lora", "dora", "rslora")


def config(model_type: str) -> PretrainedConfig:
    """Two layers of a few thousand parameters."""
    return make_config({"model_type": model_type, **SIZES, **SHAPES[model_type]}, "test")


def section(method: str, **changes: Any) -> AdapterConfig:
    return AdapterConfig(**({"method": method, "rank": 4, "alpha": 6.0} | changes))


def base(shape: PretrainedConfig, seed: int = 3) -> PreTrainedModel:
    """The model in float32 with weights larger than the initialiser's, so that all of it matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


def peft_config(adapter: AdapterConfig, targets: list[str] | str, **more: Any) -> LoraConfig:
    """What a user of peft writes for the same adapter."""
    kind = {"use_dora": adapter.method == "dora", "use_rslora": adapter.method == "rslora", "lora_dropout": 0.0}
    sizes = {"r": adapter.rank, "lora_alpha": adapter.alpha}
    return LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **sizes, **kind, **more)


def adapted(model: PreTrainedModel, by: LoraConfig, seed: int = 5) -> PeftModel:
    """`model` with an adapter by plain peft, none of its values zero."""
    torch.manual_seed(seed)
    found = get_peft_model(model, by)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return found.eval()


def by_our_names(model: PeftModel) -> dict[str, Tensor]:
    """Parameters by the names that they have without peft's own model around."""
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
