"""Qwen2.5-7B with every parameter trained at 524,288 tokens of context, on one GPU of 24 GB.

GPU    24 GB
RAM    64 GB
NVMe   500 GB: two generations of the state, activations that RAM does not hold, and the export
Model  models/Qwen2.5-7B (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Qwen2.5 was trained on 32,768 positions; YaRN stretches them sixteenfold, to the context and no further. Gradients are
summed in float32 and wait for the optimizer in bfloat16, which saves 15 GB.
Attention never crosses a document's end: give documents as long as the context, or data.source=random to try its speed.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, qwen25, run_recipe

recipe = Recipe(
    name="7b-512k-24gb",
    machine="rtx4090-64",
    model=qwen25("7B", yarn_to=524_288),
    data=DataConfig(sequence_length=524_288),
    train=TrainConfig(steps=200, lr=1e-5, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
