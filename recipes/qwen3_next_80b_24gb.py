"""A LoRA adapter on Qwen3-Next-80B-A3B, three layers in four with a recurrent state, at 65,536 tokens on 24 GB.

GPU    24 GB
RAM    64 GB
NVMe   350 GB: the weights once, as they are streamed, and activations that RAM does not hold
Model  models/Qwen3-Next-80B-A3B-Instruct (Hugging Face folder), or --from-scratch
Use    your own text or conversations: --set data.path=FILE, or a folder of files; it brings none

Every layer has 512 experts, 3.1 GiB of weights, which are read and never written; the adapter is beside the linear
modules outside of them. Documents of any length are cut into chunks, which hand the recurrent state on.
"""

from penstock import AdapterConfig, AfterConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, run_recipe

recipe = Recipe(
    name="qwen3-next-80b-24gb",
    machine="rtx4090-64",
    model=ModelConfig(
        path="models/Qwen3-Next-80B-A3B-Instruct",
        model_type="qwen3_next",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=5120,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        vocab_size=151_936,
        max_position=262_144,
        overrides={
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        },
    ),
    adapter=AdapterConfig(method="lora", rank=16, alpha=32),
    data=DataConfig(sequence_length=65_536, packing="best_fit"),
    train=TrainConfig(steps=200, global_batch_size=4, lr=1e-4, warmup_steps=10, weight_decay=0.0),
    storage=StorageConfig(checkpoint_every=10),
    after=AfterConfig(export=True),
)

if __name__ == "__main__":
    run_recipe(__file__)
