"""Forty architectures of transformers, each with the verdict that the self-check must come to. The table of all types
is docs/results/architectures.md."""

import pytest

from penstock.engine.model.types import default_config
from penstock.engine.self_check import TOLERANCE, check_model

CHUNKS = [
    "apertus", "bamba", "cohere", "deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gemma2", "gemma3_text",
    "glm4_moe", "gpt_neox", "gpt_oss", "granitemoe", "granitemoehybrid", "hunyuan_v1_dense", "lfm2", "llama",
    "llama4_text", "mamba2", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm",
]  # fmt: skip
DOCUMENTS = ["jamba", "mamba"]
"""Layers that carry a state and do not hand it on: a document is one chunk."""
REFUSED = {
    "deepseek_v32": "makes no attention mask",
    "falcon": "does not go through transformers' attention interface",
}
STREAMED = ("deepseek_v3", "gpt_oss", "llama4_text", "qwen3")
"""Of these everybody's tests pass keys and values through the GPU chunk by chunk, of the others only the long ones."""
CASES = [
    (name, cut, name in STREAMED) for cut, names in (("chunks", CHUNKS), ("documents", DOCUMENTS)) for name in names
]


@pytest.mark.parametrize(("model_type", "cut", "pieces"), [
    *CASES, *(pytest.param(name, cut, not pieces, marks=pytest.mark.long) for name, cut, pieces in CASES),
])  # fmt: skip
def test_it_is_exact(model_type: str, cut: str, pieces: bool) -> None:
    result = check_model(default_config(model_type), pieces=pieces)
    assert result.ok, result.reason
    assert result.cut == cut
    assert result.max_rel_error is not None
    assert result.max_rel_error <= TOLERANCE
    assert result.worst_parameter
    assert result.reason is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_it_is_refused(model_type: str) -> None:
    result = check_model(default_config(model_type))
    assert not result.ok
    assert REFUSED[model_type] in str(result.reason)


def test_they_are_forty() -> None:
    assert len({*CHUNKS, *DOCUMENTS, *REFUSED}) == 40
