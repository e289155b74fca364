"""Qwen2.5-32B with every parameter trained at 524,288 tokens of context, on one H200 in a machine with 1.5 TB of RAM.

GPU    141 GB
RAM    1.5 TB
NVMe   1 TB: two or three generations of the state, and the export
Model  models/Qwen2.5-32B (Hugging Face folder), or --from-scratch
Use    your own text: --set data.source=jsonl --set data.path=FILE (as it stands, it reads Python's library)

Qwen2.5 was trained on 32,768 positions; YaRN stretches them sixteenfold, to the context and no further.
Attention never crosses a document's end: give documents as long as the context, or data.source=random to try its speed.
"""

from engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig

recipe = Recipe(
    name="32b-512k",
    machine="h200-1500",
    model=ModelConfig(
        path="models/Qwen2.5-32B",
        model_type="qwen2",
        num_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_heads=40,
        num_kv_heads=8,
        vocab_size=152_064,
        overrides={
            "max_position_embeddings": 524_288,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 32_768,
                "rope_theta": 1e6,
            },
        },
    ),
    data=DataConfig(source="python_stdlib", sequence_length=524_288),
    train=TrainConfig(steps=200, lr=1e-5, warmup_steps=10),
    storage=StorageConfig(checkpoint_every=25),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    from app.cli import run_recipe

    run_recipe(__file__)
