"""gpt-oss-120b, a mixture of 128 experts of which a token takes four: all 117B parameters trained on one GH200.

GPU    96 GB
RAM    480 GB
NVMe   3.8 TB: 2 or 3 generations of the state, and the export; two drives: --set 'storage.nvme=["/mnt/a", "/mnt/b"]'
Model  models/gpt-oss-120b (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

The published weights are quantised (MXFP4): they are dequantised as they are read, and exported in bfloat16. Gradients
are summed in float32 and wait for the optimizer in bfloat16, which saves 234 GB of RAM.

What bounds it is writing the state to NVMe: every expert is updated in every step, 1.4 TB for 5B parameters' worth of
computing a token. It is written while the next step runs forward, as clipping waits for the last gradient, so that it
matters less the longer a step is. Planned here, tokens/s by sequences a step: 64 2,352, 128 3,722, 256 5,063,
512 6,066. Gradients that wait in float32 cost 6 % of it and write 0.4 TB more a step. Drives that are faster help in
proportion, as long as writing bounds it; so does RAM: weights and gradients alone want 468 GB.
"""

from penstock import AfterConfig, DataConfig, Recipe, StorageConfig, TrainConfig, gpt_oss_120b, run_recipe

recipe = Recipe(
    name="120b-moe",
    machine="gh200-480",
    model=gpt_oss_120b(),
    data=DataConfig(sequence_length=8192),
    train=TrainConfig(steps=200, global_batch_size=128, lr=1e-5, warmup_steps=10, gradient_dtype="bfloat16"),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
