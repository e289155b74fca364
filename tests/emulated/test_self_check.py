"""The self-check on the device that trains: kernels of recurrent layers that a package brings run there only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

from penstock.engine.self_check import check_model

CUDA = torch.device("cuda", 0)
CONFIGS = {
    "qwen3_next": CONFIG_MAPPING["qwen3_next"](),
    "falcon_h1": CONFIG_MAPPING["falcon_h1"](),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hybrids_pass(name: str) -> None:
    result = check_model(CONFIGS[name], device=CUDA)
    assert result.ok, result.reason


@pytest.mark.parametrize("wrong", ["initial_state", "output"])
def test_a_kernel_that_is_wrong_on_the_gpu_alone_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the state that it is given, or the gradient of the one that it returns."""
    right: Callable[..., Any] = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def broken(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not query.is_cuda or wrong == "output":
            out, state = right(query, *args, **kwargs)
            return out, state.detach() + 0 * state if query.is_cuda and state is not None else state
        return right(query, *args, **kwargs | {"initial_state": None})

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", broken)
    assert check_model(CONFIGS["qwen3_next"]).ok
    result = check_model(CONFIGS["qwen3_next"], device=CUDA)
    assert not result.ok
    assert result.max_rel_error is not None
    assert result.max_rel_error > 1e-3
