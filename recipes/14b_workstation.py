"""Qwen2.5-14B with every parameter trained on a workstation with a 24 GB GPU: 207 GB of state on GPU, RAM and NVMe.

GPU    24 GB
RAM    128 GB
NVMe   500 GB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Qwen2.5-14B (Hugging Face folder), or --from-scratch
Use    your own text: --set data.source=jsonl --set data.path=FILE (as it stands, it reads Python's library)
"""

from engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

recipe = Recipe(
    name="14b-workstation",
    machine="rtx4090-128",
    model=ModelConfig(
        path="models/Qwen2.5-14B",
        model_type="qwen2",
        num_layers=48,
        hidden_size=5120,
        intermediate_size=13824,
        num_heads=40,
        num_kv_heads=8,
        vocab_size=152_064,
        max_position=131_072,
        overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    data=DataConfig(source="python_stdlib", sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=16, lr=1e-5, warmup_steps=10),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
