"""What other trainers call the fields of a recipe: transformers, TRL, axolotl, torchtune, nanoGPT."""

from __future__ import annotations

from typing import NamedTuple


class Synonym(NamedTuple):
    """The field that is nearest to what was typed."""

    key: str
    """Dotted name; empty where there is none."""
    note: str = ""
    """What is different about it."""


_ROWS = Synonym("train.micro_batch_size", "counts sequences; train.global_batch_size those of a whole step")
_GLOBAL = Synonym("train.global_batch_size", "sequences of an optimizer step, all micro-batches together")
_EPOCHS = Synonym("train.steps", "counts optimizer steps, not epochs: documents x epochs / sequences a step")
_ACCUMULATION = Synonym(
    "train.global_batch_size", "what accumulates to one step: train.micro_batch_size times the accumulation steps"
)
_CONTEXT = Synonym("data.sequence_length")
_WARMUP_SHARE = Synonym("train.warmup_steps", "counts steps: the ratio times train.steps")
_SAVE_EVERY = Synonym("storage.checkpoint_every")
_MODEL = Synonym("model.path", "a local folder; nothing is downloaded")
_DATA = Synonym("data.path", "data.source says whether it is text or jsonl")
_RECOMPUTE = Synonym("train.activation_checkpointing", "full, selective, none or auto, not true or false")
_DTYPE = Synonym("train.compute_dtype", "bfloat16, float32 or auto; master weights are float32 in any case")
_NO_ADAPTERS = Synonym("", "every parameter is trained; there are no adapters and no quantised weights")
_NO_CLUSTER = Synonym("", "a run uses one GPU of one machine")

SYNONYMS: dict[str, Synonym] = {
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr", "peak_lr"), Synonym("train.lr")),
    **dict.fromkeys(("min_lr", "min_learning_rate"), Synonym("train.min_lr_ratio", "a share of train.lr, 0 to 1")),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), Synonym("train.lr_schedule")),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "max_iters", "train_iters"), Synonym("train.steps")),
    **dict.fromkeys(("batch_size", "train_batch_size"), _GLOBAL),
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size", "device_batch_size"), _ROWS),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches"), _ACCUMULATION
    ),
    **dict.fromkeys(
        ("context_length", "context_size", "block_size", "seq_len", "seq_length", "sequence_len"), _CONTEXT
    ),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len"), _CONTEXT),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio"), _WARMUP_SHARE),
    **dict.fromkeys(("num_warmup_steps", "lr_warmup_steps", "warmup_iters"), Synonym("train.warmup_steps")),
    **dict.fromkeys(("wd",), Synonym("train.weight_decay")),
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "gradient_clipping", "gradient_clip_val"), Synonym("train.clip_norm")
    ),
    **dict.fromkeys(("adam_beta1",), Synonym("train.beta1")),
    **dict.fromkeys(("adam_beta2",), Synonym("train.beta2")),
    **dict.fromkeys(("adam_epsilon", "epsilon", "adam_eps"), Synonym("train.eps")),
    **dict.fromkeys(("optim", "optimizer_name"), Synonym("train.optimizer")),
    **dict.fromkeys(("gradient_checkpointing", "use_gradient_checkpointing"), _RECOMPUTE),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "precision", "mixed_precision"), _DTYPE),
    **dict.fromkeys(("torch_compile", "compile_model"), Synonym("train.compile")),
    **dict.fromkeys(("random_seed", "data_seed"), Synonym("train.seed", "data.seed orders the documents")),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), Synonym("train.validate_every")),
    **dict.fromkeys(
        ("val_set_size", "validation_split", "eval_split", "test_size"),
        Synonym("data.validation_documents", "a number of documents, not a share"),
    ),
    **dict.fromkeys(("save_steps", "save_interval", "save_every", "checkpoint_interval"), _SAVE_EVERY),
    **dict.fromkeys(("save_total_limit",), Synonym("storage.keep_last")),
    **dict.fromkeys(("output_dir", "out_dir"), Synonym("", "--run-dir names the directory of the run")),
    **dict.fromkeys(("run_name",), Synonym("name")),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path"), _MODEL),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file", "dataset_path", "data_path"), _DATA),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"), Synonym("data.tokenizer")),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), Synonym("model.num_layers")),
    **dict.fromkeys(("n_embd", "d_model", "dim"), Synonym("model.hidden_size")),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), Synonym("model.num_heads")),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), Synonym("model.num_kv_heads")),
    **dict.fromkeys(("ffn_dim", "d_ff"), Synonym("model.intermediate_size")),
    **dict.fromkeys(("max_position_embeddings",), Synonym("model.max_position")),
    **dict.fromkeys(("tie_word_embeddings",), Synonym("model.tie_embeddings")),
    **dict.fromkeys(("offload_folder", "nvme_path", "offload_dir"), Synonym("storage.nvme")),
    **dict.fromkeys(("lora_r", "lora_rank", "lora_alpha", "use_lora", "load_in_4bit", "load_in_8bit"), _NO_ADAPTERS),
    **dict.fromkeys(("deepspeed", "fsdp", "world_size", "num_gpus", "tensor_parallel_size"), _NO_CLUSTER),
}
"""The last part of a name that somebody types, in lower case with `_` -> what it is here."""


def hint(key: str) -> str | None:
    """What to say of a name that another trainer has for a field; None for all other names."""
    found = SYNONYMS.get(key.rpartition(".")[2].strip().lower().replace("-", "_"))
    if found is None:
        return None
    if not found.key:
        return found.note
    return f"did you mean '{found.key}'?" + (f" ({found.note})" if found.note else "")
