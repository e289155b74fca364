"""A 1.5B-parameter model of Qwen2.5's shape, trained with 4 GiB of memory for its state: the rest is on NVMe.

Needs 50 GB of disk and no GPU. Both budgets together are 4 GiB, because without a GPU the gpu tier is ordinary memory;
the state is 21 GB, so nearly all of it streams, each step. Random tokens: this shows the machinery, not a model.
"""

from app.recipe import Recipe
from engine.config import BudgetConfig, DataConfig, ModelConfig, StorageConfig, TrainConfig

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
    from app.cli import run_recipe

    run_recipe(__file__)
