"""Llama-3.1-8B with every parameter trained at 8,192 tokens of context, for throughput: 524,288 tokens a step.

GPU    80 GB, which does not hold the 112 GB of state
RAM    512 GB
NVMe   250 GB: two or three generations of the state, and the export
Model  models/Llama-3.1-8B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, llama3, run_recipe

recipe = Recipe(
    name="8b-8k",
    machine="h100-pcie-512",
    model=llama3("3.1-8B"),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=500, global_batch_size=64, micro_batch_size=2, lr=1e-5, warmup_steps=20),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
