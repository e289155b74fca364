"""Llama-3.1-8B with every parameter trained at 8,192 tokens of context, for throughput: 524,288 tokens a step.

GPU    80 GB, which does not hold the 112 GB of state
RAM    512 GB
NVMe   250 GB: two or three generations of the state, and the export
Model  models/Llama-3.1-8B (Hugging Face folder), or --from-scratch
Use    your own text: --set data.source=jsonl --set data.path=FILE (as it stands, it reads Python's library)
"""

from engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

recipe = Recipe(
    name="8b-8k",
    machine="h100-pcie-512",
    model=ModelConfig(
        path="models/Llama-3.1-8B",
        model_type="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_position=131_072,
        overrides={
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_theta": 5e5,
            }
        },
    ),
    data=DataConfig(source="python_stdlib", sequence_length=8192),
    train=TrainConfig(steps=500, global_batch_size=64, lr=1e-5, warmup_steps=20),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
