"""What `penstock bench plan` predicts and then runs: small recipes that differ in all that a plan decides.

A step takes about a second on two cores, so that what is measured is work and not dispatch. CUDA_CASES are the same
decisions at a GPU's sizes, most telling first: budgets below LEAST_LIMIT_BYTES are not enforced there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

STEPS = 7
"""The first is not counted, and the last five or more are enough for a median."""


def _model(layers: int, hidden: int, heads: int, head_dim: int, vocab: int = 4096, **more: Any) -> dict[str, Any]:
    shape = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": vocab}
    return shape | {"num_heads": heads, "num_kv_heads": heads // 2, "head_dim": head_dim} | more


_1M = _model(4, 128, 4, 32, tie_embeddings=True)
_7M = _model(6, 256, 8, 32)
_10M = _model(2, 512, 8, 64)
_16M = _model(4, 512, 8, 64)
_29M = _model(8, 512, 8, 64)
_TIED = _29M | {"tie_embeddings": True}
_75M = _model(10, 768, 12, 64)
_168M = _model(12, 1024, 16, 64, vocab=8192)
_MOE = _model(
    4,
    384,
    6,
    64,
    model_type="qwen3_moe",
    overrides={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
_268M = _model(4, 2048, 16, 128, vocab=16384)
_197M_MOE = _model(
    4,
    1024,
    8,
    128,
    vocab=16384,
    model_type="qwen3_moe",
    overrides=_MOE["overrides"] | {"moe_intermediate_size": 1536},
)
_218M_WINDOWED = _model(
    4, 2048, 16, 128, vocab=8192, model_type="mistral", tie_embeddings=True, overrides={"sliding_window": 4096}
)
_WINDOWED = _model(6, 512, 8, 64, model_type="mistral", overrides={"sliding_window": 1024})


class PlanCase(NamedTuple):
    """One recipe that is planned and trained: random tokens, one commit at the end."""

    about: str
    """What is particular about it."""
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.recipe.name


_Sizes = tuple[int, int, int | None, str, str]
"""Context, sequences, tokens of a chunk (None: the plan's choice), GPU and RAM."""


def _case(name: str, about: str, model: dict[str, Any], sizes: _Sizes, **train: Any) -> PlanCase:
    context, sequences, chunk_tokens, gpu, ram = sizes
    usual: dict[str, Any] = {"activation_checkpointing": "selective", "compile": "off"}
    usual |= {"lr": 1e-4, "lr_schedule": "constant"}
    recipe = Recipe(
        name=name,
        model=ModelConfig(**model),
        data=DataConfig(source="random", sequence_length=context, max_documents=16),
        train=TrainConfig(steps=STEPS, global_batch_size=sequences, chunk_tokens=chunk_tokens, **usual | train),
        budgets=BudgetConfig(gpu=gpu, ram=ram),
        # No generation is proved good within the run.
        storage=StorageConfig(checkpoint_every=STEPS, part_bytes="8MiB", keep_good=None),
    )
    return PlanCase(about, recipe)


_compiled = partial(_case, compile="auto")
_AUTO, _FULL, _NONE = ({"activation_checkpointing": way} for way in ("auto", "full", "none"))
_ROUNDED = {"gradient_dtype": "bfloat16"}
_WHOLE, _STREAMED = ({"kv_window": way} for way in ("whole", "streamed"))

# Name, about, model and sizes; further fields of train.
CASES = (
    _case("1m-gpu", "tied, hardly any RAM", _1M, (1024, 16, 1024, "1GiB", "32MiB"), **_AUTO),
    _case("7m-ram-fp32", "computes in float32", _7M, (2048, 2, 512, "80MiB", "512MiB"), compute_dtype="float32"),
    _case(
        "7m-nvme", "little RAM, two sequences a micro-batch", _7M, (1024, 4, 512, "64MiB", "80MiB"), micro_batch_size=2
    ),
    _case("29m-ram", "chunk chosen by the plan", _29M, (1024, 2, None, "144MiB", "1GiB")),
    _case("29m-input", "saves inputs only", _29M, (2048, 1, 1024, "144MiB", "1GiB"), **_FULL),
    _case("29m-everything", "saves everything", _29M, (512, 2, 256, "1GiB", "256MiB"), **_NONE),
    _case(
        "29m-nvme-tied", "tied, little RAM, bfloat16 gradients", _TIED, (1024, 2, 1024, "144MiB", "112MiB"), **_ROUNDED
    ),
    _case("10m-8k", "long context, whole window", _10M, (8192, 1, 1024, "192MiB", "1GiB"), **_WHOLE),
    _case(
        "16m-4k-streamed",
        "long context, streamed window, little RAM",
        _16M,
        (4096, 1, 512, "112MiB", "104MiB"),
        **_STREAMED,
    ),
    _case("22m-windowed", "sliding window of 1,024", _WINDOWED, (4096, 1, 1024, "192MiB", "768MiB"), **_AUTO),
    _case("moe", "8 experts, 2 a token", _MOE, (1024, 2, 1024, "144MiB", "768MiB")),
    _case("75m-mixed", "RAM for part of the state", _75M, (1024, 1, 1024, "208MiB", "768MiB")),
    _case("168m-ram-compiled", "compiled", _168M, (512, 2, 1024, "400MiB", "4GiB"), micro_batch_size=2, compile="auto"),
    _case(
        "168m-nvme-compiled",
        "compiled, little RAM, bfloat16 gradients",
        _168M,
        (512, 2, 1024, "400MiB", "700MiB"),
        micro_batch_size=2,
        **_ROUNDED,
        compile="auto",
    ),
)

CUDA_CASES = (
    _compiled("268m-tiers", "state in all three tiers", _268M, (8192, 4, 8192, "5GiB", "3GiB"), **_AUTO),
    _compiled("268m-ram", "state in RAM, chunk chosen by the plan", _268M, (8192, 4, None, "3GiB", "8GiB")),
    _compiled(
        "268m-64k-streamed", "long context, streamed window", _268M, (65536, 1, 8192, "4160MiB", "10GiB"), **_STREAMED
    ),
    _compiled("268m-nvme", "little RAM, bfloat16 gradients", _268M, (8192, 4, 8192, "3200MiB", "2GiB"), **_ROUNDED),
    _compiled(
        "268m-gpu",
        "all on the GPU, saves everything",
        _268M,
        (4096, 8, 8192, "24GiB", "2GiB"),
        micro_batch_size=2,
        **_NONE,
    ),
    _compiled(
        "268m-64k",
        "long context, whole window, inputs only",
        _268M,
        (65536, 1, 8192, "5GiB", "10GiB"),
        **_WHOLE,
        **_FULL,
    ),
    _compiled("moe", "8 experts, 2 a token", _197M_MOE, (4096, 4, 4096, "4GiB", "8GiB")),
    _compiled(
        "218m-windowed", "tied, sliding window of 4,096", _218M_WINDOWED, (16384, 2, 8192, "4GiB", "6GiB"), **_AUTO
    ),
    _compiled(
        "268m-fp32",
        "computes in float32, not compiled",
        _268M,
        (4096, 2, 4096, "4GiB", "8GiB"),
        compute_dtype="float32",
        compile="off",
    ),
)


def small(case: PlanCase) -> PlanCase:
    """The case with what is particular about it, in seconds on any machine; its figures say nothing."""
    recipe = case.recipe
    model = replace(recipe.model, **_model(2, 128, 4, 32, vocab=1024))
    train = replace(recipe.train, global_batch_size=min(2, recipe.train.global_batch_size))
    if train.chunk_tokens is not None:
        train = replace(train, chunk_tokens=128)
    data, budgets = replace(recipe.data, sequence_length=512), BudgetConfig(gpu="1GiB", ram="512MiB")
    return PlanCase(case.about, replace(recipe, model=model, data=data, train=train, budgets=budgets))
