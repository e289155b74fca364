"""A LoRA adapter on Llama-3.3-70B, its layers quantised to NF4, at 4,096 tokens on one GPU of 24 GB.

GPU    24 GB
RAM    64 GB: most of the quantised base stays there; with 128 GB a step takes an eighth less
NVMe   60 GB: the quantised base once, and two or three generations of the adapter's state
Model  models/Llama-3.3-70B-Instruct (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

The layers' matrices are quantised as the run begins, to 4.5 bits a parameter. They are stored and moved so, and
dequantised on the GPU one layer at a time. What comes out is an adapter folder that peft loads.
"""

from dataclasses import replace

from penstock import AdapterConfig, AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, llama3, run_recipe

recipe = Recipe(
    name="70b-qlora-24gb",
    machine="rtx4090-64",
    model=replace(llama3("3.3-70B-Instruct"), frozen_format="nf4"),
    adapter=AdapterConfig(method="lora", rank=16, alpha=32),
    data=DataConfig(sequence_length=4096),
    train=TrainConfig(steps=200, lr=1e-4, warmup_steps=10, weight_decay=0.0),
    storage=StorageConfig(checkpoint_every=10),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
