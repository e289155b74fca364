"""The self-check: what passes, what is refused and how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen3Config, T5Config
from transformers.models.qwen3 import modeling_qwen3

from penstock.engine.attention import chunk as attention
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.spans import Span
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.check import CheckResult, check_model
from penstock.storage.errors import UserError

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
OFTEN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "pad_token_id": 3}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ("phi3", {"max_position_embeddings": 131072, "rope_parameters": LONGROPE}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("qwen3_next", {}),
    ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),  # learned positions
]
RARELY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text")),
    *((name, {}) for name in ("cohere", "mixtral", "qwen2_moe", "qwen3_moe")),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2, "num_hidden_layers": 4}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}),
    ("mixtral", {"sliding_window": 1024}),
    ("llama4_text", {}),  # chunked attention
    ("mamba2", {}),  # no attention
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),  # layers of different widths, badly conditioned
]


@pytest.mark.parametrize(
    "pieces", [pytest.param(False, id="whole", marks=pytest.mark.long), pytest.param(True, id="pieces")]
)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in RARELY)],
    ids=str,
)
def test_models_pass(model_type: str, fields: dict[str, Any], pieces: bool) -> None:
    result = check_model(CONFIG_MAPPING[model_type](**fields), pieces=pieces)
    assert result.ok, result.reason
    assert result.max_rel_error <= 1e-5
    assert result.worst_parameter
    assert result.reason is None


def test_broken_layer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_qwen3.Qwen3MLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        streamed = self.config._attn_implementation == attention.NAME
        if not streamed:
            return original(self, x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).detach())

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", forward)
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.worst_parameter.endswith("mlp.up_proj.weight")
    assert result.max_rel_error > 0.5
    assert result.worst_parameter in result.reason


def test_attention_that_forgets_the_past_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_part_only(start: int, end: int, *others: Any) -> Any:
        return [Span(start, end, start, end, None)]

    monkeypatch.setattr(attention_select, "spans", own_part_only)
    monkeypatch.setattr(attention_select, "_launches", {})  # else what other tests have found
    result = check_model(Qwen3Config())
    assert not result.ok
    assert result.reason is not None


def test_error_while_streaming_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("kernel exploded")

    monkeypatch.setattr(attention, "_chunk_forward", fail)
    result = check_model(Qwen3Config())
    assert result == CheckResult("qwen3", False, None, None, "streaming fails: RuntimeError: kernel exploded")


def test_a_model_that_cannot_be_taken_apart_is_refused_with_the_reason() -> None:
    config = T5Config()
    with pytest.raises(UserError, match="encoder-decoder") as refusal:
        take_apart(config)
    assert check_model(config) == CheckResult("t5", False, None, None, str(refusal.value))
