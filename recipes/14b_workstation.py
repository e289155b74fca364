"""Qwen2.5-14B with every parameter trained on a workstation with a 24 GB GPU: 207 GB of state on GPU, RAM and NVMe.

GPU    24 GB
RAM    128 GB
NVMe   500 GB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Qwen2.5-14B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, qwen25, run_recipe

recipe = Recipe(
    name="14b-workstation",
    machine="rtx4090-128",
    model=qwen25("14B"),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=16, lr=1e-5, warmup_steps=10),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
