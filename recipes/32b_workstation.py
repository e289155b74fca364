"""Qwen2.5-32B with every parameter trained on a workstation with a 24 GB GPU: 459 GB of state, most of it on NVMe.

GPU    24 GB
RAM    128 GB
NVMe   1.1 TB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Qwen2.5-32B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

The step is as long as the drives take to write the state; 131,072 tokens a step keep the GPU busy meanwhile. Gradients
are summed in float32 and wait for the optimizer in bfloat16.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, qwen25, run_recipe

recipe = Recipe(
    name="32b-workstation",
    machine="rtx4090-128",
    model=qwen25("32B"),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=16, lr=1e-5, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
