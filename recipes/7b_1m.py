"""Qwen2.5-7B with every parameter trained at 1,048,576 tokens of context, on one GH200.

GPU    96 GB
RAM    480 GB; with less, more is written to NVMe
NVMe   240 GB: two or three generations of the state, and the export; more where activations do not fit in RAM
Model  models/Qwen2.5-7B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Qwen2.5 was trained on 32,768 positions; YaRN stretches them thirty-two-fold, to the context and no further.
Attention never crosses a document's end: give documents as long as the context, or data.source=random to try its speed.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, qwen25, run_recipe

recipe = Recipe(
    name="7b-1m",
    machine="gh200-480",
    model=qwen25("7B", yarn_to=1_048_576),
    data=DataConfig(sequence_length=1_048_576),
    train=TrainConfig(steps=200, lr=1e-5, warmup_steps=10),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
