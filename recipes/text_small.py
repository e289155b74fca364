"""A 20M-parameter Qwen3-shaped model learns Python from the standard library of the interpreter that runs this.

GPU    none needed
RAM    1 GB for torch and the run
NVMe   2 GB, any disk
Model  none: random weights, and a tokenizer trained on the text
Use    training on real text, small enough for 2 cores: `penstock train text_small`

The budgets are far below what the machine has, so that the model's state really streams: weights come from RAM, master
weights and moments from disk; what the compute tier keeps besides is the plan's choice.
"""

from penstock import AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, run_recipe

recipe = Recipe(
    name="text_small",
    model=ModelConfig(
        model_type="qwen3",
        num_layers=4,
        hidden_size=640,
        intermediate_size=1664,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tie_embeddings=False,
    ),
    data=DataConfig(
        source="python_stdlib",
        max_documents=200,  # of 1,758 in Python 3.11: twice what is read in 84 steps
        tokenizer_vocab_size=4096,
        sequence_length=4096,
        validation_documents=16,
    ),
    train=TrainConfig(
        steps=84,
        global_batch_size=1,
        chunk_tokens=1024,
        lr=1e-3,
        warmup_steps=4,
        lr_schedule="cosine",
        clip_norm=1.0,
        compute_dtype="auto",
        validate_every=28,
        validation_sequences=4,
    ),
    budgets=BudgetConfig(gpu="least", ram="least", nvme="2GiB"),
    storage=StorageConfig(part_bytes="4MiB", checkpoint_every=30),
    after=AfterConfig(export=True, sample_prompt="def read(self, path):\n    ", sample_tokens=60),
)

if __name__ == "__main__":
    run_recipe(__file__)
