"""Llama-3.3-70B with every parameter trained on one GH200: 988 GB of state on GPU, RAM and NVMe.

GPU    96 GB
RAM    480 GB
NVMe   2.2 TB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/Llama-3.3-70B-Instruct (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Gradients are summed in float32 and wait for the optimizer in bfloat16, which saves 141 GB of RAM.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, llama3, run_recipe

recipe = Recipe(
    name="70b-gh200",
    machine="gh200-480",
    model=llama3("3.3-70B-Instruct"),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=32, lr=5e-6, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
