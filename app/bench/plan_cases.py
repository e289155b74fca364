"""What `penstock bench plan` predicts and then runs: small recipes that differ in all that a plan decides.

Sizes from 1M to 168M parameters, contexts of 512 to 8,192 tokens, one or several micro-batches, state and weights from
all in GPU memory to all on NVMe, every way of saving activations, a streamed window, tied embeddings, experts, both
dtypes. Steps take about a second on two cores, so that what is measured is work and not dispatch. Two cases compile.

CUDA_CASES are the same decisions at a GPU's sizes, most telling first: budgets below LEAST_LIMIT_BYTES are not enforced
there, and logits, cuBLAS and the allocator take more than CASES give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCase:
    """One recipe that is planned and trained."""

    name: str
    about: str
    """What is particular about it."""
    model: dict[str, Any]
    context: int
    sequences: int = 1
    gpu: str
    ram: str
    train: dict[str, Any]
    """Further fields of train."""

    def recipe(self) -> Recipe:
        """Random tokens, one commit at the end."""
        train: dict[str, Any] = {"compile": "off", "device": "auto", "lr": 1e-4, "lr_schedule": "constant"} | self.train
        return Recipe(
            name=self.name,
            model=ModelConfig(**self.model),
            data=DataConfig(source="random", sequence_length=self.context, max_documents=16),
            train=TrainConfig(steps=STEPS, global_batch_size=self.sequences, **train),
            budgets=BudgetConfig(gpu=self.gpu, ram=self.ram),
            storage=StorageConfig(checkpoint_every=STEPS, part_bytes="8MiB"),
        )


CASES: tuple[PlanCase, ...] = (
    PlanCase(
        name="1m-gpu",
        about="tied, hardly any RAM",
        model=_1M,
        context=1024,
        sequences=16,
        gpu="1GiB",
        ram="32MiB",
        train={"chunk_tokens": 1024},
    ),
    PlanCase(
        name="7m-ram-fp32",
        about="computes in float32",
        model=_7M,
        context=2048,
        sequences=2,
        gpu="80MiB",
        ram="512MiB",
        train={"chunk_tokens": 512, "compute_dtype": "float32", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="7m-nvme",
        about="little RAM, two sequences a micro-batch",
        model=_7M,
        context=1024,
        sequences=4,
        gpu="64MiB",
        ram="80MiB",
        train={"chunk_tokens": 512, "micro_batch_size": 2, "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="29m-ram",
        about="chunk chosen by the plan",
        model=_29M,
        context=1024,
        sequences=2,
        gpu="144MiB",
        ram="1GiB",
        train={"activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="29m-input",
        about="saves inputs only",
        model=_29M,
        context=2048,
        gpu="144MiB",
        ram="1GiB",
        train={"chunk_tokens": 1024, "activation_checkpointing": "full"},
    ),
    PlanCase(
        name="29m-everything",
        about="saves everything",
        model=_29M,
        context=512,
        sequences=2,
        gpu="1GiB",
        ram="256MiB",
        train={"chunk_tokens": 256, "activation_checkpointing": "none"},
    ),
    PlanCase(
        name="29m-nvme-tied",
        about="tied, little RAM, bfloat16 gradients",
        model=_29M | {"tie_embeddings": True},
        context=1024,
        sequences=2,
        gpu="144MiB",
        ram="112MiB",
        train={"chunk_tokens": 1024, "activation_checkpointing": "selective", "gradient_dtype": "bfloat16"},
    ),
    PlanCase(
        name="10m-8k",
        about="long context, whole window",
        model=_10M,
        context=8192,
        gpu="192MiB",
        ram="1GiB",
        train={"chunk_tokens": 1024, "kv_window": "whole", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="16m-4k-streamed",
        about="long context, streamed window, little RAM",
        model=_16M,
        context=4096,
        gpu="112MiB",
        ram="104MiB",
        train={"chunk_tokens": 512, "kv_window": "streamed", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="22m-windowed",
        about="sliding window of 1,024",
        model=_WINDOWED,
        context=4096,
        gpu="192MiB",
        ram="768MiB",
        train={"chunk_tokens": 1024},
    ),
    PlanCase(
        name="moe",
        about="8 experts, 2 a token",
        model=_MOE,
        context=1024,
        sequences=2,
        gpu="144MiB",
        ram="768MiB",
        train={"chunk_tokens": 1024, "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="75m-mixed",
        about="RAM for part of the state",
        model=_75M,
        context=1024,
        gpu="208MiB",
        ram="768MiB",
        train={"chunk_tokens": 1024, "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="168m-ram-compiled",
        about="compiled",
        model=_168M,
        context=512,
        sequences=2,
        gpu="400MiB",
        ram="4GiB",
        train={"chunk_tokens": 1024, "micro_batch_size": 2, "compile": "auto", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="168m-nvme-compiled",
        about="compiled, little RAM, bfloat16 gradients",
        model=_168M,
        context=512,
        sequences=2,
        gpu="400MiB",
        ram="700MiB",
        train={
            "chunk_tokens": 1024,
            "micro_batch_size": 2,
            "compile": "auto",
            "gradient_dtype": "bfloat16",
            "activation_checkpointing": "selective",
        },
    ),
)

CUDA_CASES: tuple[PlanCase, ...] = (
    PlanCase(
        name="268m-tiers",
        about="state in all three tiers",
        model=_268M,
        context=8192,
        sequences=4,
        gpu="5GiB",
        ram="3GiB",
        train={"chunk_tokens": 8192, "compile": "auto"},
    ),
    PlanCase(
        name="268m-ram",
        about="state in RAM, chunk chosen by the plan",
        model=_268M,
        context=8192,
        sequences=4,
        gpu="3GiB",
        ram="8GiB",
        train={"compile": "auto", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="268m-64k-streamed",
        about="long context, streamed window",
        model=_268M,
        context=65536,
        gpu="4160MiB",
        ram="10GiB",
        train={
            "chunk_tokens": 8192,
            "kv_window": "streamed",
            "compile": "auto",
            "activation_checkpointing": "selective",
        },
    ),
    PlanCase(
        name="268m-nvme",
        about="little RAM, bfloat16 gradients",
        model=_268M,
        context=8192,
        sequences=4,
        gpu="3200MiB",
        ram="2GiB",
        train={
            "chunk_tokens": 8192,
            "gradient_dtype": "bfloat16",
            "compile": "auto",
            "activation_checkpointing": "selective",
        },
    ),
    PlanCase(
        name="268m-gpu",
        about="all on the GPU, saves everything",
        model=_268M,
        context=4096,
        sequences=8,
        gpu="24GiB",
        ram="2GiB",
        train={"chunk_tokens": 8192, "micro_batch_size": 2, "compile": "auto", "activation_checkpointing": "none"},
    ),
    PlanCase(
        name="268m-64k",
        about="long context, whole window, inputs only",
        model=_268M,
        context=65536,
        gpu="5GiB",
        ram="10GiB",
        train={"chunk_tokens": 8192, "kv_window": "whole", "compile": "auto", "activation_checkpointing": "full"},
    ),
    PlanCase(
        name="moe",
        about="8 experts, 2 a token",
        model=_197M_MOE,
        context=4096,
        sequences=4,
        gpu="4GiB",
        ram="8GiB",
        train={"chunk_tokens": 4096, "compile": "auto", "activation_checkpointing": "selective"},
    ),
    PlanCase(
        name="218m-windowed",
        about="tied, sliding window of 4,096",
        model=_218M_WINDOWED,
        context=16384,
        sequences=2,
        gpu="4GiB",
        ram="6GiB",
        train={"chunk_tokens": 8192, "compile": "auto"},
    ),
    PlanCase(
        name="268m-fp32",
        about="computes in float32, not compiled",
        model=_268M,
        context=4096,
        sequences=2,
        gpu="4GiB",
        ram="8GiB",
        train={"chunk_tokens": 4096, "compute_dtype": "float32", "activation_checkpointing": "selective"},
    ),
)
