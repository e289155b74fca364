"""Qwen2.5-32B with every parameter trained at 524,288 tokens of context, on one H200 in a machine with 1.5 TB of RAM.

GPU    141 GB
RAM    1.5 TB
NVMe   1 TB: two or three generations of the state, and the export
Model  models/Qwen2.5-32B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Qwen2.5 was trained on 32,768 positions; YaRN stretches them sixteenfold, to the context and no further.
Attention never crosses a document's end: give documents as long as the context, or data.source=random to try its speed.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, qwen25, run_recipe

recipe = Recipe(
    name="32b-512k",
    machine="h200-1500",
    model=qwen25("32B", yarn_to=524_288),
    data=DataConfig(sequence_length=524_288),
    train=TrainConfig(steps=200, lr=1e-5, warmup_steps=10),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
