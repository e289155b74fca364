"""Qwen2.5-32B with every parameter trained on a workstation with a 24 GB GPU: 459 GB of state, most of it on NVMe.

GPU    24 GB
RAM    128 GB
NVMe   1.1 TB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Qwen2.5-32B (Hugging Face folder), or --from-scratch
Use    your own text: --set data.source=jsonl --set data.path=FILE (as it stands, it reads Python's library)

The step is as long as the drives take to write the state; 131,072 tokens a step keep the GPU busy meanwhile. Gradients
are summed in float32 and wait for the optimizer in bfloat16.
"""

from engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

recipe = Recipe(
    name="32b-workstation",
    machine="rtx4090-128",
    model=ModelConfig(
        path="models/Qwen2.5-32B",
        model_type="qwen2",
        num_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_heads=40,
        num_kv_heads=8,
        vocab_size=152_064,
        max_position=131_072,
        overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    data=DataConfig(source="python_stdlib", sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=16, lr=1e-5, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
