"""Mistral-Large-2, dense, 123B, with every parameter trained on one GH200: 1.7 TB of state, most of it on NVMe.

GPU    96 GB
RAM    480 GB
NVMe   4.2 TB: state twice, activations, the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Mistral-Large-Instruct-2407 (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Gradients are summed in float32 and wait for the optimizer in bfloat16, which saves 245 GB of RAM.
"""

from penstock import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, run_recipe

recipe = Recipe(
    name="120b-gh200",
    machine="gh200-480",
    model=ModelConfig(
        path="models/Mistral-Large-Instruct-2407",
        model_type="mistral",
        num_layers=88,
        hidden_size=12288,
        intermediate_size=28672,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32_768,
        max_position=131_072,
        overrides={"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=32, lr=5e-6, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
