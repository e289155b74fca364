"""Llama-3.3-70B with every parameter trained on one GH200: 988 GB of state on GPU, RAM and NVMe.

GPU    96 GB
RAM    480 GB
NVMe   2.2 TB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Llama-3.3-70B-Instruct (Hugging Face folder), or --from-scratch
Use    your own text: --set data.source=jsonl --set data.path=FILE (as it stands, it reads Python's library)

Gradients are summed in float32 and wait for the optimizer in bfloat16, which saves 141 GB of RAM.
"""

from engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

recipe = Recipe(
    name="70b-gh200",
    machine="gh200-480",
    model=ModelConfig(
        path="models/Llama-3.3-70B-Instruct",
        model_type="llama",
        num_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_heads=64,
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
    train=TrainConfig(steps=200, global_batch_size=32, lr=5e-6, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
