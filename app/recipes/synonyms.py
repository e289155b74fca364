"""What other trainers call the fields of a recipe: transformers, TRL, axolotl, LLaMA-Factory, torchtune,
Megatron, nanoGPT."""

from __future__ import annotations

from typing import NamedTuple


class Synonym(NamedTuple):
    """The field that is nearest to what was typed."""

    key: str
    """Dotted name; empty where there is none."""
    note: str = ""
    """What is different about it."""


_ROWS = Synonym(
    "train.micro_batch_size", "sequences processed together; train.global_batch_size counts those of a whole step"
)
_GLOBAL = Synonym("train.global_batch_size", "sequences of an optimizer step, all micro-batches together")
_EPOCHS = Synonym("train.steps", "counts optimizer steps, not epochs: documents x epochs / sequences a step")
_ACCUMULATION = Synonym("train.global_batch_size", "train.micro_batch_size times the accumulation steps")
_CONTEXT = Synonym("data.sequence_length")
_WARMUP_SHARE = Synonym("train.warmup_steps", "counts steps: the ratio times train.steps")
_SAVE_EVERY = Synonym("storage.checkpoint_every")
_MODEL = Synonym("model.path", "a folder, or hf://OWNER/NAME")
_DATA = Synonym("data.path", "a file, a folder or hf://OWNER/NAME; data.source sets the format")
_RECOMPUTE = Synonym("train.activation_checkpointing", "full, selective, none or auto, not true or false")
_DTYPE = Synonym("train.compute_dtype", "bfloat16, float32 or auto; master weights are float32 in any case")
_SCHEDULE = Synonym("train.lr_schedule", "cosine, linear, constant or wsd (warmup_stable_decay)")
_DECAY = Synonym("train.decay_steps", "steps at the end of train.lr_schedule=wsd; before them the rate is constant")
_GROUPS = Synonym("train.lr_groups", 'factors on train.lr by pattern, such as {"*embed_tokens*": 0.1}')
_FROZEN = Synonym("train.freeze", 'patterns of parameter names, such as ["*embed_tokens*"]')
_PATIENCE = Synonym("train.early_stopping_patience", "counts validations, not steps")
_RANK = Synonym("adapter.rank")
_ADAPTER = Synonym("adapter.method", "lora, dora, rslora or none")
_TARGETS = Synonym("adapter.targets", 'ends of module names, such as ["q_proj", "v_proj"], or all-linear')
_TRACKERS = Synonym("trackers", 'a list, such as ["wandb"]')
_TRAINED = Synonym("data.trained_tokens", "assistant, last or all")
_PACKING = Synonym("data.packing", "wrap, best_fit or none; attention never crosses a document's end")
_TEMPLATE = Synonym("data.chat_template", "a Jinja file; none uses the tokenizer's own template")
_ORDER = Synonym("data.order", "shuffled or kept; data.seed sets the shuffling")
_MIXTURE = Synonym("data.mixture", 'a list of objects, such as {"path": "more.jsonl", "weight": 0.5}')
_COLUMNS = Synonym("data.columns", 'your column names by those of the format, such as {"messages": "chat"}')
_LONG = Synonym("data.long_documents", "split, cut or drop")
_PUSH = Synonym("after.push", "OWNER/NAME; none uploads nothing")
_NO_LENGTHS = Synonym("", "padding costs nothing, so rows are not sorted by length; data.packing fills them")
_NO_NEFTUNE = Synonym("", "NEFTune is not supported: no noise is added to embeddings")
_QUANTISED = Synonym("model.frozen_format", "nf4 or int8, of what is frozen beside an adapter")
_NO_CLUSTER = Synonym("", "a run uses one GPU of one machine; `penstock cluster` uses several")

SYNONYMS: dict[str, Synonym] = {
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr", "peak_lr"), Synonym("train.lr")),
    **dict.fromkeys(("min_lr", "min_learning_rate"), Synonym("train.min_lr_ratio", "a share of train.lr, 0 to 1")),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_decay_style"), _SCHEDULE),
    **dict.fromkeys(("num_decay_steps", "num_stable_steps", "lr_wsd_decay_iters", "cooldown_steps"), _DECAY),
    **dict.fromkeys(("min_lr_rate", "cosine_min_lr_ratio"), Synonym("train.min_lr_ratio")),
    **dict.fromkeys(("layerwise_lr_decay_rate", "layerwise_lr_decay", "layer_decay"), Synonym("train.layer_lr_decay")),
    **dict.fromkeys(("embedding_learning_rate", "embedding_lr", "embedding_lr_scale", "param_groups"), _GROUPS),
    **dict.fromkeys(("frozen_parameters", "unfrozen_parameters", "freeze_trainable_layers"), _FROZEN),
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef", "moe_aux_loss_coeff"), Synonym("train.router_aux_loss")),
    **dict.fromkeys(("z_loss_weight", "z_loss_coef", "z_loss_multiplier"), Synonym("train.z_loss")),
    **dict.fromkeys(("neftune_noise_alpha", "neftune_alpha", "noise_alpha"), _NO_NEFTUNE),
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
    **dict.fromkeys(("adam_epsilon", "adam_eps"), Synonym("train.eps")),
    **dict.fromkeys(("optim", "optimizer_name"), Synonym("train.optimizer")),
    **dict.fromkeys(("gradient_checkpointing", "use_gradient_checkpointing"), _RECOMPUTE),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "precision", "mixed_precision"), _DTYPE),
    **dict.fromkeys(("torch_compile", "compile_model"), Synonym("train.compile")),
    **dict.fromkeys(("random_seed", "data_seed"), Synonym("train.seed", "data.seed sets the order of the documents")),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), Synonym("train.validate_every")),
    **dict.fromkeys(
        ("val_set_size", "validation_split", "eval_split", "test_size", "val_size"),
        Synonym("data.validation_documents", "a number of documents, not a share"),
    ),
    **dict.fromkeys(("save_steps", "save_interval", "save_every", "checkpoint_interval"), _SAVE_EVERY),
    **dict.fromkeys(("save_total_limit",), Synonym("storage.keep_last")),
    **dict.fromkeys(("output_dir", "out_dir"), Synonym("", "use --run-dir for the run directory")),
    **dict.fromkeys(("run_name",), Synonym("name")),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrained_model_name_or_path"), _MODEL),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file", "dataset_path", "data_path"), _DATA),
    **dict.fromkeys(("dataset_type", "dataset_format", "data_format"), Synonym("data.source")),
    **dict.fromkeys(("dataset_split", "train_split", "train_on_split", "dataset_train_split"), Synonym("data.split")),
    **dict.fromkeys(("interleave_probs", "dataset_mixer", "data_mix"), _MIXTURE),
    **dict.fromkeys(("field_messages", "dataset_text_field", "text_field", "text_column", "column_mapping"), _COLUMNS),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss", "train_on_inputs", "train_on_input"), _TRAINED),
    **dict.fromkeys(("train_on_responses_only", "train_on_prompt", "mask_history", "roles_to_train"), _TRAINED),
    **dict.fromkeys(("sample_packing", "neat_packing", "packing_strategy", "packed", "padding_free"), _PACKING),
    **dict.fromkeys(("chat_template_path", "chat_template_jinja", "template", "prompt_template"), _TEMPLATE),
    **dict.fromkeys(("shuffle", "shuffle_dataset", "disable_shuffling", "train_sampling_strategy"), _ORDER),
    **dict.fromkeys(("group_by_length", "length_column_name"), _NO_LENGTHS),
    **dict.fromkeys(("truncation", "truncation_mode", "truncation_strategy", "excess_length_strategy"), _LONG),
    **dict.fromkeys(("add_bos_token", "add_bos"), Synonym("data.bos", "auto, on or off")),
    **dict.fromkeys(("additional_special_tokens", "new_special_tokens", "add_tokens"), Synonym("model.added_tokens")),
    **dict.fromkeys(("max_shard_size", "export_size"), Synonym("after.export_shard", "a size such as 5GB")),
    **dict.fromkeys(("hub_model_id", "push_to_hub", "push_to_hub_model_id", "export_hub_model_id"), _PUSH),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"), Synonym("data.tokenizer")),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), Synonym("model.num_layers")),
    **dict.fromkeys(("n_embd", "d_model", "dim"), Synonym("model.hidden_size")),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), Synonym("model.num_heads")),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), Synonym("model.num_kv_heads")),
    **dict.fromkeys(("ffn_dim", "d_ff"), Synonym("model.intermediate_size")),
    **dict.fromkeys(("max_position_embeddings",), Synonym("model.max_position")),
    **dict.fromkeys(("tie_word_embeddings",), Synonym("model.tie_embeddings")),
    **dict.fromkeys(("offload_folder", "nvme_path", "offload_dir"), Synonym("storage.nvme")),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "bnb_4bit_quant_type"), _QUANTISED),
    **dict.fromkeys(("lora_r", "lora_rank"), _RANK),
    **dict.fromkeys(("lora_alpha",), Synonym("adapter.alpha")),
    **dict.fromkeys(("use_lora", "use_dora", "use_rslora", "peft_type", "finetuning_type"), _ADAPTER),
    **dict.fromkeys(("lora_target", "target_modules", "lora_target_modules"), _TARGETS),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), Synonym("adapter.start")),
    **dict.fromkeys(("report_to", "logger", "use_wandb"), _TRACKERS),
    **dict.fromkeys(("patience", "early_stopping"), _PATIENCE),
    **dict.fromkeys(
        ("context_parallel_size", "context_parallel_degree", "cp_size", "sequence_parallel_size"),
        Synonym("train.parallel"),
    ),
    **dict.fromkeys(("deepspeed", "fsdp", "world_size", "num_gpus", "tensor_parallel_size"), _NO_CLUSTER),
}
"""The last part of a name that somebody types, in lower case with `_` -> what it is here."""


def hint(key: str) -> str | None:
    """What to say of a name that another trainer has for a field; None for all other names."""
    result = SYNONYMS.get(key.rpartition(".")[2].strip().lower().replace("-", "_"))
    if result is None:
        return None
    if not result.key:
        return result.note
    return f"did you mean '{result.key}'?" + (f" ({result.note})" if result.note else "")
