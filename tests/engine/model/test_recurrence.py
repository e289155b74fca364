"""Layers with a recurrent state: what is found of one, how chunks are run, memory, refusals, kernels of packages."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import model_spec, take_apart
from penstock.engine.model.recurrence import document_ranges
from penstock.engine.model.spec import RecurrentState, StateTensor
from penstock.storage.files.errors import UserError

REPOSITORY = Path(__file__).parents[3]
HYBRID = tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID)
PACKAGES = {
    "fla": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"],
    "causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"],
    "mamba_ssm": [
        "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update", "selective_scan_fn",
        "mamba_inner_fn",
    ],
}  # fmt: skip
"""Package -> the functions that transformers takes from it."""
CHECKS = """
from transformers import CONFIG_MAPPING
from penstock.engine.self_check import check_model

for name in ("qwen3_5_text", "mamba2"):
    result = check_model(CONFIG_MAPPING[name]())
    assert result.ok, (name, result.reason)
"""


def test_what_layers_hand_on_is_found_by_running_them() -> None:
    spec = take_apart(CONFIG_MAPPING["qwen3_next"](num_hidden_layers=4))
    recurrent = StateTensor("recurrent", 0, (1, 32, 128, 128), float32=True)
    handed = RecurrentState("past_key_values", (recurrent, StateTensor("conv", 0, (1, 8192, 4), float32=False)))
    assert spec.states == (handed, handed, handed, None)
    assert spec.recurrent
    assert not spec.whole_documents
    assert handed.nbytes(2) == 32 * 128 * 128 * 4 + 8192 * 4 * 2
    conv = take_apart(CONFIG_MAPPING["lfm2"](num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    assert conv.states == (RecurrentState("past_key_values", (StateTensor("conv", 0, (1, 2560, 3), False),)), None)
    alone = take_apart(CONFIG_MAPPING["mamba2"](num_hidden_layers=2))
    assert {state.argument for state in alone.states if state} == {"cache_params"}
    # Mamba's first scan takes no state.
    for name in ("mamba", "jamba"):
        whole = take_apart(CONFIG_MAPPING[name](num_hidden_layers=4))
        assert whole.whole_documents
        assert whole.states == ()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(2, 7))
def test_every_token_is_run_once_with_its_own_document(lengths: list[int], width: int) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    *documents, total = bounds
    of = {token: start for start, end in pairwise(bounds) for token in range(start, end)}
    seen = []
    for start in range(0, total, width):
        for first, end, continues in document_ranges(start, min(total, start + width), documents):
            tokens = list(range(start + first, start + end))
            assert len({of[token] for token in tokens}) == 1
            assert continues == (of[tokens[0]] < tokens[0])
            assert not continues or first == 0
            seen += tokens
    assert seen == list(range(total))


def test_gpu_memory_does_not_grow_with_the_sequence(tmp_path: Path) -> None:
    """But for keys and values of the layers that attend, where those are whole."""
    parts = []
    for index, tokens in enumerate((48, 192)):
        d, t = tiny.data(sequence_length=tokens), tiny.training(chunk_tokens=16, kv_window="whole")
        with tiny.session(tmp_path / str(index), m=HYBRID, d=d, t=t, gpu=tiny.FLOOR) as session:
            assert session.plan.window_chunks == tokens // 16
            parts.append({k: v for k, v in session.plan.tiers["gpu"].parts.items() if k != "K/V window"})
    assert parts[0] == parts[1]


@pytest.mark.parametrize(("model_type", "overrides", "train", "message"), [
    ("falcon_h1", tiny.FALCON, {"kv_window": "streamed"},
     r"train\.kv_window: streamed, but layers of model type 'falcon_h1' attend and carry a recurrent state at once, "
     r"which needs all keys and values on the GPU; set auto or whole"),
    ("qwen3_next", tiny.HYBRID, {"chunk_tokens": 1}, r"train\.chunk_tokens: 1, but layers of model type 'qwen3_next' "),
])  # fmt: skip
def test_what_cannot_be_is_refused(
    model_type: str, overrides: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    model = tiny.model(model_type=model_type, overrides=overrides)
    recipe = tiny.recipe(model=model, train=tiny.training(**train))
    with pytest.raises(UserError, match=message):
        model_spec(model_config(recipe, recipe.model.vocab_size), recipe)


def test_kernels_of_packages_are_for_gpus(tmp_path: Path) -> None:
    """transformers takes them on every device; a model is looked at and checked on the CPU."""
    for package, functions in PACKAGES.items():
        (tmp_path / package).mkdir()
        stub = "def {}(*args, **kwargs):\n    raise RuntimeError('this kernel runs on a GPU')\n"
        (tmp_path / package / "__init__.py").write_text("\n".join(stub.format(name) for name in functions))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(REPOSITORY / "src"), str(tmp_path)))}
    environment |= {"USE_HUB_KERNELS": "0"}
    plain = "from transformers.models.mamba2 import modeling_mamba2 as m; m.causal_conv1d_fn(1, 2)"
    used = subprocess.run([sys.executable, "-c", plain], env=environment, capture_output=True, text=True, check=False)
    assert "this kernel runs on a GPU" in used.stderr
    subprocess.run([sys.executable, "-c", CHECKS], env=environment, check=True)
