"""A 0.3M-parameter Qwen3-shaped model learns to find what was said once in 8,192 tokens, in minutes on 2 cores.

GPU    none needed
RAM    1 GB for torch and the run
NVMe   100 MB, any disk
Model  none: random weights, and a tokenizer of 53 words
Use    a first look; `penstock train quickstart` is the same run without the kill -9 of `python recipes/quickstart.py`

Sixteen names, each with a digit, are hidden in a haystack, and asked at its end: engine/data/needles. Documents get
longer as it learns, from 10 tokens, 819 of which share a row, to all 8,192. The budgets are the least with which it
can be trained, so that the model's state really streams: weights, master weights and moments come from disk.
"""

from penstock import AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, run_recipe

recipe = Recipe(
    name="quickstart",
    model=ModelConfig(
        model_type="qwen3",
        num_layers=2,
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=53,
        embedding_std=1.0,
        overrides={"rope_theta": 1e6, "initializer_range": 0.05},
    ),
    data=DataConfig(
        source="needles",
        sequence_length=8192,
        packing="best_fit",
        order="kept",
        validation_documents=20,  # four of each length from 512 to 8,192
    ),
    train=TrainConfig(
        steps=160,
        global_batch_size=1,
        chunk_tokens=1024,
        activation_checkpointing="selective",
        lr=2e-3,
        lr_groups={"*.q_norm.*": 10.0, "*.k_norm.*": 10.0},  # how sharply it looks: more with every doubling of length
        warmup_steps=10,
        lr_schedule="wsd",
        decay_steps=30,
        weight_decay=0.0,
        compute_dtype="auto",
        compile="off",  # which takes longer than the run
        validate_every=160,
        validate_first=True,
        validation_sequences=8,
    ),
    budgets=BudgetConfig(gpu="least", ram="least", nvme="1GiB"),
    storage=StorageConfig(part_bytes="64KiB", checkpoint_every=20, keep_good=None),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__, kill_after=90)
