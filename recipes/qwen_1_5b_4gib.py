"""A 1.5B-parameter model of Qwen2.5's shape, trained with 4 GiB of memory for its state: the rest is on NVMe.

GPU    none needed
RAM    4 GiB for both tiers, as without a GPU the gpu tier is ordinary memory, and 1 GB for torch
NVMe   50 GB
Model  none: random weights
Use    shows the machinery on random tokens, not a model: of 21 GB of state nearly all streams, each step
"""

from penstock import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, run_recipe

recipe = Recipe(
    name="qwen-1.5b-4gib",
    model=ModelConfig(
        model_type="qwen2",
        num_layers=28,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        vocab_size=151_936,
        tie_embeddings=True,
    ),
    data=DataConfig(source="random", sequence_length=512),
    train=TrainConfig(steps=3, chunk_tokens=512, lr=1e-4, gradient_dtype="bfloat16"),
    budgets=BudgetConfig(gpu="2.5GiB", ram="1.5GiB", nvme="50GB"),
    storage=StorageConfig(checkpoint_every=3),
)

if __name__ == "__main__":
    run_recipe(__file__)
