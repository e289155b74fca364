"""gpt-oss-120b, a mixture of 128 experts: all 117B parameters trained with one GPU of 24 GB.

GPU    24 GB
RAM    128 GB
NVMe   5 TB on two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'; 3.6 TB with storage.keep_good=none
Model  models/gpt-oss-120b (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

A layer is 6 GiB in bfloat16, and its gradient 12 GiB. Its experts are blocks of their own, here in four groups, which
the plan chooses: each computes the tokens that the router sent to it. What bounds a step is writing the state. For an
adapter on the base in NF4 add --set adapter.method=lora --set model.frozen_format=nf4 --set train.global_batch_size=8:
that takes 64 GB of RAM and 70 GB of NVMe.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, gpt_oss_120b, run_recipe

recipe = Recipe(
    name="120b-moe-24gb",
    machine="rtx4090-128",
    model=gpt_oss_120b(),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(
        steps=200, global_batch_size=128, lr=1e-5, warmup_steps=10, gradient_dtype="bfloat16", split_layers="experts"
    ),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
