"""A LoRA adapter on Llama-3.3-70B, its weights in bfloat16 and not quantised, at 65,536 tokens on one GPU of 24 GB.

GPU    24 GB
RAM    64 GB; with 128 GB a step takes an eighth less
NVMe   250 GB: the weights once, as they are streamed, and activations that RAM does not hold
Model  models/Llama-3.3-70B-Instruct (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Of the base there are weights only, 2 bytes a parameter, read and never written; the adapter beside the linear modules
of every layer has master weights and moments in float32. What comes out is an adapter folder that peft loads.
"""

from penstock import AdapterConfig, AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, llama3, run_recipe

recipe = Recipe(
    name="70b-lora-24gb",
    machine="rtx4090-64",
    model=llama3("3.3-70B-Instruct"),
    adapter=AdapterConfig(method="lora", rank=16, alpha=32),
    data=DataConfig(sequence_length=65_536),
    train=TrainConfig(steps=200, lr=1e-4, warmup_steps=10, weight_decay=0.0),
    storage=StorageConfig(checkpoint_every=10),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
